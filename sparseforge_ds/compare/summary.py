"""Means and deviations over seeds, differences seed by seed, and the tables and words that say them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparseforge_ds.compare.settings import CompareConfig

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


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """Markdown."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown(lines: pd.DataFrame, rows: Sequence[Row], config: CompareConfig, notes: Sequence[str]) -> str:
    """The page `table.md`, with notes about the texts."""
    tried = selection_table(rows, config)
    listed = "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")
    legend = "\n".join(legend_lines(lines, config)) + "\n"
    return f"{results_table(lines, config)}\n{legend}{listed}\n" + (f"\n{tried}" if tried else "")


def results_table(lines: pd.DataFrame, config: CompareConfig) -> Table:
    """A row for every line of the summary."""
    head = ["method", "tokens", "learning rate", "seeds", "validation", "test", f"test minus {config.compared_with}"]
    return Table([*head, "training"], [_cells(line) for line in lines.itertuples()])


def _cells(line: Any) -> list[str]:
    return [
        line.method,
        f"{line.tokens:,}" if line.kind == "result" else "",
        "" if math.isnan(line.learning_rate) else f"{line.learning_rate:g}{' (edge)' if line.at_the_edge else ''}",
        "" if line.kind == "dense" else str(line.seeds),
        spread(line.validation, line.validation_deviation),
        spread(line.test, line.test_deviation),
        spread(line.behind, line.behind_deviation, "+"),
        "" if math.isnan(line.seconds) else f"{line.seconds:,.0f} s",
    ]


def legend_lines(lines: pd.DataFrame, config: CompareConfig) -> list[str]:
    """What one must know to read the table."""
    first, one = config.seeds[0], len(config.seeds) == 1
    over = f"of seed {first} alone" if one else "mean ± sample standard deviation over seeds"
    legend = [
        f"Perplexity per token, {over}. At the same budget and seed all methods read the same tokens in the same "
        f"order. Learning rates were chosen on the validation text, at {config.budgets[0]} steps, seed {first}; "
        "nothing was chosen on the test text. Differences are taken seed by seed."
    ]
    if lines["at_the_edge"].any():
        legend.append("(edge): the smallest or the largest of the grid; a better one may lie outside.")
    return legend


def selection_table(rows: Sequence[Row], config: CompareConfig) -> Table | None:
    """Validation perplexity of every learning rate that was tried."""
    tried = pd.DataFrame([row for row in rows if row["decides"]])
    if tried.empty:
        return None
    tried["shown"] = [_tried(row) for row in tried.to_dict("records")]
    cells = tried.pivot(index="method", columns="learning_rate", values="shown").fillna("")
    head = ["validation perplexity at learning rate", "steps", *(f"{rate:g}" for rate in cells.columns)]
    steps = str(config.budgets[0])
    return Table(head, [[name, steps, *cells.loc[name]] for name in config.methods if name in cells.index])


def _tried(row: Row) -> str:
    value = row["validation_perplexity"]
    shown = "diverged" if value is None or math.isnan(value) else f"{value:.4g}"
    return f"**{shown}**" if row["chosen"] else shown
