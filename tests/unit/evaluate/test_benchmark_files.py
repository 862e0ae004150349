from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from sparseforge_ds.evaluate.harness import load_tasks
from tests.task_files import write_task
from tests.unit.evaluate.test_harness import ROWS

pytest.importorskip("lm_eval")

PREPARED = {"query": "Cats: A cat it", "choices": ["sat.", "xyl."], "gold": 0}


def rows_of(task: str, folder: Path) -> list[dict[str, Any]]:
    loaded = load_tasks([task], str(folder)).by_name[task]
    return [{"choices": loaded.doc_to_choice(row), "answer": loaded.doc_to_target(row)} for row in loaded.eval_docs]


def test_every_published_form_of_a_benchmark_is_read(tmp_path: Path) -> None:
    """Raw and prepared HellaSwag and BoolQ of two collections, as .parquet, .jsonl and .arrow."""
    answered = {key: value for key, value in ROWS["boolq"].items() if key != "label"} | {"answer": True}
    for name, task, folder, row, suffix in (
        ("raw", "hellaswag", "hellaswag/data", ROWS["hellaswag"], ".parquet"),
        ("prepared", "hellaswag", "hellaswag", PREPARED, ".jsonl"),
        ("labelled", "boolq", "boolq", ROWS["boolq"], ".parquet"),
        ("answered", "boolq", "boolq/none/validation", answered, ".arrow"),
    ):
        data = Dataset.from_list([row, row])
        target = tmp_path / name / folder
        target.mkdir(parents=True)
        if suffix == ".arrow":
            data.save_to_disk(target)
        elif suffix == ".parquet":
            data.to_parquet(target / "validation-00000-of-00001.parquet")
        else:
            data.to_json(target / "hellaswag_val_1k.jsonl")
        expected = {"hellaswag": (["sat.", "xyl."], 0), "boolq": (["no", "yes"], 1)}[task]
        rows = rows_of(task, tmp_path / name)
        assert [(entry["choices"], entry["answer"]) for entry in rows] == [expected, expected], name


def test_the_split_of_the_harness_is_scored(tmp_path: Path) -> None:
    """Test before validation, never rows to train on; a task file of the user's own before both."""
    target = tmp_path / "ai2_arc" / "ARC-Easy"
    target.mkdir(parents=True)

    def add(split: str, count: int) -> None:
        Dataset.from_list([ROWS["arc_easy"]] * count).to_parquet(target / f"{split}-00000-of-00001.parquet")

    add("train", 3)
    with pytest.raises(ValueError, match="--include_path: no .* file below .*ARC-Easy that is, .* named test or valid"):
        load_tasks(["arc_easy"], str(tmp_path))
    add("validation", 2)
    assert len(rows_of("arc_easy", tmp_path)) == 2
    add("test", 1)
    assert len(rows_of("arc_easy", tmp_path)) == 1
    Dataset.from_list([ROWS["arc_easy"]] * 4).to_json(tmp_path / "own.jsonl")
    write_task(tmp_path, "arc_easy", tmp_path / "own.jsonl")
    assert len(rows_of("arc_easy", tmp_path)) == 4
