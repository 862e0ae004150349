"""Pages that people read first: the README is short and true, and what any page names exists."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparseforge_ds
from sparseforge_ds.cli.main import parser as all_commands
from sparseforge_ds.config.command_line import argument_parser

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "studies").glob("*.md"),
        *ROOT.glob("launch/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    )
    if path.name != "table.md"
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
NOT_YET = {"my.json"}
"""Files of the reader's own."""


def blocks(text: str, language: str) -> Iterator[str]:
    yield from re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_two_commands_stand_as_users_run_them() -> None:
    assert "\nbash launch/demo.sh     # dense -> 2:4" in README
    assert "\nbash tests/run.sh       # ruff, mypy, tests\n" in README


def test_it_is_short_and_says_its_status_first() -> None:
    lines = README.splitlines()
    assert len(lines) <= 80
    assert any("CPU" in line and "GPU" in line for line in lines[:12])
    assert len(re.findall(r"^\|[-|]+\|$", README, flags=re.MULTILINE)) == 1, "one table, that of the results"


@pytest.mark.parametrize("page", [page for page in PAGES if ROOT / "docs" not in page.parents], ids=str)
def test_links_of_the_repository_lead_somewhere(page: Path) -> None:
    """Check links outside of docs/; those of the site are checked where it is built with all its pages."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # of the past
        return
    named = r"(?<![\w/.*$])(?:tests|launch|benchmarks|ds_configs|docs|sparseforge_ds)/[\w./]*\.(?:py|sh|json|md)\b"
    for name in re.findall(named, page.read_text()):
        assert (ROOT / name).exists() or Path(name).name in NOT_YET, f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_on_a_page_uses_what_is_there(page: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "sf":
                    assert node.attr in sparseforge_ds.__all__
                elif node.value.id == "forge":
                    assert hasattr(sparseforge_ds.SparseForge, node.attr)


def test_messages_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    message = [(ROOT / "launch" / "install.sh").read_text()]
    for path in (ROOT / "sparseforge_ds").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            message.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts))
    everything = "\n".join(message)
    table = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    for row in re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE):
        for quoted in re.findall(r"`([^`]+)`", row):
            for piece in quoted.split("..."):
                assert piece.strip(' "') in everything, f"nobody says {quoted!r} any more"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_flags_on_a_page_exist(page: Path) -> None:
    parsers = flags_by_command()
    for block in blocks(page.read_text(), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.search(
                r"(sparseforge \w+|sparseforge_ds (?=\w+)\w+|sparseforge_ds\.\w+(?:\.\w+)?|launch/train\.py)", line
            )
            if command is None or line.lstrip().startswith(("pip", "pytest")):
                continue
            name = command[0].replace("sparseforge_ds ", "sparseforge ")
            name = {"launch/train.py": "sparseforge train"}.get(name, name)
            after = line[command.end() :].partition("#")[0]
            for flag in re.findall(r"(?<=\s)--\w+", after):
                assert flag in parsers[name], f"{page}: {name} has no {flag}"


def flags_by_command() -> dict[str, set[str]]:
    top = all_commands()
    (choices,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    parsers = {f"sparseforge {name}": parser for name, parser in choices.choices.items()}
    parsers["sparseforge train"] = argument_parser()
    return {name: set(parser._option_string_actions) for name, parser in parsers.items()}
