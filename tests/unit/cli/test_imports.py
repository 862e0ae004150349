from __future__ import annotations

import gc
import importlib
import sys

import pytest

from sparseforge_ds.cli.imports import large_imports


def test_what_is_imported_is_no_garbage_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    frozen = gc.get_freeze_count()
    with large_imports():
        assert not gc.isenabled()
        importlib.import_module("this")
    assert gc.isenabled() and gc.get_freeze_count() > frozen


def test_nothing_new_leaves_garbage_what_it_is() -> None:
    """Collect garbage where nothing was imported: a process of many commands would keep it."""
    importlib.import_module("sparseforge_ds.cli.main")
    frozen = gc.get_freeze_count()
    with large_imports():
        importlib.import_module("sparseforge_ds.cli.main")
    assert gc.isenabled() and gc.get_freeze_count() <= frozen


def test_an_import_that_fails_leaves_collection_on() -> None:
    with pytest.raises(ModuleNotFoundError), large_imports():
        importlib.import_module("no_such_module")
    assert gc.isenabled()
