"""The summary as a Markdown table, with what one must know to read it."""

from __future__ import annotations

from collections.abc import Sequence

from sparseforge_ds.compare.settings import CompareConfig
from sparseforge_ds.compare.summary import Line, Row


def markdown(lines: Sequence[Line], rows: Sequence[Row], config: CompareConfig, notes: Sequence[str]) -> str:
    """The page `table.md`."""
    head = ["method", "tokens", "learning rate", "seeds", "validation", "test", f"test minus {config.compared_with}"]
    body = [_cells(line) for line in lines]
    cells = [[*head, "training"], ["---", *["---:"] * len(head)], *body]
    table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    return f"{table}\n\n{_legend(lines, config)}{_list(notes)}\n{_selection(rows, config)}"


def _cells(line: Line) -> list[str]:
    rate = "" if line.learning_rate is None else f"{line.learning_rate:g}{' (edge)' if line.at_the_edge else ''}"
    behind = "" if line.behind is None else f"{line.behind.mean:+.4g}"
    if line.behind is not None and line.behind.deviation is not None:
        behind += f" ± {line.behind.deviation:.2g}"
    seconds = "" if line.seconds is None else f"{line.seconds:,.0f} s"
    tokens = f"{line.tokens:,}" if line.kind == "result" else ""
    count = "" if line.kind == "dense" else str(line.test.count)
    return [line.method, tokens, rate, count, str(line.validation), str(line.test), behind, seconds]


def _legend(lines: Sequence[Line], config: CompareConfig) -> str:
    at = "each budget" if config.select_at == "each" else f"{config.budgets[0]} steps"
    one = len(config.seeds) == 1
    over = f"of seed {config.seeds[0]} alone" if one else "mean ± sample standard deviation over seeds"
    text = (
        f"Perplexity per token, {over}. At the same budget and seed all methods "
        f"read the same tokens in the same order. Learning rates were chosen on the validation text, at {at}, seed "
        f"{config.first_seed}; nothing was chosen on the test text. Differences are taken seed by seed.\n"
    )
    if any(line.at_the_edge for line in lines):
        text += "(edge): the smallest or the largest of the grid; a better one may lie outside.\n"
    return text


def _list(notes: Sequence[str]) -> str:
    return "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")


def _selection(rows: Sequence[Row], config: CompareConfig) -> str:
    """Validation perplexity of every learning rate that was tried."""
    tried = [row for row in rows if row["decides"]]
    if not tried:
        return ""
    rates = sorted({row["learning_rate"] for row in tried})
    lines = [["validation perplexity at learning rate", "steps", *(f"{rate:g}" for rate in rates)]]
    lines.append(["---", *["---:"] * (1 + len(rates))])
    for name in config.methods:
        for steps in config.selection_budgets:
            found = {r["learning_rate"]: r for r in tried if (r["method"], r["steps"]) == (name, steps)}
            if found:
                lines.append([name, str(steps), *(_tried(found.get(rate)) for rate in rates)])
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _tried(row: Row | None) -> str:
    if row is None:
        return ""
    value = row["validation_perplexity"]
    shown = "diverged" if value is None else f"{value:.4g}"
    return f"**{shown}**" if row["chosen"] else shown
