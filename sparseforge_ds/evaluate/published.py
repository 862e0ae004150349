"""The zero-shot suites of the paper, and those of its numbers that are known, beside ours in a Markdown table.

Accuracies in percent, plain `acc`, zero-shot, of arXiv 2605.06402 (dense model and its 2:4 result). What is not known
is absent: cells stay empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SUITES = {
    "paper": (
        "arc_challenge",
        "arc_easy",
        "boolq",
        "hellaswag",
        "openbookqa",
        "rte",
        "winogrande",
        "race",
        "piqa",
    ),
    "with_race": ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "winogrande", "race", "piqa"),
    "with_rte": ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "rte", "winogrande"),
}
"""Tasks of a suite. Both others are means of seven in the paper: `with_race` stands in its LLaMA-2 table (and in CAST,
arXiv 2509.25996), `with_rte` is the list of its published evaluation code (and of AST, arXiv 2407.20584)."""

MEANS = ("with_race", "with_rte")


@dataclass(frozen=True)
class Published:
    """What the paper says of a model."""

    dense: Mapping[str, float] = field(default_factory=dict)
    sparse: Mapping[str, float] = field(default_factory=dict)
    dense_mean: Mapping[str, float] = field(default_factory=dict)
    """Mean over a suite of seven; the key is in `MEANS`, or `seven` where it is not known which suite it was."""
    sparse_mean: Mapping[str, float] = field(default_factory=dict)
    tokens: str = ""
    """Training tokens of the 2:4 model, where they are known."""


PUBLISHED = {
    "llama2-7b": Published(
        dense={"arc_challenge": 43.52, "hellaswag": 57.18, "openbookqa": 31.4, "race": 39.52},
        sparse={"race": 41.63},
        dense_mean={"with_race": 56.43, "with_rte": 59.7},
        sparse_mean={"with_race": 57.27},
        tokens="5B",
    ),
    "opt-2.7b": Published(dense_mean={"seven": 47.76}, sparse_mean={"seven": 46.67}),
    "qwen3-1.7b": Published(dense_mean={"seven": 56.51}, sparse_mean={"seven": 53.33}),
    "gpt2-medium": Published(sparse_mean={"seven": 40.31}),
    "gpt2-large": Published(sparse_mean={"seven": 42.10}),
    "gpt2-xl": Published(sparse_mean={"seven": 44.34}),
    "qwen3-8b": Published(dense_mean={"seven": 65.73}, sparse_mean={"seven": 63.31}),
    "qwen3-14b": Published(dense_mean={"seven": 68.36}, sparse_mean={"seven": 65.44}),
    "deepseek-moe-16b": Published(dense_mean={"seven": 59.54}, sparse_mean={"seven": 58.57}),
}
"""By the name that `--paper` takes."""

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
