"""The documentation site builds strictly and offline, its links lead somewhere, and its reference is the code's."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
import typing
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")

from sparseforge_ds.cli.main import parser as all_commands
from sparseforge_ds.config import METHODS, PRESETS, SparseForgeConfig
from sparseforge_ds.config.command_line import argument_parser
from sparseforge_ds.config.strict import dataclass_options, key_of
from sparseforge_ds.model.family_table import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Attributes of elements that a browser fetches by itself."""


class Page(HTMLParser):
    """Links, anchors, table rows and text of one HTML file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.twice: set[str] = set()
        self.rows: list[list[str]] = []
        self.article = ""
        self._inside = self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        result = dict(attrs)
        if name := result.get("id"):
            self.twice |= {name} & self.anchors
            self.anchors.add(name)
        if tag == "a" and result.get("href"):
            self.links.append(str(result["href"]))
        if result.get(LOADED.get(tag, "")) and result.get("rel") != "canonical":
            self.loaded.append(str(result[LOADED[tag]]))
        if tag == "article":
            self._inside = True
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "article"
        self._cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.article += data if self._inside else ""
        if self._cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Build the site, and return every page by its file."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}


def page(site: dict[Path, Page], name: str) -> Page:
    (result,) = (site[path] for path in site if path.parent.parts[-name.count("/") - 1 :] == tuple(name.split("/")))
    return result


def test_every_link_leads_to_a_page_and_a_place_on_it(site: dict[Path, Page]) -> None:
    for path, content in site.items():
        if path.name == "404.html":  # its links are those of the server's root
            continue
        for link in (*content.links, *content.loaded):
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path}: {link}"
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in site[target].anchors, f"{path}: {link}"


@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
def test_a_page_can_be_read_in_the_repository(name: str) -> None:
    """Its links lead to files, and it has no words that the site alone understands."""
    text = (ROOT / name).read_text()
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert not [target for target in targets if not (ROOT / name).parent.joinpath(target).exists()]
    assert not re.search(r"^(!!!|\{\{)", text, re.MULTILINE)


def test_no_two_places_of_a_page_have_one_name(site: dict[Path, Page]) -> None:
    assert not {path: content.twice for path, content in site.items() if content.twice}


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, content in site.items():
        assert not [link for link in content.loaded if urlsplit(link).netloc], path


def test_every_page_says_on_its_first_screen_where_to_go_on(site: dict[Path, Page]) -> None:
    for path, content in site.items():
        if path.name != "404.html":
            assert "Where to go on" in content.article[:1500], path


def test_every_key_is_there_with_its_default(site: dict[Path, Page]) -> None:
    rows = [row for row in page(site, "reference/configuration").rows if len(row) == 4 and row[0] != "key"]
    assert sorted((row[0], row[2]) for row in rows) == sorted(_fields(SparseForgeConfig, ""))
    assert all(row[3].strip() for row in rows), "a key without a docstring"


def test_every_preset_method_and_family_is_there(site: dict[Path, Page]) -> None:
    rows = page(site, "reference/configuration").rows
    for name, start in {**PRESETS, **{name: kind.starts_from for name, kind in METHODS.items()}}.items():
        assert any(row[0] == name and json.loads(row[-1]) == json.loads(json.dumps(start)) for row in rows), name
    families = {name for row in page(site, "reference/families").rows for name in row[0].split(", ")}
    assert families == {*FAMILIES, "model_type"}


def test_every_command_and_flag_is_there(site: dict[Path, Page]) -> None:
    (choices,) = (action for action in all_commands()._actions if isinstance(action, argparse._SubParsersAction))
    rows = [row[0] for row in page(site, "reference/command-line").rows]
    for name, parser in {**choices.choices, "train": argument_parser()}.items():
        assert f"sparseforge {name}" in rows
        for action in parser._actions:
            shown = not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS
            if shown and action.option_strings:
                assert any(re.search(rf"{action.option_strings[0]}\b", row) for row in rows), action.option_strings


def test_errors_are_found_by_their_words(site: dict[Path, Page]) -> None:
    messages = [row[0] for row in page(site, "reference/messages").rows]
    assert len(messages) > 200
    for words in ("curvature.probes = …: use an integer >= 1", "already holds a run with checkpoints"):
        assert any(words in message for message in messages), words
    assert "zero_optimization.zenflow" in page(site, "limits").article
    assert any(row[0] == "choose_at_each_budget" for row in page(site, "guides/compare").rows)


def test_the_public_names_are_documented(site: dict[Path, Page]) -> None:
    import sparseforge_ds

    anchors = page(site, "reference/python").anchors
    for name in sparseforge_ds.__all__:
        assert any(anchor.startswith("sparseforge_ds") and anchor.split(".")[-1] == name for anchor in anchors), name


@pytest.mark.parametrize("name", ["schedule", "results", "bits"])
def test_plots_are_what_the_script_draws(name: str, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    kept = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}" not in kept:
        pytest.skip(f"drawn by another matplotlib than {matplotlib.__version__}")
    script = ROOT / "docs" / "figures" / "draw.py"
    subprocess.run([sys.executable, str(script), str(tmp_path), "--only", name], check=True, timeout=600)
    assert (tmp_path / f"{name}.svg").read_text() == kept, f"python docs/figures/draw.py --only {name}"


def test_a_line_of_the_results_is_of_one_method() -> None:
    """Two studies gave the name block_start to masks that are kept, and to masks that move."""
    pytest.importorskip("matplotlib")
    script = ROOT / "docs" / "figures" / "draw.py"
    lines = runpy.run_path(str(script))["result_lines"]()
    for label, rows in lines.items():
        assert len({json.dumps([row["settings"], row["flags"]]) for row in rows}) == 1, label
    kept = [row["method"] for row in lines["block_start"] if row["steps"] == 1200]
    assert kept == ["block_start_kept"] * 3


def _fields(kind: type, prefix: str) -> Iterator[tuple[str, str]]:
    """(key, default as JSON) of all keys."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        inner = dataclass_options(hints[field.name])
        yield prefix + key_of(field.name), json.dumps({} if inner and default is not None else default)
        for item in inner:
            yield from _fields(item, f"{prefix}{field.name}.")
