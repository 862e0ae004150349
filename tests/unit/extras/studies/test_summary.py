from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.studies.settings import read_comparison
from sparseforge_ds.extras.studies.summary import inference_cost, markdown, results_tables, spread, summarize
from tests.unit.extras.studies.test_settings import write


def row(
    method: str, seed: int, test: float | None, steps: int = 40, kind: str = "result", **more: Any
) -> dict[str, Any]:
    values = {"kind": kind, "method": method, "run": f"{method}{seed}{steps}", "seed": seed, "steps": steps}
    values |= {"tokens": steps * 8 * 256, "learning_rate": 2e-3, "decides": False, "chosen": True, "seconds": 10.0}
    return values | {"validation_perplexity": test, "test_perplexity": test, "at_the_edge": False} | more


METHODS: dict[str, Any] = {"ours": {}, "fixed": {"method": "naive_retrain"}, "broken": {}}
ROWS = [
    row("dense", 0, 3.0, 0, "dense", learning_rate=None, seconds=None),
    row("ours", 0, 5.0),
    row("ours", 3, 6.0),
    row("fixed", 0, 5.5, at_the_edge=True),
    row("fixed", 3, 6.9, at_the_edge=True),
    row("broken", 0, 5.0),
    row("broken", 3, None, diverged="the loss is nan"),
    row("fixed", 3, 9.0, kind="tried", learning_rate=1e-3, decides=True, chosen=False),
]


def test_seeds_have_a_mean_and_a_sample_deviation() -> None:
    (line,) = summarize([row("a", seed, value) for seed, value in enumerate((1.0, 2.0, 6.0))], "a").itertuples()
    assert line.test == 3.0 and line.test_deviation == pytest.approx(math.sqrt(7.0)) and line.seeds == 3
    assert spread(line.test, line.test_deviation) == "3 ± 2.6"
    (alone,) = summarize([row("a", 0, 4.25)], "a").itertuples()
    assert math.isnan(alone.test_deviation) and spread(alone.test, alone.test_deviation) == "4.25"
    (lost,) = summarize([row("a", 0, 1.0), row("a", 1, None)], "a").itertuples()
    assert spread(lost.test, lost.test_deviation) == "diverged" and math.isnan(lost.test_deviation)


def test_a_figure_that_a_finite_run_lacks_is_unknown_and_not_diverged() -> None:
    figures = ({"task_a_lost": 0.25, "test_kl": 0.5}, {"test_kl": 0.5}, {"task_a_lost": 0.5})
    rows = [row(name, 0, test, **more) for name, test, more in zip("abc", (5.0, 6.0, None), figures, strict=True)]
    lines = {line.method: line for line in summarize(rows, "a").itertuples()}
    texts = {name: [spread(line.task_a_lost, math.nan), spread(line.test_kl, math.nan)] for name, line in lines.items()}
    assert texts == {"a": ["0.25", "0.5"], "b": ["", "0.5"], "c": ["0.5", "diverged"]}


def test_differences_are_taken_seed_by_seed() -> None:
    table = summarize(ROWS, "ours")
    assert [*table["method"]] == ["dense", "ours", "fixed", "broken"]
    lines = {line.method: line for line in table.itertuples()}
    fixed = lines["fixed"]
    assert fixed.behind == pytest.approx(0.7)
    assert fixed.behind_deviation == pytest.approx(math.sqrt(2 * 0.2**2)), "not the deviation of independent samples"
    assert not any(math.isfinite(lines[name].behind) for name in ("ours", "broken", "dense"))
    assert fixed.seeds == 2, "a run that only decided a learning rate does not count"
    assert fixed.at_the_edge and fixed.seconds == 10.0 and math.isnan(lines["dense"].seconds)
    diverged = [{**row, "test_perplexity": None if row["method"] == "ours" else row["test_perplexity"]} for row in ROWS]
    assert not np.isfinite(summarize(diverged, "ours")["behind"].astype(float)).any(), "nor with a lost reference"


def test_the_table_of_one_seed_speaks_of_no_deviation(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row["seed"] == 0]
    several, single = (read_comparison(write(tmp_path, seeds=seeds, methods=METHODS)) for seeds in ([0, 3], [0]))
    assert "mean ± sample standard deviation over seeds" in markdown(summarize(ROWS, "ours"), ROWS, several, [])
    alone = markdown(summarize(rows, "ours"), rows, single, [])
    assert "Perplexity per token, of seed 0 alone. At" in alone and "±" not in alone


def test_the_table_has_cost_rates_and_scores_of_every_method(tmp_path: Path) -> None:
    config = read_comparison(write(tmp_path, methods=METHODS))
    text = markdown(summarize(ROWS, "ours"), ROWS, config, ["3 of 4 documents are odd."])
    lines = text.splitlines()
    cost = "0.5625 | 0.5"
    assert lines[0].startswith("| method | bytes | multiplications | tokens | learning rate | seeds |")
    assert "| dense | 1 | 1 |  |  |  | 3 | 3 |  |  |  |" in lines
    assert f"| ours | {cost} | 81,920 | 0.002 | 2 | 5.5 ± 0.71 | 5.5 ± 0.71 | 83.3% |  | 10 s |" in lines
    fixed = "0.002 (edge) | 2 | 6.2 ± 0.99 | 6.2 ± 0.99 | 106.7% | +0.7 ± 0.28 | 10 s |"
    assert f"| fixed | {cost} | 81,920 | {fixed}" in lines
    assert f"| broken | {cost} | 81,920 | 0.002 | 2 | diverged | diverged |  |  | 10 s |" in lines
    assert "- 3 of 4 documents are odd." in lines and "at 40 steps, seed 3;" in text
    assert "| fixed | 40 | 9 |" in lines, "what was tried and not chosen is shown too"
    chosen = row("fixed", 3, 4.0, decides=True)
    assert "| fixed | 40 | 9 | **4** |" in markdown(summarize(ROWS, "ours"), [*ROWS, chosen], config, [])


def test_rates_that_every_budget_chose_are_shown_with_it(tmp_path: Path) -> None:
    config = read_comparison(write(tmp_path, methods=METHODS, choose_at_each_budget=True))
    tried: dict[str, Any] = {"kind": "tried", "decides": True, "chosen": False}
    rows = [row("fixed", 3, 9.0, learning_rate=1e-3, **tried), row("fixed", 3, 4.0, decides=True)]
    rows += [row("fixed", 3, 3.0, 80, learning_rate=1e-3, decides=True), row("fixed", 3, 3.5, 80, **tried)]
    text = markdown(summarize([*ROWS, *rows], "ours"), [*ROWS[:-1], *rows], config, [])
    assert "| fixed | 40 | 9 | **4** |" in text and "| fixed | 80 | **3** | 3.5 |" in text
    assert "at each budget, seed 3;" in text


def test_other_patterns_stand_beside_what_they_cost(tmp_path: Path) -> None:
    methods = {"wider": {"pattern": "3:4"}, "ours": {}, "longer": {"pattern": "4:8"}}
    config = read_comparison(write(tmp_path, methods=methods, reference="ours"))
    rows = [ROWS[0], row("one-shot magnitude", 0, 9.0, 0, "one_shot", learning_rate=None, seconds=None)]
    rows += [row("wider", 0, 4.0), row("ours", 0, 5.0), row("longer", 0, 4.5)]
    first, second = results_tables(summarize(rows, "ours"), config)
    assert [cells[0] for cells in first.rows] == ["dense", "one-shot magnitude", "longer", "ours"]
    assert [cells[:3] for cells in second.rows] == [["wider", "0.7812", "0.75"]]
    assert "One-shot magnitude has the pattern of ours, 2:4." in markdown(summarize(rows, "ours"), rows, config, [])


def test_rows_with_a_branch_have_a_table_of_their_own(tmp_path: Path) -> None:
    methods = {"ours": {}, "branched": {"low_rank": {"k": 4}}, "cast": {"method": "cast", "decays": [0.1, 0.2]}}
    config = read_comparison(write(tmp_path, methods=methods, reference="ours"))
    rows = [ROWS[0], row("one-shot magnitude", 0, 9.0, 0, "one_shot", learning_rate=None, seconds=None)]
    rows += [row("ours", 0, 5.0), row("branched", 0, 4.0)]
    rows += [row("cast", 0, 4.5, decay=0.1, decay_at_the_edge=True)]
    rows += [row("cast", 0, 4.6, kind="tried", decay=0.2, decides=True, chosen=False)]
    first, second = results_tables(summarize(rows, "ours"), config)
    assert [cells[0] for cells in first.rows] == ["dense", "one-shot magnitude", "cast", "ours"]
    assert first.rows[2][4] == "0.002, decay 0.1 (edge)"
    assert second.head[0] == "method, at another cost"
    assert [cells[:3] for cells in second.rows] == [["branched", "0.8125", "0.75"]]
    text = markdown(summarize(rows, "ours"), rows, config, [])
    assert f"{first}\n{second}" in text and "(edge) marks the smallest or the largest" in text
    assert "| cast, decay 0.2 | 40 | 4.6 |" in text


def test_a_start_counts_and_what_was_not_recorded_is_not_guessed(tmp_path: Path) -> None:
    methods: dict[str, Any] = {"ours": {}, "old": {}, "control": {"method": "naive_retrain", "pattern": "4:4"}}
    config = read_comparison(write(tmp_path, methods=methods, reference="ours", one_shot={}))
    no_start = {"start": {"tokens": 0, "epochs": 1, "seconds": 0.0, "rms": 0.1}, "tokens_a_weight": 1.5, "path": 0.64}
    start = {"start": {"tokens": 4096, "epochs": 4, "seconds": 4.0, "rms": 0.1}, "tokens_a_weight": 2.25, "path": 0.64}
    rows = [ROWS[0], row("ours", 0, 5.0, seconds=14.0, **start), row("old", 0, 5.5), row("control", 0, 3.0, **no_start)]
    lines = summarize(rows, "ours")
    (first,) = results_tables(lines, config)
    assert first.head[3:7] == ["tokens", "start's tokens", "tokens a weight", "path"]
    assert first.head[-3:] == ["training", "start", "steps of control"]
    dense, control, ours, old = first.rows
    assert ours[3:7] == ["81,920", "4,096 x 4", "2.25", "0.64"] and ours[-3:] == ["14 s", "4 s", "56"]
    assert old[3:7] == ["81,920", *["not recorded"] * 3] and old[-3:] == ["10 s", "not recorded", "40"]
    assert control[3:7] == ["81,920", "0", "1.5", "0.64"] and control[-3:] == ["10 s", "0 s", "40"]
    assert dense[4:7] == ["", "", ""] and dense[-2:] == ["", ""]
    text = markdown(lines, rows, config, [])
    assert "Path is steps x learning rate x mean of" in text and "Steps of control are the training time" in text
    assert "start's tokens" not in markdown(summarize([ROWS[0], rows[2]], "ours"), rows, config, [])


@pytest.mark.parametrize(
    ("pattern", "k", "cost"),
    [
        ("2:4", None, (0.5625, 0.5)),
        ("2:4", 16, (0.625, 0.5625)),
        ("4:8", None, (0.5625, 0.5)),
        ("3:4", None, (50 / 64, 0.75)),
        ("4:8 pairs", None, (68 / 128, 0.5)),
        ("1:4", None, (18 / 64, 0.25)),
        ("block16", None, (0.5625, 0.5)),
    ],
)
def test_cost_of_a_pruned_matrix(pattern: str, k: int | None, cost: tuple[float, float]) -> None:
    low_rank = None if k is None else {"k": k, "shift": False}
    inference = inference_cost(SparseForgeConfig.from_dict({"pattern": pattern, "low_rank": low_rank}))
    assert (inference.bytes, inference.multiplications) == cost


def test_quantized_values_take_fewer_bytes() -> None:
    dense = {"pattern": "4:4", "method": "naive_retrain", "importance": "magnitude", "quantize": {"group_size": None}}
    bits = {"2:4": {"quantize": {}}, "2:4, 8 bits": {"quantize": {"bits": 8, "group_size": None}}, "dense": dense}
    cost = {name: 16 * inference_cost(SparseForgeConfig.from_dict(block)).bytes for name, block in bits.items()}
    assert cost == {"2:4": 3.125, "2:4, 8 bits": 5.0, "dense": 4.0}


def test_closeness_has_a_column_for_every_text(tmp_path: Path) -> None:
    texts = {"WikiText-2|raw": {"path": "stdlib:heldout"}}
    config = read_comparison(write(tmp_path, methods={"ours": {}}, other_texts=texts, choose_by="kl"))
    measured = [(0.2, 0.3), (0.4, 0.5)]
    rows = [row("dense", 0, 3.0, 0, "dense", learning_rate=None, seconds=None, test_kl=0.0)]
    rows[0]["WikiText-2|raw_kl"] = 0.0
    for seed, (test, wiki) in enumerate(measured):
        rows.append(row("ours", seed, 5.0, test_kl=test) | {"WikiText-2|raw_kl": wiki})
    tried: dict[str, Any] = {"kind": "tried", "decides": True, "chosen": False, "validation_kl": 0.25}
    rows += [row("ours", 0, 4.0, learning_rate=1e-3, **tried)]
    text = markdown(summarize(rows, "ours"), rows, config, [])
    assert "| KL test | KL WikiText-2\\|raw | training |" in text and "| 0.3 ± 0.14 | 0.4 ± 0.14 | 10 s |" in text
    assert "validation KL at learning rate" in text and "| ours | 40 | 0.25 |" in text
    assert "KL(dense || model)" in text and "chosen by the KL to the dense model on the validation text" in text
