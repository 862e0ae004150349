"""Shared set-up of all tests: real assets, deterministic seeds, and the `gpu`, `fast` and `extras` markers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import numpy
import pytest
import torch

from sparseforge_ds.cli.imports import large_imports
from tests import forked_interpreter

ROOT = Path(__file__).resolve().parent.parent
FAST = (
    "mask",
    "packed_format",
    "config",
    "curvature",
    "checkpoint",
    "model",
    "data",
    "test_imports.py",
    "test_source_rules.py",
)
"""Parts of tests/unit with the `fast` marker; single tests elsewhere have it at their definition."""
EXTRAS = (
    "unit/extras",
    "unit/launch/test_recipes.py",  # by dry runs
    "zero/test_planned_memory.py",
    *(f"end_to_end/test_{name}.py" for name in ("bench", "closer", "compare", "permute")),
    *(f"end_to_end/test_{name}.py" for name in ("rehearsal", "rotate", "vllm")),
)
"""Tests that need `sparseforge_ds/extras`, and nothing else does: they have the `extras` marker."""

# pytest keeps the tests whose assertions it has rewritten, and the next run collects them in two thirds of the time.
sys.dont_write_bytecode = False
torch.set_num_threads(1)
# What a killed process has written is there without it. Only a machine that stops loses files; no test stops one.
os.fsync = lambda _: None
hypothesis.settings.register_profile("suite", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("suite")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is fast and what is of extras, and skip what needs a GPU where there is none."""
    for item in items:
        path = item.path.relative_to(ROOT / "tests")
        if path.parts[:2] in [("unit", name) for name in FAST]:
            item.add_marker("fast")
        if any(path.is_relative_to(name) for name in EXTRAS):
            item.add_marker("extras")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the objects of imports and tests out of garbage collection, while they are made and later."""
    with large_imports():
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def leave_ranks() -> Iterator[None]:
    """Close the process group that a command joined in this process: every later `Ranks` would add four descriptors."""
    yield
    if torch.distributed.is_initialized():
        import deepspeed

        (deepspeed.comm if deepspeed.comm.is_initialized() else torch.distributed).destroy_process_group()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed every test alike, whatever ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def forked_proofs() -> Iterator[None]:
    """Fork the proofs of exports from an interpreter with the imports done, instead of seconds of import each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", forked_interpreter.run)
        yield


@pytest.fixture(scope="session")
def assets() -> Path:
    """Folder with real models and texts: SPARSEFORGE_ASSETS, or `shared/assets` beside the checkout."""
    folder = Path(os.environ.get("SPARSEFORGE_ASSETS", ROOT.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip(f"no real assets in {folder}; set SPARSEFORGE_ASSETS to a folder with models/ and text/")
    return folder


@pytest.fixture(scope="session")
def stories(assets: Path) -> str:
    """Folder of a real model of 260,000 weights."""
    folder = assets / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no model in {folder}, which SPARSEFORGE_ASSETS names; give a folder with models/stories260K")
    return str(folder)
