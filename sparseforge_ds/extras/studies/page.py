"""What is made of the rows: a table, figures, and both in one HTML page, a file that can be sent to somebody."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from sparseforge_ds.extras.studies.figures import Drawn, draw
from sparseforge_ds.extras.studies.records import write_text
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.extras.studies.summary import (
    Table,
    cost_of,
    legend_lines,
    markdown,
    results_tables,
    selection_table,
    summarize,
)


def write_pages(out: Path, config: CompareConfig, rows: list[dict[str, Any]], notes: list[str]) -> str:
    """Write `table.md`, the figures and `index.html`, and return the first."""
    lines = summarize(rows, config.compared_with)
    table = markdown(lines, rows, config, notes)
    write_text(out / "table.md", table)
    lines["bytes"] = [cost_of(line, config).bytes for line in lines.itertuples()]
    figures = draw(lines, out / "figures")
    tried = selection_table(rows, config)
    tables = [*results_tables(lines, config), *([] if tried is None else [tried])]
    words = [*legend_lines(lines, config), *notes]
    patterns = sorted({row["sparsity"]["pattern"] for row in rows if row.get("sparsity")})
    title = f"Comparison on {Path(config.model).name}, {' and '.join(patterns)}"
    commands = [row["command"] for row in rows if row["command"]]
    text = (out / "config.json").read_text()
    write_text(out / "index.html", page(title, tables, words, figures, text, commands))
    return table


def page(
    title: str,
    tables: Sequence[Table],
    words: Sequence[str],
    figures: Sequence[Drawn],
    config: str,
    commands: Sequence[str],
) -> str:
    """The page: paragraphs of words, the tables of `studies.summary` (a cell in ** is bold), and the PNG files
    themselves."""
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True).get_template("comparison.html")
    images = [(figure, base64.b64encode(figure.path.read_bytes()).decode()) for figure in figures]
    return template.render(
        title=title, tables=tables, words=words, images=images, config=config, commands="\n".join(commands)
    )
