"""The summary as tables and words, and both as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparseforge_ds.compare.settings import CompareConfig
from sparseforge_ds.compare.summary import Row, spread


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
    """The page `table.md`."""
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
    at = "each budget" if config.select_at == "each" else f"{config.budgets[0]} steps"
    one = len(config.seeds) == 1
    over = f"of seed {config.seeds[0]} alone" if one else "mean ± sample standard deviation over seeds"
    legend = [
        f"Perplexity per token, {over}. At the same budget and seed all methods "
        f"read the same tokens in the same order. Learning rates were chosen on the validation text, at {at}, seed "
        f"{config.first_seed}; nothing was chosen on the test text. Differences are taken seed by seed."
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
    cells = tried.pivot(index=["method", "steps"], columns="learning_rate", values="shown").fillna("")
    order = [(name, steps) for name in config.methods for steps in config.selection_budgets]
    head = ["validation perplexity at learning rate", "steps", *(f"{rate:g}" for rate in cells.columns)]
    return Table(head, [[key[0], str(key[1]), *cells.loc[key]] for key in order if key in cells.index])


def _tried(row: Row) -> str:
    value = row["validation_perplexity"]
    shown = "diverged" if value is None or math.isnan(value) else f"{value:.4g}"
    return f"**{shown}**" if row["chosen"] else shown
