from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.evaluate.harness import FORMS, load_tasks
from sparseforge_ds.evaluate.published import SUITES
from sparseforge_ds.evaluate.task_data import Rows, find_data

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

# What a row of the original form says is right, read without the harness.
RIGHT: dict[str, Callable[[dict[str, Any]], str]] = {
    "arc_challenge": lambda row: row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])],
    "arc_easy": lambda row: row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])],
    "boolq": lambda row: "yes" if row["answer"] else "no",
    "hellaswag": lambda row: row["choices"][row["gold"]],
    "openbookqa": lambda row: row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])],
    "piqa": lambda row: row["sol1" if row["label"] == 0 else "sol2"],
    "rte": lambda row: "True" if row["label"] == 0 else "False",
    "winogrande": lambda row: row["sentence"].split("_")[0] + row[f"option{row['answer']}"],
}


def write(path: Path, *rows: dict[str, Any]) -> Rows:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return find_data(["piqa"], [f"piqa={path}"])["piqa"]


def test_the_answers_of_original_rows_are_those_that_the_harness_scores(assets: Path) -> None:
    benchmarks = assets / "benchmarks"
    if not benchmarks.is_dir():
        pytest.skip(f"no benchmarks in {assets}")
    names = [task for task in SUITES["paper"] if task != "race"]
    assert set(names) == set(RIGHT)
    hellaswag = benchmarks / "hellaswag" / "hellaswag_val_1k.jsonl"
    data = find_data(names, [str(benchmarks), f"hellaswag={hellaswag}"])
    loaded = load_tasks(names, data, limit=200)
    for name, task in loaded.by_name.items():
        rows = data[name].rows
        assert len(task.eval_docs) == len(rows)
        for doc, row in zip(task.eval_docs.select(range(200)), rows.select(range(200)), strict=True):
            gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
            assert task.doc_to_choice(doc)[gold] == RIGHT[name](row), (name, row)
    assert len(loaded.notes) == 1 and "boolq: its rows are those of google/boolq" in loaded.notes[0]


@pytest.mark.parametrize("name", SUITES["paper"])
def test_rows_without_a_column_of_the_task_are_refused(name: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl", ROWS[name] | {"more": 1})
    assert len(load_tasks([name], {name: whole}).by_name[name].eval_docs) == 1
    for number, column in enumerate(FORMS[name][0].columns):
        row = {key: value for key, value in ROWS[name].items() if key != column}
        lacking = write(tmp_path / f"{number}.jsonl", row)
        with pytest.raises(ValueError, match=f"its rows lack {column}, which {name} reads .they have ") as refused:
            load_tasks([name], {name: lacking})
        assert str(lacking.place) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "change", "said"),
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
    name: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS[name], ROWS[name] | change)
    with pytest.raises(ValueError, match=f"--data {rows.place}: ") as refused:
        load_tasks([name], {name: rows})
    assert said in str(refused.value)
    if "row 2" in said:  # the limit is what will be asked
        assert load_tasks([name], {name: rows}, limit=1).by_name


def test_answers_of_boolq_that_are_not_true_or_false_are_refused(tmp_path: Path) -> None:
    row = {"question": "did a cat sit", "passage": "A cat sat."}
    with pytest.raises(ValueError, match="'yes' is not in list"):
        load_tasks(["boolq"], {"boolq": write(tmp_path / "rows.jsonl", row | {"answer": "yes"})})


def test_tasks_outside_the_suites(tmp_path: Path) -> None:
    """`wnli_eu` reads its answer by a bare name, which the harness takes for a text where there is no such column."""
    row = {"sentence1": "A cat sat.", "sentence2": "It sat."}
    good = write(tmp_path / "good.jsonl", row | {"label": 1})
    assert load_tasks(["wnli_eu"], {"wnli_eu": good}).notes == []
    bad = write(tmp_path / "bad.jsonl", row | {"answer": 1})
    with pytest.raises(ValueError, match="does not fit wnli_eu .*its rows lack label; they have sentence1"):
        load_tasks(["wnli_eu"], {"wnli_eu": bad})
