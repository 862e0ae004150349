"""The hook of mkdocs.yml: adds the pages that are written from the code, and the project's own Markdown files.

A page of the repository (CHANGELOG.md, say) becomes a page of the site, with its links bent to where their targets are.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from command_pages import command_page  # noqa: E402  # mkdocs has this folder on the path while it loads the hook
from config_pages import compare_table, config_page, family_page, refused_table  # noqa: E402
from message_pages import message_page  # noqa: E402

INTRODUCTIONS = {
    "changelog.md": "[limits](limits.md) · [start](start/installation.md)",
    "contributing.md": "[a weight's journey](concepts/journey.md) · [Python](reference/python.md) · "
    "[benchmarks](reference/benchmarks.md) · [changes](changelog.md)",
    "guides/recipes.md": "[a large run](large-run.md) · [plan memory and time](planning.md) · [evaluate](evaluate.md)",
    "reference/benchmarks.md": "[what was measured](../results/cost.md) · [contributing](../contributing.md)",
}
"""Where to go on, for pages that are not written for the site."""
PROJECT_FILES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "reference/benchmarks.md",
    "launch/README.md": "guides/recipes.md",
}
"""Markdown files outside docs/, and the pages that they become."""
WRITTEN_FROM = {
    "docs/hooks/message_pages.py": "reference/messages.md",
    "sparseforge_ds/cli": "reference/command-line.md",
    "sparseforge_ds/config": "reference/configuration.md",
    "sparseforge_ds/model/family_table.py": "reference/families.md",
}
"""Files and folders of code, and the pages that are written from them.

Pages link to the code, which is what a reader of the repository can open; on the site the link leads to the page.
"""
TABLES = {
    "[All keys, with their defaults](../../sparseforge_ds/extras/studies/settings.py)": compare_table,
    "[All refused settings](../sparseforge_ds/config/refused_settings.py)": refused_table,
}
"""Lines of pages that the site replaces by tables from the code."""
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/configuration.md": config_page(),
        "reference/families.md": family_page(),
        "reference/command-line.md": command_page(),
        "reference/messages.md": message_page(),
    }
    pages |= {page: project_page(source, page) for source, page in PROJECT_FILES.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what stands inside pages: tables from the code, headings, and where to go on."""
    name = page.file.src_uri
    if name in INTRODUCTIONS:
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\nWhere to go on: {INTRODUCTIONS[name]}\n{rest}"
    for place, table in TABLES.items():
        if place in markdown:
            markdown = markdown.replace(place, table())
    return with_site_links(markdown, f"docs/{name}", name) if not page.file.generated_by else markdown


def project_page(source: str, page: str) -> str:
    """Return a Markdown file of the repository as the text of a page."""
    return with_site_links((ROOT / source).read_text(), source, page)


def with_site_links(markdown: str, source: str, page: str) -> str:
    """Return the text with the links of file `source` bent to where their targets are, as seen from `page`.

    Links to what the site does not have, studies for example, become plain text.
    """

    def bend(link: re.Match[str]) -> str:
        text = link[1]
        target = link[2]
        anchor = link[3] or ""
        path = os.path.relpath((ROOT / source).parent / target, ROOT)
        written = [made for code, made in WRITTEN_FROM.items() if code in (path, os.path.dirname(path))]
        if path in PROJECT_FILES:
            there = PROJECT_FILES[path]
        elif written:
            (there,) = written
        elif path.startswith("docs/"):
            there = path.removeprefix("docs/")
        else:
            return text
        return f"[{text}]({os.path.relpath(there, Path(page).parent)}{anchor})"

    return _LINK.sub(bend, markdown)
