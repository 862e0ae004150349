"""Locks of torch's compiler: what the killed left is removed, the living are waited for."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from torch.utils.cpp_extension import load
from torch.utils.file_baton import FileBaton

import sparseforge_ds as sf
from sparseforge_ds import extension_locks
from sparseforge_ds.extension_locks import clear_extension_locks, extension_errors
from sparseforge_ds.integrations import transformers
from tests.distributed import PATIENCE
from tests.tiny_models import tiny_llama


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """Torch's folder of extensions, with one that was built long ago."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    built = tmp_path / "py311_cpu" / "some_op"
    built.mkdir(parents=True)
    touch(built / "some_op.so", 10_000)
    caplog.set_level(logging.INFO, "sparseforge_ds")
    return tmp_path


def touch(file: Path, seconds_ago: float) -> Path:
    file.touch()
    os.utime(file, (time.time() - seconds_ago,) * 2)
    return file


def test_what_a_killed_compiler_left_is_removed(root, caplog):
    lock = touch(root / "py311_cpu" / "some_op" / "lock", 9_000)
    clear_extension_locks()
    assert not lock.exists()
    assert caplog.messages == [f"removed {lock}, left by a process that was killed while it compiled"]
    clear_extension_locks()
    assert len(caplog.messages) == 1


def load_integration() -> None:
    """Run the module's statements as a first import does, under another name."""
    spec = importlib.util.spec_from_file_location("imported_anew", transformers.__file__)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("start", [lambda: sf.prepare(tiny_llama(), sf.SparseForgeConfig()), load_integration])
def test_a_trainer_and_a_loop_of_ones_own_remove_it_too(root, monkeypatch, start):
    """Remove it in the first process of a machine, once."""
    lock = root / "py311_cpu" / "some_op" / "lock"
    for rank, left in (("1", True), ("0", False), ("0", True)):
        if rank == "1" or not left:
            extension_locks.clear_before_training.cache_clear()
        monkeypatch.setenv("LOCAL_RANK", rank)
        touch(lock, 9_000)
        start()
        assert lock.exists() == left
    extension_locks.clear_before_training.cache_clear()


def test_a_living_compiler_is_waited_for(root, caplog, monkeypatch):
    """Wait for a compiler whose lock is an hour old, but which has just written a file."""
    monkeypatch.setattr(extension_locks, "BRIEF_SECONDS", 0.0)
    folder = root / "py311_cpu" / "some_op"
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    touch(folder / "lock", 3600)
    touch(folder / "some_op.o", 1)
    waiting = threading.Thread(target=clear_extension_locks)
    waiting.start()
    deadline = time.monotonic() + PATIENCE
    while not caplog.messages:
        assert waiting.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    assert (folder / "lock").exists()
    baton.release()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    (message,) = caplog.messages
    assert message.endswith(f"if nothing compiles there: rm {folder / 'lock'}")


def test_a_compiler_that_dies_while_others_wait(root, caplog, monkeypatch):
    monkeypatch.setattr(extension_locks, "GIVEN_UP_SECONDS", 2.0)
    lock = touch(root / "py311_cpu" / "some_op" / "lock", 0)
    clear_extension_locks()
    assert not lock.exists()
    assert "removed" in caplog.messages[-1]


def test_a_compiler_that_fails_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int wrong = nothing;\n")

    def failure(name: str) -> str:
        with (
            pytest.raises(ValueError, match=f"DeepSpeed's extension {name} ") as refusal,
            extension_errors(),
        ):
            load(name=name, sources=[str(source)], build_directory=str(tmp_path))
        return str(refusal.value)

    said = failure("broken")
    assert "error: \u2018nothing\u2019 was not declared" in said
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "another process" in failure("broken")  # which torch does not compile again
    said = failure("other")
    assert "/nowhere/g++: not found" in said and "apt install g++" in said and "\n" not in said
    # torch and DeepSpeed say each in its own words that there is no ninja.
    for text in (
        "Ninja is required to load C++ extensions (pip install ninja to get it)",
        "Unable to JIT load the fused_adam op due to ninja not being installed.",
    ):
        with pytest.raises(ValueError, match="ninja, which is not on PATH"), extension_errors():
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="no compiler"), extension_errors():
        raise RuntimeError("no compiler")


def test_training_does_not_wait_for_the_compiler_of_a_packed_product(root, caplog):
    folder = root / "py311_cpu" / "sparseforge_linear24"
    folder.mkdir()
    lock = touch(folder / "lock", 0)
    clear_extension_locks()
    assert lock.exists() and not caplog.messages


def test_the_first_start_on_a_machine_is_announced(root, caplog):
    (root / "py311_cpu" / "some_op").rename(root / "py311_cpu" / "sparseforge_linear24")  # not DeepSpeed's
    clear_extension_locks()
    assert caplog.messages == [
        "set-up: what DeepSpeed needs is compiled for this machine once, which takes a minute or two"
    ]
