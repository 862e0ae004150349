"""The demo's text: the documentation of the running interpreter's standard library.

Real prose that every Python has, so that the demo needs no download. Three sources, all read from ``.py`` files by
parsing them; nothing is imported and nothing depends on what happens to be installed beside the standard library:

- the topics of ``help()`` (``pydoc_data/topics.py``: chapters of the language reference),
- the docstrings of modules, classes, functions and methods, each below its signature as ``help()`` prints it,
- the comment blocks of two lines and more, without their ``#``.

Tests and IDLE are left out. One document is one module or one topic. A fixed hash of its name decides whether it is
held out, so the same modules are held out under every Python version. A paragraph occurs once in the whole corpus:
where two modules or topics repeat each other, the first in the order of names keeps it, and nothing is shared between
the two splits.
"""

from __future__ import annotations

import ast
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_EVERY = 20
"""About one document in this many is held out."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})
_TOPICS = "pydoc_data/topics.py"

_DEFINITION = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PARAGRAPH_BREAK = re.compile(r"\n[ \t]*\n\s*?(?=[ \t]*\S)")
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#.*\n){2,}", re.MULTILINE)
_COMMENT_MARK = re.compile(r"^[ \t]*#+[:!]?[ ]?", re.MULTILINE)
_RULE = re.compile(r"[-=#*~_+]{3,}\s*$", re.MULTILINE)


def stdlib_documents(split: Split) -> list[str]:
    """The documents of one split, one per module or topic, in the order of their names.

    The same interpreter always gives the same documents; another Python version gives its own documentation.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', not {split!r}")
    corpus = _corpus(Path(sysconfig.get_path("stdlib")))
    return [text for name, text in corpus if is_heldout(name) == (split == "heldout")]


def is_heldout(name: str) -> bool:
    """Whether the module or topic of this name (``json/decoder.py``, ``topic:lambda``) is held out."""
    return zlib.crc32(name.encode("utf-8")) % HELDOUT_EVERY == 0


@lru_cache(maxsize=1)
def _corpus(root: Path) -> tuple[tuple[str, str], ...]:
    """(name, text) of every document under a standard library folder, with repeated paragraphs removed."""
    sources = _source_files(root)
    if not sources:
        raise ValueError(
            f"no Python sources of the standard library in {root}: this interpreter was packaged without them, "
            "so the embedded demo text cannot be built. Use another Python, or name a text of your own with --dataset"
        )
    seen: set[str] = set()
    documents = []
    for name, path in sources:
        tree, source = _parse(path)
        if tree is None:
            continue
        if name == _TOPICS:
            entries = [(f"topic:{topic}", iter([("", text)])) for topic, text in _topics(tree)]
        else:
            entries = [(name, _module_entries(name, tree, source))]
        for entry_name, entry in entries:
            text = _render(entry, seen)
            if text:
                documents.append((entry_name, text))
    return tuple(documents)


def _source_files(root: Path) -> list[tuple[str, Path]]:
    """(relative name with forward slashes, path) of the library's sources, sorted by name."""
    files: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files.extend((path.relative_to(root).as_posix(), path) for path in paths)
    return sorted(files)


def _parse(path: Path) -> tuple[ast.Module | None, str]:
    """A source file as tree and text; (None, "") for the few files of the library that are no valid UTF-8 Python."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules are not our user's business
            return ast.parse(source), source
    except (SyntaxError, UnicodeDecodeError):
        return None, ""


def _topics(tree: ast.Module) -> list[tuple[str, str]]:
    """The (topic, text) pairs of ``pydoc_data/topics.py``, sorted by topic; none where the file has another form."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return sorted(ast.literal_eval(statement.value).items())
    return []


def _module_entries(name: str, tree: ast.Module, source: str) -> Iterator[tuple[str, str]]:
    """(heading, text) of a module's docstrings in source order, then of its comment blocks."""
    if docstring := ast.get_docstring(tree):
        yield f"module {name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}", docstring
    yield from _docstrings(tree)
    for block in _COMMENT_BLOCK.findall(source):
        yield "", _COMMENT_MARK.sub("", block)


def _docstrings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(signature, docstring) of everything that is defined below a node, also inside if, try and with."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFINITION):
            if docstring := ast.get_docstring(child):
                yield _signature(child), docstring
            yield from _docstrings(child)
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from _docstrings(child)


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return f"{node.name}({ast.unparse(node.args)})"


def _render(entries: Iterator[tuple[str, str]], seen: set[str]) -> str:
    """One document: the paragraphs that the corpus has not seen yet, each entry below its heading."""
    rendered = []
    for heading, text in entries:
        paragraphs = []
        for paragraph in _PARAGRAPH_BREAK.split(_RULE.sub("", text.expandtabs(4))):
            key = " ".join(paragraph.split())
            if len(key) > 1 and key not in seen:
                seen.add(key)
                paragraphs.append("\n".join(line.rstrip() for line in paragraph.strip("\n").splitlines()).rstrip())
        if paragraphs:
            rendered.append(f"{heading}\n" * bool(heading) + "\n\n".join(paragraphs))
    return "\n\n".join(rendered) + "\n" if rendered else ""
