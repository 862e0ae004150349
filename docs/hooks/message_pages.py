"""Every error message of the package, collected from the source, so that a search finds the one on the screen."""

from __future__ import annotations

import ast
from pathlib import Path

from config_pages import template

import sparseforge_ds

PACKAGE = Path(sparseforge_ds.__file__).parent
_ERRORS = ("ValueError", "AgreedError", "ForgeError", "DivergedError", "NonlinearHeadError", "RuntimeError", "OSError")

_REQUIRE = ("require", "_require")

_INTRODUCTION = """\
# Every message

*Written from the source.* Each error names the thing, its value and the cure; `…` stands for what is filled in. Paste a
piece of the line on your screen into the search field above, or look through the part that said it.

Where to go on: [troubleshooting](../guides/troubleshooting.md) has the usual ones, by symptom.
"""


def message_page() -> str:
    """The whole page, a table for each part of the package."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE)
        room = "/".join(where.parts[: 2 if where.parts[0] == "extras" else 1]).removesuffix(".py")
        messages = found.setdefault(room, [])
        messages += [f"| {_cell(text)} | `{where}` |\n" for text in messages_of(path.read_text())]
    tables = [f"## {part}\n\n| message | file |\n|---|---|\n{''.join(rows)}" for part, rows in found.items() if rows]
    return "\n".join([_INTRODUCTION, *tables])


def messages_of(source: str) -> list[str]:
    """The texts of all errors that a file raises, and of its `require(condition, key, value, cure)`."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = getattr(node.exc.func, "id", "")
            if name in _ERRORS and node.exc.args:
                texts.append(template(node.exc.args[0], {}))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _REQUIRE and len(node.args) == 4:
            texts.append(f"{template(node.args[1], {})} = …: {template(node.args[3], {})}")
    return [text for text in dict.fromkeys(texts) if text.strip("… :")]


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`"
