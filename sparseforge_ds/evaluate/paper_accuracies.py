"""The paper's zero-shot suites and accuracies, beside measured ones in a Markdown table.

They are plain `acc` in percent, zero-shot, of arXiv 2605.06402 (dense model and its 2:4 result).
Unknown ones are absent: their cells stay empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SUITES = {
    "paper": ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "rte", "winogrande", "race", "piqa"),
    "commonsense": ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande"),
    "with_race": ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "winogrande", "race", "piqa"),
    "with_rte": ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "rte", "winogrande"),
    "generation": ("gsm8k", "ifeval", "humaneval"),
}
"""Tasks of each suite. Those of `generation` write their answers; `humaneval` runs them as code.

`commonsense` has the seven tasks of most papers on pruning (LLM-Pruner, arXiv 2305.11627). The paper takes means over
two other sevens: `with_race` stands in its LLaMA-2 table (and in CAST, arXiv 2509.25996), and `with_rte` is the list of
its published evaluation code (and of AST, arXiv 2407.20584).
"""

MEANS = ("commonsense", "with_race", "with_rte")


@dataclass(frozen=True)
class PaperAccuracies:
    """The paper's accuracies of a model, by task, and by suite for means.

    A suite is a key of `MEANS`, or `seven` where the paper does not tell the seven tasks.
    """

    dense: Mapping[str, float]
    """Accuracies of the dense model."""
    sparse: Mapping[str, float]
    """Accuracies of the 2:4 model."""
    tokens: str = ""
    """Training tokens of the 2:4 model, where they are known."""


PAPER_ACCURACIES = {
    "llama2-7b": PaperAccuracies(
        dense={
            **{"arc_challenge": 43.52, "hellaswag": 57.18, "openbookqa": 31.4, "race": 39.52},
            **{"with_race": 56.43, "with_rte": 59.7},
        },
        sparse={"race": 41.63, "with_race": 57.27},
        tokens="5B",
    ),
    "opt-2.7b": PaperAccuracies({"seven": 47.76}, {"seven": 46.67}),
    "qwen3-1.7b": PaperAccuracies({"seven": 56.51}, {"seven": 53.33}),
    "gpt2-medium": PaperAccuracies({}, {"seven": 40.31}),
    "gpt2-large": PaperAccuracies({}, {"seven": 42.10}),
    "gpt2-xl": PaperAccuracies({}, {"seven": 44.34}),
    "qwen3-8b": PaperAccuracies({"seven": 65.73}, {"seven": 63.31}),
    "qwen3-14b": PaperAccuracies({"seven": 68.36}, {"seven": 65.44}),
    "deepseek-moe-16b": PaperAccuracies({"seven": 59.54}, {"seven": 58.57}),
}
"""The paper's accuracies by the name that `--paper` takes."""

SAME = "same_as_dense"
"""Name of a metric: the share of items that the model answers as the dense model does."""
LOST = "_lost"
"""Ending of a metric's name: the share of items that the dense model has right, and the model wrong."""
GAINED = "_gained"
"""Ending of a metric's name: the share of items that the model has right, and the dense model wrong."""
TOKENS = "answer_tokens"
"""Name of a metric: mean number of tokens of a generated answer."""
CUT = "cut_at_limit"
"""Name of a metric: the share of generated answers that only the limit of tokens ended."""
KL = "kl"
"""Name of a metric: mean KL(dense || model) of a token of the dense model's answers, in nats."""

_NO_METRICS = ("items", "sample_len", SAME, TOKENS, CUT, KL)
_STDERR = "_stderr"

Results = Mapping[str, Mapping[str, float]]
"""Metrics by task, as shares: `acc`, `acc_stderr`, `acc_norm`, `acc_norm_stderr`, `items`, `same_as_dense`."""


def mean_accuracy(results: Results, suite: str) -> float | None:
    """Return the plain mean of `acc` over the tasks of a suite, as a share; None where a task is missing."""
    tasks = SUITES[suite]
    if any("acc" not in results.get(task, {}) for task in tasks):
        return None
    return sum(results[task]["acc"] for task in tasks) / len(tasks)


def means(results: Results) -> dict[str, float]:
    """Return `mean_accuracy` for each of `MEANS` whose tasks are all there."""
    by_suite = {suite: mean_accuracy(results, suite) for suite in MEANS}
    return {suite: mean for suite, mean in by_suite.items() if mean is not None}


def accuracy_table(models: Mapping[str, Results], paper: str | None) -> str:
    """Lay out results as a Markdown table, in percent; perplexities are as they are.

    A task without `acc` has a row for each of its metrics, in the column of `acc`.

    Args:
        models: results by the name of a model, in the order of their columns. A model whose answers were compared with
            the dense model's has a column for that too.
        paper: key of `PAPER_ACCURACIES`, for columns of the paper's accuracies; None for none.
    """
    # Head.
    of_paper = [] if paper is None else [PAPER_ACCURACIES[paper].dense, PAPER_ACCURACIES[paper].sparse]
    columns = [(name, metric) for name in models for metric in ("acc", "acc_norm")]
    compared = [name for name in models if any(SAME in metrics for metrics in models[name].values())]
    columns += [(name, metric) for name in compared for metric in (SAME, f"acc{LOST}", f"acc{GAINED}")]
    head = ["task", "items", *(f"{name}: {metric}" for name, metric in columns)]
    if paper is not None:
        tokens = PAPER_ACCURACIES[paper].tokens
        head += [f"paper, dense {paper}", f"paper, 2:4{f', {tokens} tokens' if tokens else ''}"]
    # A row for every task.
    rows = []
    for task in dict.fromkeys(task for results in models.values() for task in results):
        of_models = {name: results[task] for name, results in models.items() if task in results}
        items = " / ".join(sorted({f"{metrics['items']:g}" for metrics in of_models.values()}))
        names = {metric: None for metrics in of_models.values() for metric in metrics if is_accuracy(metric)}
        if "acc" in names:
            measured = [_cell(of_models, name, metric) for name, metric in columns]
            rows.append([task, items, *measured, *(_known(values, task) for values in of_paper)])
            continue
        for own in names:
            measured = [_cell(of_models, name, own if metric == "acc" else metric) for name, metric in columns]
            rows.append([f"{task}, {own.replace(',', ', ')}", items, *measured, *("" for _ in of_paper)])
    # A row for every mean that is known, of our models or of the paper's.
    averages = {name: means(results) for name, results in models.items()}
    for suite in (*MEANS, "seven"):
        title = f"mean acc of {', '.join(SUITES[suite])}" if suite in MEANS else "mean of seven tasks, not known which"
        is_in_paper = suite == "seven" and any(suite in values for values in of_paper)
        if is_in_paper or any(suite in average for average in averages.values()):
            measured = [_known(averages[name], suite, 100) if metric == "acc" else "" for name, metric in columns]
            rows.append([title, "", *measured, *(_known(values, suite) for values in of_paper)])
    return _markdown(head, rows)


def generation_table(models: Mapping[str, Results]) -> str:
    """Lay out results of tasks whose answers are generated: a Markdown table with a row for every metric.

    Shares are in percent. Columns that compare with a dense model are there if one was measured.

    Args:
        models: results by the name of a model, in the order of their columns.
    """
    first = next(iter(models.values()))
    is_compared = len(models) > 1
    head = ["task, metric", "items", *models, *(("dense alone right", "this alone right") if is_compared else ())]
    head += [f"{name}: {column}" for column in ("tokens", "cut at limit") for name in models]
    head += ["KL to dense"] if is_compared else []
    rows = []
    for task, metrics in first.items():
        for metric in filter(is_accuracy, metrics):
            row = [f"{task}, {metric.replace(',', ', ')}", f"{metrics['items']:g}"]
            of_models = {name: results[task] for name, results in models.items()}
            row += [_cell(of_models, name, metric) for name in models]
            row += [_known(metrics, with_ending(metric, ending), 100) for ending in (LOST, GAINED) if is_compared]
            row += [f"{results[task][TOKENS]:.1f}" for results in models.values()]
            row += [_known(results[task], CUT, 100) for results in models.values()]
            row += [f"{metrics[KL]:.5f}" if KL in metrics else ""] if is_compared else []
            rows.append(row)
    return _markdown(head, rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_ending(metric: str, ending: str) -> str:
    """Return the name of a number about a metric, as the harness has it: `exact_match_stderr,strict-match`."""
    name, *filters = metric.split(",")
    return ",".join([name + ending, *filters])


def is_accuracy(key: str) -> bool:
    """Return whether a number of a task is one of its metrics, and not about them or about lengths."""
    return key not in _NO_METRICS and not key.split(",")[0].endswith((_STDERR, LOST, GAINED))


def _known(values: Mapping[str, float], key: str, unit: int = 1) -> str:
    """Return a cell with a value in percent; empty where it is unknown."""
    return f"{unit * values[key]:.2f}" if key in values else ""


def _cell(models: Mapping[str, Mapping[str, float]], name: str, metric: str) -> str:
    """Return a cell with a model's metric and its standard error; empty where it is missing.

    Args:
        models: metrics of one task by the name of a model, which decide the unit together.
        name: of the model.
        metric: of the cell.
    """
    if metric not in models.get(name, {}):
        return ""
    metrics = models[name]
    unit = 100 if _is_share(metric, [other[metric] for other in models.values() if metric in other]) else 1
    error = metrics.get(with_ending(metric, _STDERR))
    return f"{unit * metrics[metric]:.2f}" + ("" if error is None else f" ± {unit * error:.2f}")


def _is_share(metric: str, values: Sequence[float]) -> bool:
    """Return False for perplexities, bits, and metrics that are above 1 for some model, such as BLEU."""
    name = metric.split(",")[0]
    return not name.endswith("perplexity") and name != "bits_per_byte" and max(values) <= 1
