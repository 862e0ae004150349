"""One HTML page with the table and the figures in it: a file that can be sent to somebody."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from sparseforge_ds.compare.figures import Drawn

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } figure { margin: 2rem 0; } figcaption { color: #555; }
pre { overflow-x: auto; background: #f6f6f6; padding: 1rem; font-size: .85rem; }
"""


def page(title: str, table: str, figures: Sequence[Drawn], config: str, commands: Sequence[str]) -> str:
    """The page.

    Args:
        title: its heading.
        table: Markdown of `table.markdown`.
        figures: PNG files, which are put into the page.
        config: CONFIG as text.
        commands: one for each run.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", *_blocks(table)]
    for figure in figures:
        data = base64.b64encode(figure.path.read_bytes()).decode()
        name = html.escape(figure.title)
        parts.append(
            f'<figure><h2>{name}</h2><img alt="{name}" src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>"
        )
    parts.append(f"<h2>Configuration</h2><pre>{html.escape(config)}</pre>")
    listed = html.escape("\n".join(commands))
    parts.append(f"<details><summary>The command of every run</summary><pre>{listed}</pre></details>")
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _blocks(markdown: str) -> list[str]:
    """Tables, lists and paragraphs, which is all that our Markdown has."""
    blocks = []
    for block in markdown.strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            blocks.append(_table([[_inline(cell.strip()) for cell in line.split("|")[1:-1]] for line in lines]))
        elif lines[0].startswith("- "):
            blocks.append("<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>")
        else:
            blocks.append(f"<p>{_inline(' '.join(lines))}</p>")
    return blocks


def _table(rows: list[list[str]]) -> str:
    head, _, *body = rows
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in body]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _inline(text: str) -> str:
    bold = text.startswith("**") and text.endswith("**") and len(text) > 4
    return f"<b>{html.escape(text[2:-2])}</b>" if bold else html.escape(text)
