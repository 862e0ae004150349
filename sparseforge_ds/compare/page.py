"""One HTML page with the table and the figures in it: a file that can be sent to somebody."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader

from sparseforge_ds.compare.figures import Drawn
from sparseforge_ds.compare.table import Table


def page(
    title: str,
    tables: Sequence[Table],
    words: Sequence[str],
    figures: Sequence[Drawn],
    config: str,
    commands: Sequence[str],
) -> str:
    """The page.

    Args:
        title: its heading.
        tables: `table.results_table` and `table.selection_table`; a cell in ** is bold.
        words: paragraphs below the first table.
        figures: PNG files, which are put into the page.
        config: CONFIG as text.
        commands: one for each run.
    """
    template = Environment(loader=PackageLoader("sparseforge_ds", "assets"), autoescape=True).get_template(
        "comparison.html"
    )
    images = [(figure, base64.b64encode(figure.path.read_bytes()).decode()) for figure in figures]
    return template.render(
        title=title, tables=tables, words=words, images=images, config=config, commands="\n".join(commands)
    )
