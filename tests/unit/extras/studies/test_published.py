"""What docs/results says is what its own results.jsonl gives, and what measuring again gives."""

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
from sparseforge_ds.extras.studies.settings import CompareConfig, read_config
from sparseforge_ds.extras.studies.summary import markdown, results_tables, spread, summarize
from sparseforge_ds.extras.studies.texts import read_texts
from tests.distributed import ROOT
from tests.unit.extras.studies.test_figures import distinct_colours

RESULTS = ROOT / "docs" / "results"
STUDIES = sorted(path.parent for path in RESULTS.glob("*/results.jsonl"))
NAMES = [study.name for study in STUDIES]


@pytest.fixture(params=STUDIES, ids=NAMES)
def study(request: pytest.FixtureRequest, assets: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEFORGE_ASSETS", str(assets))
    monkeypatch.chdir(ROOT)
    found: Path = request.param
    return found


def read(study: Path) -> tuple[CompareConfig, list[dict[str, Any]], pd.DataFrame]:
    config = read_config(str(ROOT / "launch" / f"compare_{study.name}.json"))  # whose paths are from there
    rows = [json.loads(line) for line in (study / "results.jsonl").read_text().splitlines()]
    return config, rows, summarize(rows, config.compared_with)


def test_the_shipped_config_is_the_one_that_was_run(study: Path) -> None:
    assert (study / "config.json").read_text() == (ROOT / "launch" / f"compare_{study.name}.json").read_text()


def test_commands_have_no_path_of_the_machine_that_ran_them(study: Path) -> None:
    commands = [json.loads(line)["command"] or "" for line in (study / "results.jsonl").read_text().splitlines()]
    assert [word for command in commands for word in command.split() if word.startswith("/")] == []


def test_the_table_is_made_of_the_rows(study: Path) -> None:
    config, rows, lines = read(study)
    complete = {(m, s, b) for m in config.methods for s in config.seeds for b in config.budgets}
    assert {(r["method"], r["seed"], r["steps"]) for r in rows if r["kind"] == "result"} == complete
    made = all(Path(text).exists() for text in (config.train_text, config.test_text.path))  # by a script in launch/
    table = markdown(lines, rows, config, read_texts(config).notes if made else [])
    assert (study / "table.md").read_text() == table
    page = (RESULTS / "README.md").read_text()
    assert all(str(part) in page for part in results_tables(lines, config)), "docs/results/README.md has other tables"


def test_what_needs_no_training_measures_the_same_again(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and one-shot magnitude, which all studies share."""
    monkeypatch.setenv("SPARSEFORGE_ASSETS", str(assets))
    monkeypatch.chdir(ROOT)
    config, rows, _ = read(RESULTS / "stories")
    texts = read_texts(config)
    found = Evaluator(config, replace(texts, test=texts.test[:1]), config.pruned).baselines({})  # that is enough
    for kind, dense in (("dense", found["dense_validation"]), ("one_shot", found["magnitude_validation"])):
        published = next(row for row in rows if row["kind"] == kind and row["run"] is None)
        assert dense == pytest.approx(published["validation_perplexity"], rel=1e-4)


def on_the_test_text(study: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Mean and deviation on the test text, by method and steps."""
    rows = [json.loads(line) for line in (RESULTS / study / "results.jsonl").read_text().splitlines()]
    lines = [line for line in summarize(rows, "sparseforge").itertuples() if line.kind == "result"]
    return {(line.method, line.steps): (line.test, line.test_deviation) for line in lines}


def test_the_readme_has_these_numbers() -> None:
    section = (ROOT / "README.md").read_text().split("**Against other methods**")[1].split("\n**")[0]
    shown = re.findall(r"^\| `([a-z_.0-9]+)` \| ([0-9.± e-]+) \| ([0-9.± e-]+) \|$", section, flags=re.MULTILINE)
    found = on_the_test_text("defaults")
    budgets = sorted({steps for _, steps in found})
    assert {(name, steps): value for name, *values in shown for steps, value in zip(budgets, values, strict=True)} == {
        key: spread(*values) for key, values in found.items()
    }


def test_the_readme_says_no_more_than_the_tables() -> None:
    prose = " ".join((ROOT / "README.md").read_text().split())
    found = {study: {key: mean for key, (mean, _) in on_the_test_text(study).items()} for study in NAMES}
    defaults, ours = found["defaults"], "sparseforge"
    ahead = [
        1 - defaults[ours, s] / min(v for k, v in defaults.items() if k != (ours, s) and k[1] == s) for s in (150, 300)
    ]
    assert f"`{ours}` is first, by {ahead[0]:.1%} and {ahead[1]:.1%}." in prose
    long = found["defaults_long"]
    dense = json.loads((RESULTS / "defaults_long" / "results.jsonl").read_text().splitlines()[0])["test_perplexity"]
    lead, above = 1 - long[ours, 1200] / long["naive_retrain_sparsegpt", 1200], long[ours, 1200] / dense - 1
    assert f"it is {above:.1%} above dense, and [{lead:.1%} below the SparseGPT mask](" in prose
    others_there = {name: mean for (name, _), mean in long.items() if name != ours}
    assert len(others_there) == 5 and "the best of the five others there too" in prose
    assert min(others_there, key=others_there.__getitem__) == "naive_retrain_sparsegpt"
    assert f"brings {defaults[ours, 300]:.4g} to [{found['costs']['learned_k16', 300]:.2f}](" in prose
    others = {"naive_retrain_sparsegpt", "naive_retrain_wanda", "cast", "ast", "sr_ste"}
    mixture = found["mixture"]
    lead = 1 - mixture[ours, 300] / min(value for (name, _), value in mixture.items() if name in others)
    assert f"ahead of the best other method by {lead:.1%} (a mixture of experts)" in prose
    assert "ties with the SparseGPT mask (the demo's)" in prose
    for study in ("demo", "young"):
        lines = (RESULTS / study / "results.jsonl").read_text().splitlines()
        seeds: dict[str, dict[int, float]] = {ours: {}, "naive_retrain_sparsegpt": {}}
        for row in map(json.loads, lines):
            if row["kind"] == "result" and row["method"] in seeds:
                seeds[row["method"]][row["seed"]] = row["test_perplexity"]
        differences = [other - seeds[ours][seed] for seed, other in seeds["naive_retrain_sparsegpt"].items()]
        assert abs(statistics.mean(differences)) < statistics.stdev(differences)
    for study, steps, where in (("young", 200, "a young one"), ("books_methods", 150, "books-6m")):
        behind = [1 - found[study][name, steps] / found[study][ours, steps] for name in ("sr_ste", "ast")]
        assert f"by {behind[0]:.1%} and {behind[1]:.1%} on {where}" in prose
    of = found["young_unread"]
    behind = [1 - of[name, 200] / of[ours, 200] for name in ("sr_ste", "naive_retrain_magnitude")]
    assert f"SR-STE and a fixed magnitude mask are ahead, by {behind[0]:.1%} and {behind[1]:.1%}." in prose
    short = [1 - f["naive_retrain_sparsegpt", 40] / f[ours, 40] for f in (found["stories_short"], found["demo_short"])]
    assert f"its retrained mask is {short[0]:.1%} ahead here and {short[1]:.1%} on the demo's model" in prose
    start, plain = found["stories_start"], found["stories_short"] | {(ours, 150): defaults[ours, 150]}
    before, after = (
        " and ".join(", ".join(f"{of[name, steps]:.2f}" for steps in (40, 80, 150)).rsplit(", ", 1))
        for of, name in ((plain, ours), (start, "block_start"))
    )
    assert f"brings {before} after 40, 80 and 150 steps to {after}, for the compute" in prose
    added = found["rotated"]["sparseforge_falling_permute", 300]
    assert f"bring {defaults[ours, 300]:.4g} at 300 steps to {added:.2f} (three seeds), ahead of the two" in prose
    branch = found["rotated"]["sparseforge_falling_permute_k16", 300]
    assert f"the branch and these together to {branch:.2f}, {branch / dense - 1:.1%} above dense (" in prose
    without = {name: v for (name, steps), v in found["rotated"].items() if steps == 300 and not name.endswith("_k16")}
    assert added == min(without.values())


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
