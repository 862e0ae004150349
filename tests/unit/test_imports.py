"""Table of who may import whom (CONTRIBUTING has it for people), and file names that do not exist."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from sparseforge_ds.transformers_internals import WHERE

PACKAGE = Path(__file__).resolve().parents[2] / "sparseforge_ds"

# Which rooms of ours each room may import; they stand above it here. Nothing outside `extras` imports `extras`, except
# the command line, inside functions; rooms of `extras` do not import one another.
MAY_IMPORT: dict[str, str] = {
    "ranks": "",
    "started_by": "",
    "extension_locks": "",
    "transformers_internals": "",
    "mask": "",
    "packed_format": "mask",
    "config": "mask",
    "checkpoint": "",
    "zero": "ranks transformers_internals mask config checkpoint",
    "model": "ranks extension_locks transformers_internals mask packed_format config checkpoint zero",
    "data": "ranks config checkpoint model",
    "mask_metrics": "mask zero model",
    "sharded_weights": "mask config zero model mask_metrics",
    "start": "ranks mask config zero model sharded_weights",
    "branches": "mask zero model sharded_weights",
    "curvature": "mask config zero model sharded_weights",
    "methods": "mask config zero model start sharded_weights curvature",
    "saved_state": "config checkpoint zero model sharded_weights curvature",
    "forge": "mask config checkpoint zero model sharded_weights branches curvature methods saved_state",
    "export": "transformers_internals mask packed_format config checkpoint model",
    "evaluate": "ranks mask packed_format config checkpoint model data start",
    "prune": "transformers_internals mask config checkpoint model start data export evaluate",
    "train": "ranks started_by extension_locks transformers_internals mask config checkpoint zero model data "
    "sharded_weights start forge",
    "integrations": "extension_locks mask packed_format config checkpoint zero model data forge train",
    "extras.fsdp2": "zero",
    "extras.basis": "mask config checkpoint zero model start export",
    "extras.packed24": "extension_locks transformers_internals packed_format model evaluate",
    "extras.planner": "transformers_internals mask packed_format config zero model data export train start prune",
    "extras.studies": "mask config checkpoint model data start export evaluate prune train",
    "cli": "ranks mask packed_format config checkpoint model export evaluate prune train",
}
# All libraries of the rooms that shall need few.
LIBRARIES_OF: dict[str, str] = {
    "ranks": "torch",
    "started_by": "",
    "extension_locks": "torch",
    "transformers_internals": "",
    "mask": "torch triton",
    "packed_format": "torch",
    "checkpoint": "safetensors torch",
    "start": "torch transformers",
    "branches": "torch",
    "curvature": "numpy torch transformers",
}
# All rooms that import a library that others can do without.
ROOMS_WITH: dict[str, str] = {
    "deepspeed": "config zero model train",
    "triton": "mask extras.packed24",
    "vllm": "extras.packed24",
}
# The public names.
FREE = {"__init__", "__main__"}

FORBIDDEN_STEMS = {"utils", "util", "common", "helpers", "helper", "base", "misc"}

FILES = sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache  # many tests ask for the same files, and a file takes milliseconds
def _imports(path: Path, types: bool = True) -> frozenset[str]:
    """Return every module a file names in an import, at its top or inside a function; ours without `sparseforge_ds.`.

    DeepSpeed counts where it is imported in fact, and not for types alone; the others do without `types`.
    """
    result = set()
    for_types = set()
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types |= {id(below) for statement in node.body for below in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in for_types and (not types or getattr(node, "module", None) == "deepspeed"):
            continue
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it from sparseforge_ds down"
            assert node.module is not None
            if node.module == "sparseforge_ds" or (PACKAGE.parent / node.module.replace(".", "/")).is_dir():
                result |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                result.add(node.module)
    return frozenset(name.removeprefix("sparseforge_ds.") for name in result)


def _room(module: str) -> str:
    """Return the first name of a module's path; below `extras`, the first two."""
    return ".".join(module.split(".")[: 2 if module.startswith("extras.") else 1])


OURS = {_room(_module(file)) for file in FILES} | {"__version__", "sparseforge_ds", "typing_extensions"}


def _rooms(path: Path) -> set[str]:
    return {_room(name) for name in _imports(path)} & set(MAY_IMPORT) - {_room(_module(path))}


def _libraries(path: Path) -> set[str]:
    return {_room(name) for name in _imports(path)} - OURS - sys.stdlib_module_names


def _imports_outside_functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(below) for function in functions for below in ast.walk(function)}
    for condition in ast.walk(tree):
        if isinstance(condition, ast.If) and ast.unparse(condition.test) == "TYPE_CHECKING":
            inside |= {id(below) for below in ast.walk(condition)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in inside]
    return {(node.module or "").removeprefix("sparseforge_ds.") for node in imports}


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_go_one_way(path: Path) -> None:
    room = _room(_module(path))
    if room in FREE or room == "extras.__init__":
        return
    assert room in MAY_IMPORT, f"{room} is a new room: give it a row in MAY_IMPORT and in CONTRIBUTING.md"
    offenders = _rooms(path) - set(MAY_IMPORT[room].split())
    if room == "cli":
        offenders = {name for name in offenders if not name.startswith("extras.")}
    assert not offenders, f"{path.relative_to(PACKAGE.parent)} may not import {sorted(offenders)}"
    more = _libraries(path) - set(LIBRARIES_OF.get(room, "").split()) if room in LIBRARIES_OF else set()
    more |= {name for name in _libraries(path) & set(ROOMS_WITH) if room not in ROOMS_WITH[name].split()}
    assert not more, f"{path.relative_to(PACKAGE.parent)} may not import {sorted(more)}"


def test_no_arrow_runs_upward() -> None:
    order = list(MAY_IMPORT)
    for room, names in MAY_IMPORT.items():
        below = set(names.split()) & set(order[order.index(room) :])
        assert not below, f"{room} may import {sorted(below)}, which stand below it"


def test_only_the_command_line_imports_extras_and_only_inside_functions() -> None:
    for path in FILES:
        name = _module(path)
        if name.startswith("extras."):
            continue
        assert name.startswith("cli.") or not any(module.startswith("extras") for module in _imports(path)), name
        assert not any(module.startswith("extras") for module in _imports_outside_functions(path)), name


def test_no_file_imports_itself_by_way_of_others() -> None:
    modules = {_module(path): path for path in FILES}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, path in modules.items():
        result = {
            next((first for first in (f, f.rpartition(".")[0]) if first in modules), None)
            for f in _imports(path, types=False)
        }
        sorter.add(name, *(result - {name, None}))
    try:
        sorter.prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' -> '.join(circle.args[1])}")


def test_internals_of_transformers_are_imported_in_one_place() -> None:
    """Import them where their absence is an error that names the version."""
    modules = {f"transformers.{module}" for module in WHERE.values()} - {"transformers.modeling_outputs"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert node.module not in modules and not private, (
                    f"{path}, line {node.lineno}: import it from sparseforge_ds.transformers_internals"
                )


def test_rows_are_not_stale() -> None:
    for room, names in MAY_IMPORT.items():
        imported = {name for path in FILES if _room(_module(path)) == room for name in _rooms(path)}
        assert set(names.split()) <= imported, f"{room} no longer imports {sorted(set(names.split()) - imported)}"
    for library, rooms in ROOMS_WITH.items():
        users = {_room(_module(path)) for path in FILES if library in _libraries(path)}
        assert set(rooms.split()) <= users, f"{sorted(set(rooms.split()) - users)} no longer import {library}"


def test_collectives_go_through_the_layout() -> None:
    """Use the layout's group of ZeRO; only the trainer, and the ranks' talk about errors and results, do without."""
    direct = {_module(path) for path in FILES if "torch.distributed" in _imports(path)}
    direct = {name for name in direct if not name.startswith("train.")}
    assert direct == {"zero.shard", "zero.deepspeed_layouts", "ranks"}


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_a_file_has_a_noun_of_its_own(path: Path) -> None:
    assert path.stem not in FORBIDDEN_STEMS
    assert path.parent.name not in FORBIDDEN_STEMS
