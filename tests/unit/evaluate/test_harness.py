from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.evaluate.harness import load_tasks
from sparseforge_ds.evaluate.paper_accuracies import SUITES
from tests.task_files import write_task

pytest.importorskip("lm_eval")

CHOICES = {"text": ["a cat", "a dog"], "label": ["A", "B"]}
ROWS: dict[str, dict[str, Any]] = {
    "arc_challenge": {"question": "Who sat?", "choices": CHOICES, "answerKey": "B"},
    "arc_easy": {"question": "Who sat?", "choices": CHOICES, "answerKey": "B"},
    "boolq": {"question": "did a cat sit", "passage": "A cat sat.", "label": 1},
    "hellaswag": {"activity_label": "Cats", "ctx_a": "A cat", "ctx_b": "it", "endings": ["sat.", "xyl."], "label": "0"},
    "openbookqa": {"question_stem": "Who sat?", "choices": CHOICES, "answerKey": "A"},
    "piqa": {"goal": "Sit down.", "sol1": "On a mat.", "sol2": "On a xyl.", "label": 0},
    "race": {
        "article": "The cat sat.",
        "problems": "[{'question': 'Who?', 'options': ['a', 'b', 'c', 'd'], 'answer': 'A'}]",
    },
    "rte": {"sentence1": "A cat sat.", "sentence2": "It sat.", "label": 0},
    "winogrande": {"sentence": "The cat saw the dog as _ sat.", "option1": "cat", "option2": "dog", "answer": "1"},
}
"""A row of every task of the suite, as the harness reads it."""


def write(folder: Path, name: str, *rows: dict[str, Any]) -> str:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(write_task(folder, name, folder / f"{name}.jsonl"))


@pytest.mark.parametrize("name", SUITES["paper"])
def test_a_task_file_of_ones_own_takes_the_place_of_the_harness(name: str, tmp_path: Path) -> None:
    loaded = load_tasks([name], write(tmp_path, name, ROWS[name]))
    assert len(loaded.by_name[name].eval_docs) == 1 and name in loaded.manager.all_tasks


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("piqa", {"label": -1}, "row 2: its answer -1 is none of its 2 choices"),
        ("rte", {"label": 2}, "row 2: its answer 2 is none of its 2 choices"),
        ("arc_easy", {"answerKey": ""}, "'' is not in list"),
        ("openbookqa", {"answerKey": "E"}, "'E' is not in list"),
        ("winogrande", {"answer": ""}, "KeyError: ''"),
        ("hellaswag", {"label": ""}, "invalid literal for int"),
        ("race", {"problems": "[{"}, "SyntaxError"),
    ],
)
def test_rows_whose_answer_is_secret_or_damaged_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, name, ROWS[name], ROWS[name] | change)
    with pytest.raises(ValueError, match=f"--tasks {name}: the data does not fit {name} ") as refused:
        load_tasks([name], folder)
    assert message in str(refused.value)
    if "row 2" in message:  # the limit is what will be asked
        assert load_tasks([name], folder, limit=1).by_name


def test_missing_benchmark_data_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "piqa", ROWS["piqa"])
    (tmp_path / "piqa.jsonl").unlink()
    with pytest.raises(ValueError, match=r"--tasks piqa: its data cannot be read \(FileNotFoundError: .*piqa.jsonl"):
        load_tasks(["piqa"], folder)


def test_tasks_outside_the_suites_need_the_columns_that_they_name(tmp_path: Path) -> None:
    """`wnli_eu` reads its answer by a bare name, which the harness takes for a text where there is no such column."""
    row = {"sentence1": "A cat sat.", "sentence2": "It sat."}
    assert load_tasks(["wnli_eu"], write(tmp_path, "wnli_eu", row | {"label": 1})).by_name
    with pytest.raises(ValueError, match="does not fit wnli_eu .*its rows lack label; they have sentence1"):
        load_tasks(["wnli_eu"], write(tmp_path, "wnli_eu", row | {"answer": 1}))
    with pytest.raises(ValueError, match="--include_path .*none: no such folder"):
        load_tasks(["wnli_eu"], str(tmp_path / "none"))


def test_task_files_in_downloaded_data_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the benchmark's own name is passed over for the generated one; others are refused, and groups, too."""
    data = tmp_path / "ai2_arc" / "ARC-Easy"
    data.mkdir(parents=True)
    (data / "test.jsonl").write_text(json.dumps(ROWS["arc_easy"]) + "\n")
    (data / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef docs(rows):\n    return rows\n")
    body = "dataset_path: json\nprocess_docs: !function planted.docs\noutput_type: multiple_choice\n"
    for name in ("arc_easy", "cats"):
        (data / f"{name}.yaml").write_text(f"task: {name}\ntag: animals\n{body}")
    (data / "zoo.yaml").write_text("group: zoo\ntask: [cats, {task: dogs}]\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # files that are written for a benchmark lie there
    assert len(load_tasks(["arc_easy"], str(tmp_path)).by_name["arc_easy"].eval_docs) == 1
    with pytest.raises(ValueError, match="--tasks cats: its task file .*cats.yaml is in a subfolder of --include_path"):
        load_tasks(["cats"], str(tmp_path))
    for group, member in (("animals", "arc_easy"), ("zoo", "cats")):
        with pytest.raises(ValueError, match=f"--tasks {group}: a group; name tasks of it, like {member}"):
            load_tasks([group], str(tmp_path))
    # The user's own file of that name counts.
    own = {"task": "cats", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{data}/test.jsonl"}}}
    own |= {"output_type": "multiple_choice", "test_split": "test", "doc_to_text": "question", "doc_to_target": 0}
    (tmp_path / "cats.yaml").write_text(json.dumps(own | {"doc_to_choice": ["a", "b"]}))
    assert load_tasks(["cats"], str(tmp_path)).by_name["cats"].config.doc_to_choice == ["a", "b"]
    assert not (tmp_path / "ran").exists()


def test_chosen_answers_have_no_examples_and_a_task_that_names_some_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, "piqa", ROWS["piqa"])
    write_task(tmp_path, "piqa", tmp_path / "piqa.jsonl", num_fewshot=5)
    assert load_tasks(["piqa"], folder).by_name["piqa"].config.num_fewshot == 0
    assert "piqa: measured without examples; the task's own number is 5" in capsys.readouterr().err
