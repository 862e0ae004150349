"""Tables in studies/ and on the pages, against their rows and against measuring again."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("matplotlib")

from sparseforge_ds.extras.studies.assessment import Evaluator
from sparseforge_ds.extras.studies.settings import CompareConfig, read_comparison
from sparseforge_ds.extras.studies.summary import markdown, results_tables, spread, summarize
from sparseforge_ds.extras.studies.texts import read_texts
from tests.distributed import ROOT
from tests.unit.extras.studies.test_figures import distinct_colours

RESULTS = ROOT / "studies"
STUDIES = sorted(path.parent for path in RESULTS.glob("*/results.jsonl"))
NAMES = [study.name for study in STUDIES]


@pytest.fixture(params=STUDIES, ids=NAMES)
def study(request: pytest.FixtureRequest, assets: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEFORGE_ASSETS", str(assets))
    monkeypatch.chdir(ROOT)
    folder: Path = request.param
    return folder


GONE = {"permute": None, "cautious": None, "importance": "gauss_newton"}
"""Keys of methods that earlier versions had, or such values. Their rows stay published, with the `config.json` that was
run."""


def gone(method: dict[str, Any]) -> set[str]:
    return {key for key, value in GONE.items() if key in method and value in (None, method[key])}


def methods_of(config: Path) -> dict[str, Any]:
    methods: dict[str, Any] = json.loads(config.read_text())["methods"]
    return methods


def read(study: Path, folder: Path) -> tuple[CompareConfig, list[dict[str, Any]], pd.DataFrame]:
    """Return the study's configuration without options that are gone, its rows, and their summary."""
    before = study / "config.json"
    content = json.loads((before if before.exists() else RESULTS / f"{study.name}.json").read_text())
    for method in content["methods"].values():
        for key in gone(method):
            del method[key]
    content["base"] = str(RESULTS / content["base"])  # paths are from studies/
    text = json.dumps(content).replace('"../', f'"{ROOT}/')
    (folder / "config.json").write_text(text)
    config = read_comparison(str(folder / "config.json"))
    rows = [json.loads(line) for line in (study / "results.jsonl").read_text().splitlines()]
    return config, rows, summarize(rows, config.compared_with)


def test_what_can_be_run_today_is_what_was_run() -> None:
    """Without the methods whose options are gone, and without a file where these were the study."""
    for before in RESULTS.glob("*/config.json"):
        today = {name: method for name, method in methods_of(before).items() if not gone(method)}
        assert today != methods_of(before), before
        if (shipped := RESULTS / f"{before.parent.name}.json").exists():
            assert json.loads(shipped.read_text()) == {**json.loads(before.read_text()), "methods": today}


def test_commands_have_no_path_of_the_machine_that_ran_them(study: Path) -> None:
    commands = [json.loads(line)["command"] or "" for line in (study / "results.jsonl").read_text().splitlines()]
    assert [word for command in commands for word in command.split() if word.startswith("/")] == []


def test_the_table_is_made_of_the_rows(study: Path, tmp_path: Path) -> None:
    config, rows, lines = read(study, tmp_path)
    complete = {(m, s, b) for m in config.methods for s in config.seeds for b in config.budgets}
    assert {(r["method"], r["seed"], r["steps"]) for r in rows if r["kind"] == "result"} == complete
    made = all(Path(text).exists() for text in (config.train_text, config.test_text.path))  # by a script in launch/
    table = markdown(lines, rows, config, read_texts(config).notes if made else [])
    assert (study / "table.md").read_text() == table
    page = (RESULTS / "README.md").read_text()
    assert all(str(part) in page for part in results_tables(lines, config)), "studies/README.md has other tables"


def test_what_needs_no_training_measures_the_same_again(
    assets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dense and one-shot magnitude, which all studies share."""
    monkeypatch.setenv("SPARSEFORGE_ASSETS", str(assets))
    monkeypatch.chdir(ROOT)
    config, rows, _ = read(RESULTS / "stories", tmp_path)
    texts = read_texts(config)
    measured = Evaluator(config, replace(texts, test=texts.test[:1]), config.pruned).baselines({})  # that is enough
    for kind, dense in (("dense", measured["dense_validation"]), ("one_shot", measured["magnitude_validation"])):
        published = next(row for row in rows if row["kind"] == kind and row["run"] is None)
        assert dense == pytest.approx(published["validation_perplexity"], rel=1e-4)


def on_the_test_text(study: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Mean and deviation on the test text, by method and steps."""
    rows = [json.loads(line) for line in (RESULTS / study / "results.jsonl").read_text().splitlines()]
    lines = [line for line in summarize(rows, "sparseforge").itertuples() if line.kind == "result"]
    return {(line.method, line.steps): (line.test, line.test_deviation) for line in lines}


METHOD_OF = {
    "`naive_retrain`, SparseGPT's mask": "naive_retrain_sparsegpt",
    "`naive_retrain`, Wanda's mask": "naive_retrain_wanda",
}
"""Method of a study, by its label on a page."""
METHOD_TABLE = re.compile(r"^\| method \| .*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/results/methods.md"])
def test_tables_of_methods_have_the_numbers_of_the_rows(page: str) -> None:
    (table,) = METHOD_TABLE.finditer((ROOT / page).read_text())
    budgets = [int(steps.replace(",", "")) for steps in re.findall(r"([\d,]+) steps", table[0].splitlines()[0])]
    measured = {
        (method, steps): spread(*value)
        for study in (
            "stories_start",
            "stories_start_long",
            "stories_short",
            "stories_others",
            "defaults",
            "defaults_long",
        )
        for (method, steps), value in on_the_test_text(study).items()
    }
    for line in table[1].splitlines():
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        method = "block_start" if "block-wise start" in label else METHOD_OF.get(label, label.split("`")[1])
        assert dict(zip(budgets, cells, strict=True)) == {b: measured.get((method, b), "not run") for b in budgets}, (
            label
        )
    assert len(table[1].splitlines()) <= (7 if page == "README.md" else 10)


def test_the_pages_say_no_more_than_the_tables() -> None:
    # The pages, and the means of the committed rows.
    methods = " ".join((ROOT / "docs" / "results" / "methods.md").read_text().split())
    close = (ROOT / "docs" / "results" / "close.md").read_text()
    means = {study: {key: mean for key, (mean, _) in on_the_test_text(study).items()} for study in NAMES}
    defaults = means["defaults"]
    long = means["defaults_long"]
    ours = "sparseforge"
    dense = json.loads((RESULTS / "defaults_long" / "results.jsonl").read_text().splitlines()[0])["test_perplexity"]
    # close.md: distances from the dense model.
    for perplexity in (
        defaults[ours, 300],
        long[ours, 1200],
        means["rotated_long"][ours, 1200],
    ):
        assert f"| {dense:.3f} | {perplexity:.3f} | {perplexity / dense - 1:.1%} |" in close
    # methods.md: the lead on the mixture, and what SR-STE leads by.
    other_methods = {"naive_retrain_sparsegpt", "naive_retrain_wanda", "cast", "ast", "sr_ste"}
    mixture = means["mixture"]
    lead = 1 - mixture[ours, 300] / min(value for (name, _), value in mixture.items() if name in other_methods)
    assert f"moving masks are {lead:.1%} ahead of the best other method (a mixture)" in methods
    behind = [1 - means[s]["sr_ste", n] / means[s][ours, n] for s, n in (("young", 200), ("books_methods", 150))]
    assert f"are behind SR-STE by {behind[0]:.1%} (a young model) and {behind[1]:.1%} (books-6m)" in methods
    # The demo is a draw: the difference is within the scatter of its seeds.
    demo: dict[str, dict[int, float]] = {ours: {}, "naive_retrain_sparsegpt": {}}
    for row in map(json.loads, (RESULTS / "demo" / "results.jsonl").read_text().splitlines()):
        if row["kind"] == "result" and row["method"] in demo:
            demo[row["method"]][row["seed"]] = row["test_perplexity"]
    differences = [other - demo[ours][seed] for seed, other in demo["naive_retrain_sparsegpt"].items()]
    assert abs(statistics.mean(differences)) < statistics.stdev(differences) and "draw (the demo's)" in methods
    # What a start is worth in steps.
    start = means["stories_start"]["block_start", 40]
    assert f"({defaults[ours, 150]:.3f}) cost about as much as 40 steps after a start ({start:.3f})" in methods


def test_every_choice_with_the_defaults_is_inside_its_grid() -> None:
    for name in (
        "books",
        "books_methods",
        "defaults",
        "defaults_additions",
        "defaults_long",
        "demo",
        "demo_short",
        "mixture",
        "rotated",
        "stories_short",
        "young",
        "young_unread",
    ):
        assert "(edge)" not in (RESULTS / name / "table.md").read_text()


def test_figures_show_something(study: Path) -> None:
    figures = sorted((study / "figures").glob("*.png"))
    assert figures
    for figure in figures:
        assert distinct_colours(figure) > 20, f"{figure} is blank"
        assert f"{study.name}/figures/{figure.name}" in (RESULTS / "README.md").read_text()
