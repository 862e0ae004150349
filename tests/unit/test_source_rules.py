"""Rules of our source that no linter has: private names, one assignment a statement, one meaning a file name."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from sparseforge_ds.transformers_internals import WHERE

ROOT = Path(__file__).resolve().parents[2]
_ADVICE = re.compile(r"sparseforge [a-z]+ $")
"""End of the words before the first argument of a command in a message."""
NAMES_OF_OTHERS = {"_config", "_forward_hooks", "_model_generate", "_prepare_inputs", "_save", *WHERE}
"""Private names that others have too: modules of torch, engines of DeepSpeed, models of lm_eval, trainers and models of
transformers."""
PATCHES = {"delattr", "getattr", "object", "patch", "setattr"}
"""Functions that take the name of what they read, replace or remove."""


@functools.cache
def trees_of(folder: str) -> dict[Path, ast.Module]:
    """Return the syntax trees of a folder's files, by path."""
    return {path: ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py")}


def _private_names(tree: ast.Module) -> set[str]:
    """Return the private functions, classes, constants and attributes that a file defines."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        for item in node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []:
            if isinstance(item, (ast.FunctionDef, ast.ClassDef)):
                names.add(item.name)
            elif isinstance(item, (ast.Assign, ast.AnnAssign)):
                names |= {name.id for name in ast.walk(item) if isinstance(name, ast.Name)}
    return set(filter(_is_private, names))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _private_names_used(tree: ast.Module, private: set[str]) -> list[str]:
    """Return where a test imports, reads or replaces a private name of ours, given those that the package defines."""
    own = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("sparseforge_ds", "tests")
    ]
    imported = {alias.asname or alias.name for node in own for alias in node.names}
    used = [(node.lineno, alias.name) for node in own for alias in node.names if _is_private(alias.name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            is_own = owner in imported or (node.attr in private and owner not in ("self", "cls"))
            if is_own and node.attr not in NAMES_OF_OTHERS:
                used.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).rpartition(".")[2]
            texts = [text.value for text in node.args if isinstance(text, ast.Constant) and isinstance(text.value, str)]
            names = [text.rpartition(".")[2] for text in texts] if function in PATCHES else []
            used += [(node.lineno, name) for name in names if name in private]
    return [f"line {line}: {name}" for line, name in used]


def test_tests_go_through_what_is_public() -> None:
    """Keep private names out of tests: they would hold how something is done, not what holds."""
    private = set().union(*map(_private_names, trees_of("sparseforge_ds").values())) - NAMES_OF_OTHERS
    used = {path: _private_names_used(tree, private) for path, tree in trees_of("tests").items()}
    assert {str(path.relative_to(ROOT)): lines for path, lines in used.items() if lines} == {}


def _shape(node: ast.AST) -> object:
    """Return what a value looks like, so that `records[0]` is like `expected[1]`, and `min(a, b)` like `max(a, b)`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _shape(node.operand)
    if isinstance(node, ast.Constant):
        is_number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        return "number" if is_number else type(node.value).__name__
    return (type(node).__name__, *map(_shape, ast.iter_child_nodes(node)))


def _unlike_assignments(tree: ast.Module) -> Iterator[int]:
    """Yield the lines where values that do not look alike are assigned together."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple):
            names = [ast.unparse(name) for name in target.elts]
            read = {ast.unparse(name) for value in node.value.elts[1:] for name in ast.walk(value)}
            is_exchange = not read.isdisjoint(names[:-1])
            are_names = all(isinstance(name, ast.Name) for name in target.elts)
            values = node.value.elts
            functions = {ast.unparse(value.func) if isinstance(value, ast.Call) else None for value in values}
            is_one_function = len(functions) == 1 and None not in functions
            are_alike = is_one_function or len(set(map(_shape, values))) == 1
            if not is_exchange and not (are_names and are_alike):
                yield node.lineno


def test_a_statement_has_one_assignment() -> None:
    """Pairs that belong together look alike, such as two ends or two models; and an exchange needs both at once."""
    folders = ("sparseforge_ds", "tests", "benchmarks", "docs", "examples", "launch")
    trees = [item for folder in folders for item in trees_of(folder).items()]
    assert [f"{path}:{line}" for path, tree in trees for line in _unlike_assignments(tree)] == []


def test_a_file_name_is_one_thing() -> None:
    """A command may have the name of what it runs; nothing else shares one."""
    names = Counter(
        path.name for path in trees_of("sparseforge_ds") if path.parent.name != "cli" and path.name != "__init__.py"
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_command_that_is_advised_works_for_a_path_with_spaces() -> None:
    """A message quotes the path, or has a name for words that were quoted before."""
    unquoted = []
    for path, tree in trees_of("sparseforge_ds").items():
        for node in ast.walk(tree):
            for before, value in pairwise(node.values) if isinstance(node, ast.JoinedStr) else ():
                is_argument = isinstance(before, ast.Constant) and _ADVICE.search(before.value)
                if is_argument and "quote" not in ast.unparse(value) and ast.unparse(value) != "{run}":
                    unquoted.append(f"{path}:{node.lineno}")
    assert unquoted == []
