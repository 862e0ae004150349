"""Locks of torch's compiler: what the dead left is removed, the living are waited for, and nobody takes a fresh one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sparseforge_ds.train import extension_locks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# torch's own lock, from its file: importing torch would take seconds. Each line on stdin lets it go one step on.
COMPILER = """
import importlib.util, os, sys, time
from sparseforge_ds.train.extension_locks import watch_extension_locks
spec = importlib.util.spec_from_file_location("file_baton", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
watch_extension_locks()
watch_extension_locks()
baton = module.FileBaton(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
while not baton.try_acquire():
    print("another one was quicker", flush=True)
    baton.wait()
alone = os.path.join(os.path.dirname(sys.argv[2]), "alone")
os.mkdir(alone)  # fails where another one compiles
print("compiles", flush=True)
sys.stdin.readline()
os.rmdir(alone)
baton.release()
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """The lock of an extension that is built; it is not there yet."""
    folder = tmp_path / "extensions" / "some_op"
    folder.mkdir(parents=True)
    (folder / "some_op.so").touch()
    return folder / "lock"


@contextlib.contextmanager
def compiler(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that will take the lock."""
    spec = importlib.util.find_spec("torch.utils")
    assert spec is not None and spec.submodule_search_locations is not None
    baton = Path(spec.submodule_search_locations[0]) / "file_baton.py"
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILER, str(baton), str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        assert said(process) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def test_what_a_killed_compiler_left_is_removed(lock: Path) -> None:
    with compiler(lock) as first, compiler(lock) as second:
        go_on(first)
        assert said(first) == "compiles"
        (lock.parent / "alone").rmdir()
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert lock.exists()
        go_on(second)
        assert said(second) == (f"set-up: removed {lock}, left by a process that was killed while it compiled some_op")
        assert said(second) == "compiles"
        go_on(second)
        assert second.wait() == 0
    assert not lock.exists()


def test_a_living_compiler_is_waited_for_and_its_lock_is_its_own(lock: Path) -> None:
    with compiler(lock) as first, compiler(lock) as second:
        go_on(first)
        assert said(first) == "compiles"
        go_on(second)
        line = said(second)
        assert line.startswith(f"set-up: waiting for process {first.pid} (") and line.endswith("which compiles some_op")
        go_on(first)
        assert first.wait() == 0
        assert said(second) == "compiles"


def test_a_compiler_that_dies_while_others_wait(lock: Path) -> None:
    """The others go on, one after another: each finds the folder its own."""
    with contextlib.ExitStack() as stack:
        first, *others = [stack.enter_context(compiler(lock)) for _ in range(4)]
        go_on(first)
        assert said(first) == "compiles"
        for process in others:
            go_on(process)
            assert said(process).startswith(f"set-up: waiting for process {first.pid} (")
        (lock.parent / "alone").rmdir()
        first.send_signal(signal.SIGKILL)
        first.wait()
        lines = []
        for process in others:
            go_on(process)  # as soon as it compiles, it is done
        for process in others:
            rest, _ = process.communicate()
            assert process.returncode == 0, rest
            assert "compiles" in rest.splitlines()
            lines += [line for line in rest.splitlines() if line.startswith("set-up: removed")]
        assert len(lines) == 1


def test_the_ninja_of_a_dead_compiler_still_compiles(lock: Path, tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    lock.touch()
    ninja = subprocess.Popen([shutil.copy(sleep, tmp_path / "ninja"), "3600"], cwd=lock.parent)
    try:
        with compiler(lock) as process:
            go_on(process)
            assert said(process).startswith(f"set-up: waiting for process {ninja.pid} (")
            ninja.kill()
            ninja.wait()
            assert said(process).startswith("set-up: removed")
            assert said(process) == "compiles"
    finally:
        ninja.kill()
        ninja.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_lock_of_another_user_stays_and_the_cure_is_said(lock: Path) -> None:
    lock.touch()
    os.chown(lock, 12345, -1)
    with compiler(lock) as process:
        go_on(process)
        assert said(process) == (
            f"set-up: waiting for {lock}, of a process that compiles some_op; it is of user 12345, whose processes we "
            f"cannot see. If nothing compiles there any more: rm {lock}"
        )
        lock.unlink()
        assert said(process) == "compiles"


def test_where_another_machine_may_hold_it(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no network file system here; what the system says of one is replaced."""
    lock.touch()
    assert extension_locks._why_hidden(lock) is None
    entry = psutil.disk_partitions(all=True)[0]._replace(mountpoint=str(lock.parents[1]), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [entry])
    assert extension_locks._why_hidden(lock) == (f"it may live on another machine, as {lock.parents[1]} is nfs4")


def test_a_fresh_lock_of_the_same_name_is_not_removed(lock: Path) -> None:
    lock.touch()
    old = extension_locks._identity(lock)
    assert old is not None
    lock.rename(lock.with_name("other"))
    lock.touch()
    assert not extension_locks._remove(lock, old)
    assert lock.exists()
    fresh = extension_locks._identity(lock)
    assert fresh is not None and extension_locks._remove(lock, fresh)
    assert not lock.exists()
