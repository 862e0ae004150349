"""Statistics of a comparison: means and deviations over seeds, and differences seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""A line of results.jsonl."""


@dataclass(frozen=True)
class Spread:
    """Some numbers as their mean and sample standard deviation (n - 1 in the denominator)."""

    mean: float
    deviation: float | None
    """None for a single number."""
    count: int

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "diverged"
        return f"{self.mean:.4g}" if self.deviation is None else f"{self.mean:.4g} ± {self.deviation:.2g}"


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation; an infinite value makes both worthless, and the mean says so."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2 or not math.isfinite(mean):
        return Spread(mean, None, len(values))
    return Spread(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)), len(values))


@dataclass(frozen=True)
class Line:
    """A method at a budget."""

    method: str
    kind: str
    """dense, one_shot or result; a run that only decided a learning rate, `tried`, has no line."""
    steps: int
    tokens: int
    learning_rate: float | None
    at_the_edge: bool
    """The chosen learning rate is the smallest or the largest of its grid: a better one may lie outside."""
    validation: Spread
    test: Spread
    seconds: float | None
    """Mean of the training time."""
    behind: Spread | None
    """Test perplexity minus that of the reference with the same seed and budget; None for the reference."""


def summarize(rows: Sequence[Row], reference: str) -> list[Line]:
    """A line for every method at every budget, baselines first, then by budget and mean test perplexity."""
    counted = [row for row in rows if row["kind"] != "tried"]
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in counted:
        groups.setdefault((row["kind"], row["method"], row["steps"]), []).append(row)
    lines = [_line(group, groups.get(("result", reference, steps))) for (_, _, steps), group in groups.items()]
    order = {"dense": 0, "one_shot": 1, "result": 2}
    return sorted(lines, key=lambda line: (order[line.kind], line.steps, line.test.mean))


def _line(group: Sequence[Row], reference: Sequence[Row] | None) -> Line:
    first = group[0]
    seconds = [row["seconds"] for row in group if row["seconds"] is not None]
    return Line(
        method=first["method"],
        kind=first["kind"],
        steps=first["steps"],
        tokens=first["tokens"],
        learning_rate=first["learning_rate"],
        at_the_edge=first.get("at_the_edge", False),
        validation=spread([_number(row["validation_perplexity"]) for row in group]),
        test=spread([_number(row["test_perplexity"]) for row in group]),
        seconds=math.fsum(seconds) / len(seconds) if seconds else None,
        behind=None if reference is None or first["kind"] != "result" else _behind(group, reference),
    )


def _behind(group: Sequence[Row], reference: Sequence[Row]) -> Spread | None:
    if group[0]["method"] == reference[0]["method"]:
        return None
    by_seed = {row["seed"]: _number(row["test_perplexity"]) for row in reference}
    pairs = [(_number(row["test_perplexity"]), by_seed[row["seed"]]) for row in group if row["seed"] in by_seed]
    if not pairs or any(math.isinf(value) for pair in pairs for value in pair):
        return None
    return spread([value - against for value, against in pairs])


def _number(value: float | None) -> float:
    """JSON has no infinity: a run that diverged has null."""
    return math.inf if value is None else value
