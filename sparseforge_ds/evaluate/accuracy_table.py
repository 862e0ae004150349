"""Zero-shot results as a Markdown table: ours, with standard errors, beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping

from sparseforge_ds.evaluate.published import MEANS, PUBLISHED, SUITES, Published

Results = Mapping[str, Mapping[str, float]]
"""Metrics by task, as shares: `acc`, `acc_stderr`, `acc_norm`, `acc_norm_stderr`, `items`."""


def mean_accuracy(results: Results, suite: str) -> float | None:
    """Mean of plain `acc` over the seven tasks of a suite, each with the same weight, as a share; None without one of
    them."""
    tasks = SUITES[suite]
    if any("acc" not in results.get(task, {}) for task in tasks):
        return None
    return sum(results[task]["acc"] for task in tasks) / len(tasks)


def accuracy_table(models: Mapping[str, Results], paper: str | None) -> str:
    """The table, in percent, with columns for every named model, and for the paper's of this name in `PUBLISHED`."""
    published = PUBLISHED[paper] if paper is not None else None
    head = ["task", "items"]
    for name in models:
        head += [f"{name}: acc", f"{name}: acc_norm"]
    if published is not None:
        tokens = f", {published.tokens} tokens" if published.tokens else ""
        head += [f"paper, dense {paper}", f"paper, 2:4{tokens}"]
    tasks = list(dict.fromkeys(task for results in models.values() for task in results))
    rows = [_task_row(task, models, published) for task in tasks]
    for suite in MEANS:
        ours = [mean_accuracy(results, suite) for results in models.values()]
        if any(mean is not None for mean in ours):
            title = f"mean acc of {', '.join(SUITES[suite])}"
            rows.append(_mean_row(title, ours, _both(published, suite)))
    if published is not None and "seven" in published.sparse_mean:
        rows.append(
            _mean_row("mean of seven tasks, which is not known", [None] * len(models), _both(published, "seven"))
        )
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _task_row(task: str, models: Mapping[str, Results], published: Published | None) -> list[str]:
    items = {f"{results[task]['items']:g}" for results in models.values() if task in results}
    row = [task, " / ".join(sorted(items))]
    for results in models.values():
        row += [_cell(results.get(task, {}), metric) for metric in ("acc", "acc_norm")]
    if published is not None:
        row += [_known(published.dense, task), _known(published.sparse, task)]
    return row


def _mean_row(title: str, ours: list[float | None], paper: list[str]) -> list[str]:
    row = [title, ""]
    for mean in ours:
        row += ["" if mean is None else f"{100 * mean:.2f}", ""]
    return row + paper


def _both(published: Published | None, suite: str) -> list[str]:
    return [] if published is None else [_known(published.dense_mean, suite), _known(published.sparse_mean, suite)]


def _known(values: Mapping[str, float], key: str) -> str:
    return f"{values[key]:.2f}" if key in values else ""


def _cell(metrics: Mapping[str, float], metric: str) -> str:
    if metric not in metrics:
        return ""
    error = metrics.get(f"{metric}_stderr")
    return f"{100 * metrics[metric]:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")
