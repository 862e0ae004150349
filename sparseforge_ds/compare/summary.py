"""Statistics of a comparison: means and deviations over seeds, and differences seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

Row = Mapping[str, Any]
"""A line of results.jsonl."""
_KINDS = ("dense", "one_shot", "result")
"""In the order of the table; a run that only decided a learning rate, `tried`, has no line."""
_MEASURED = ["validation_perplexity", "test_perplexity"]


def summarize(rows: Sequence[Row], reference: str) -> pd.DataFrame:
    """A line for every method at every budget, baselines first, then by budget and mean test perplexity.

    Returns:
        kind, method, steps, tokens, learning_rate, at_the_edge (the smallest or the largest of the grid was chosen),
        seeds, seconds (mean of the training time), and `validation`, `test` and `behind`, each a mean with its sample
        standard deviation beside it (`test_deviation`, NaN for a single number). `behind` is the test perplexity minus
        that of the reference with the same seed and budget. A mean with a diverged run is not finite.
    """
    table = pd.DataFrame(rows)
    table = table[table["kind"].isin(_KINDS)].reset_index(drop=True)
    # JSON has no infinity: a run that diverged has null.
    table[_MEASURED] = table[_MEASURED].astype(float).fillna(math.inf)
    table["at_the_edge"] = table["at_the_edge"].eq(True) if "at_the_edge" in table else False
    table["kind"] = pd.Categorical(table["kind"], _KINDS, ordered=True)
    of_reference = table[(table["kind"] == "result") & (table["method"] == reference)]
    against = table[["seed", "steps"]].merge(
        of_reference[["seed", "steps", "test_perplexity"]], on=["seed", "steps"], how="left"
    )
    compared = (table["kind"] == "result") & (table["method"] != reference)
    table["behind"] = (table["test_perplexity"] - against["test_perplexity"]).where(compared)
    lines = table.groupby(["kind", "method", "steps"], sort=False, observed=True).agg(
        tokens=("tokens", "first"),
        learning_rate=("learning_rate", "first"),
        at_the_edge=("at_the_edge", "first"),
        seeds=("kind", "size"),
        seconds=("seconds", "mean"),
        validation=("validation_perplexity", "mean"),
        validation_deviation=("validation_perplexity", "std"),
        test=("test_perplexity", "mean"),
        test_deviation=("test_perplexity", "std"),
        behind=("behind", lambda values: values.mean(skipna=False)),
        behind_deviation=("behind", "std"),
    )
    return lines.reset_index().sort_values(["kind", "steps", "test"], kind="stable", ignore_index=True)


def spread(mean: float, deviation: float, sign: str = "") -> str:
    """5.287 ± 0.012; a difference (`sign`) that is not known is empty."""
    if not math.isfinite(mean):
        return "" if sign else "diverged"
    return f"{mean:{sign}.4g}" + ("" if math.isnan(deviation) else f" ± {deviation:.2g}")
