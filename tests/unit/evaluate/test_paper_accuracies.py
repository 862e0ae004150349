from __future__ import annotations

import pytest

from sparseforge_ds.evaluate.paper_accuracies import MEANS, PAPER_ACCURACIES, SUITES, accuracy_table, mean_accuracy

SEVEN = {
    task: {"acc": 0.1 * i, "acc_stderr": 0.01, "acc_norm": 0.9, "acc_norm_stderr": 0.02, "items": 100.0}
    for i, task in enumerate(SUITES["with_race"])
}


def test_the_suites_are_seven_of_nine() -> None:
    assert len(SUITES["paper"]) == 9
    for suite in MEANS:
        assert len(SUITES[suite]) == 7 and set(SUITES[suite]) < set(SUITES["paper"])
    for accuracies in PAPER_ACCURACIES.values():
        assert set(accuracies.dense) | set(accuracies.sparse) <= {*SUITES["paper"], *MEANS, "seven"}


def test_the_mean_is_plain_acc_and_needs_every_task() -> None:
    assert mean_accuracy(SEVEN, "with_race") == pytest.approx(0.3)
    assert mean_accuracy(SEVEN, "with_rte") is None


def test_ours_beside_the_papers_and_empty_where_nothing_is_known() -> None:
    lines = accuracy_table({"this": SEVEN}, "llama2-7b").splitlines()
    assert lines[0] == "| task | items | this: acc | this: acc_norm | paper, dense llama2-7b | paper, 2:4, 5B tokens |"
    assert "| arc_challenge | 100 | 0.00 ± 1.00 | 90.00 ± 2.00 | 43.52 |  |" in lines
    assert "| race | 100 | 50.00 ± 1.00 | 90.00 ± 2.00 | 39.52 | 41.63 |" in lines
    assert "| piqa | 100 | 60.00 ± 1.00 | 90.00 ± 2.00 |  |  |" in lines
    assert lines[-1].endswith("| 30.00 |  | 56.43 | 57.27 |") and len(lines) == 2 + 7 + 1
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_a_task_without_acc_has_a_row_for_each_of_its_metrics() -> None:
    metrics = {"perplexity": 31.5, "perplexity_stderr": 0.5, "exact_match,strict": 0.25, "bleu": 25.3, "items": 8.0}
    lines = accuracy_table({"this": {"a_task": metrics}}, "llama2-7b").splitlines()
    both = accuracy_table({"this": {"a_task": {**metrics, "bleu": 0.9}}, "dense": {"a_task": metrics}}, None)
    assert "| a_task, bleu | 8 | 0.90 |  | 25.30 |  |" in both, "one unit in a row"
    assert lines[2:5] == [
        "| a_task, perplexity | 8 | 31.50 ± 0.50 |  |  |  |",
        "| a_task, exact_match, strict | 8 | 25.00 |  |  |  |",
        "| a_task, bleu | 8 | 25.30 |  |  |  |",
    ]


def test_a_table_without_a_paper_has_both_models() -> None:
    dense = {"boolq": {"acc": 0.5, "items": 10.0}}
    lines = accuracy_table({"this": SEVEN, "dense": dense}, None).splitlines()
    assert lines[0].endswith("| this: acc | this: acc_norm | dense: acc | dense: acc_norm |")
    assert "| boolq | 10 |  |  | 50.00 |  |" in lines
    assert "mean of seven tasks" in accuracy_table({"this": dense}, "qwen3-8b")
