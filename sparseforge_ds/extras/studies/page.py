"""Pages of a comparison: a Markdown table, the figures, and one self-contained HTML page with all of it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from sparseforge_ds.extras.studies.figures import Figure, draw
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
    """Write `table.md`, the figures and `index.html`, and return the content of `table.md`."""
    lines = summarize(rows, config.compared_with)
    table = markdown(lines, rows, config, notes)
    write_text(out / "table.md", table)
    lines["bytes"] = [cost_of(line, config).bytes for line in lines.itertuples()]
    figures = draw(lines, out / "figures", config.axis)
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
    figures: Sequence[Figure],
    config: str,
    commands: Sequence[str],
) -> str:
    """Render the HTML page: paragraphs, tables (a cell in ** is bold), and the PNG files embedded."""
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True).get_template("comparison.html")
    images = [(figure, base64.b64encode(figure.path.read_bytes()).decode()) for figure in figures]
    return template.render(
        title=title, tables=tables, words=words, images=images, config=config, commands="\n".join(commands)
    )
