"""Task files of lm-evaluation-harness for benchmark data in a folder, which a machine without the hub can run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparseforge_ds.data.local_rows import load_rows

_FOLDERS = {
    "arc_challenge": "ai2_arc/ARC-Challenge",
    "arc_easy": "ai2_arc/ARC-Easy",
    "boolq": "boolq",
    "gsm8k": "gsm8k/main",
    "hellaswag": "hellaswag",
    "humaneval": "openai_humaneval",
    "ifeval": "IFEval",
    "openbookqa": "openbookqa/main",
    "piqa": "piqa",
    "rte": "glue/rte",
    "winogrande": "winogrande/winogrande_xl",
}
"""Folder of a task's data below that of all benchmarks."""
_SPLITS = {
    **dict.fromkeys(("arc_challenge", "arc_easy", "openbookqa"), ("test", "validation|val")),
    **dict.fromkeys(("gsm8k", "humaneval"), ("test",)),
    "ifeval": (".*",),  # published as one file, which names no split
}
"""Splits that a task is scored on, the first that is there; validation for all others."""
_EXAMPLES = {"gsm8k": "train"}
"""Split that the examples of a prompt come from."""
_BUILDERS = {".arrow": "arrow", ".parquet": "parquet", ".jsonl": "json"}
_SPLIT = r"(?<![a-z]){}(?![a-z])"
"""Name of a split in a path, as a word."""


def has_data(folder: Path, task: str) -> bool:
    """Return whether a folder has the data of a task, by its layout."""
    return task in _FOLDERS and (folder / _FOLDERS[task]).is_dir()


def write_task_file(folder: Path, task: str, harness_file: Path, into: Path, with_examples: bool = True) -> None:
    """Write a task file that reads a benchmark's rows below `folder`, and the rest from the harness' own file.

    Args:
        folder: folder of all benchmarks.
        task: name of the task.
        harness_file: the harness' own file of it.
        into: folder of the new file.
        with_examples: also read the rows that a prompt's examples are taken from, if the task has such rows.

    Raises:
        ValueError: there are no rows of a split that the task is scored on.
    """
    # Find the rows.
    files = _files_of_split(folder / _FOLDERS[task], _SPLITS.get(task, ("validation|val",)))
    builder = _BUILDERS[files[0].suffix]
    paths = [str(file.resolve()) for file in files]
    data_files = {"test": paths}
    if with_examples and task in _EXAMPLES:
        examples = _files_of_split(folder / _FOLDERS[task], (_EXAMPLES[task],))
        data_files["train"] = [str(file.resolve()) for file in examples]
    train = "train" if "train" in data_files else None
    content: dict[str, Any] = {
        "include": str(harness_file),
        "task": task,
        "dataset_path": builder,
        "dataset_name": None,
        "dataset_kwargs": {"data_files": data_files},
        **{"training_split": train, "validation_split": None, "test_split": "test", "fewshot_split": train},
    }
    # Two benchmarks are also published in another form than the harness reads.
    if task == "boolq":
        content["doc_to_target"] = "{{label if label is defined else answer | int}}"
    if task == "hellaswag" and "gold" in load_rows(builder, data_files=paths, split="train").column_names:
        content |= {"process_docs": None, "doc_to_target": "{{gold}}"}
    (into / f"{task}.yaml").write_text(json.dumps(content))  # JSON is YAML


def _files_of_split(folder: Path, splits: Sequence[str]) -> list[Path]:
    """Return the files of the first of these splits that is there, all of one kind."""
    rows = sorted(file for file in folder.rglob("*") if file.suffix in _BUILDERS and not file.name.startswith("cache-"))
    for split in splits:
        for suffix in _BUILDERS:
            if files := [
                file for file in rows if file.suffix == suffix and _belongs_to(file.relative_to(folder), split)
            ]:
                return files
    raise ValueError(
        f"--include_path: no {' or '.join(_BUILDERS)} file below {folder} that is, or is in a folder, named "
        f"{' or '.join(splits).replace('|', ' or ')}"
    )


def _belongs_to(path: Path, split: str) -> bool:
    return re.search(_SPLIT.format(f"({split})"), str(path).lower()) is not None
