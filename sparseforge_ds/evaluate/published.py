"""The zero-shot suites of the paper, and those of its numbers that are known, to stand beside ours.

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
