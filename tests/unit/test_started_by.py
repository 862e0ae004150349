"""Starter of a process, as the process notes it while the starter is being killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparseforge_ds import started_by

LAUNCHER = """
import subprocess, sys
memory = bytearray(1 << 29)
memory[::4096] = b"1" * len(memory[::4096])  # a process with much memory takes long to end
subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""
"""Program that is killed; it starts the middle one."""

MIDDLE = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""
"""Program that the launcher starts, as launch.py of deepspeed; it lives on and starts the rank."""

RANK = """
import importlib.util, os, sys
from pathlib import Path
launcher = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
print(launcher, flush=True)
line = Path(f"/proc/{launcher}/cmdline")
while line.exists() and line.read_bytes():  # the test reaps the launcher only after this program
    pass
spec = importlib.util.spec_from_file_location("started_by", sys.argv[1])
started_by = importlib.util.module_from_spec(spec)
spec.loader.exec_module(started_by)
print(started_by.PARENT.pid == os.getppid(), started_by.GRANDPARENT.pid, flush=True)
"""
"""Program that notes its ancestors in the very moment in which the launcher has no command line any more."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_launcher_that_is_being_killed_is_no_longer_the_grandparent():
    """It has no command line for the last hundredths of a second, in which its children still call it their parent."""
    command = [sys.executable, "-c", LAUNCHER, MIDDLE, RANK, started_by.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert int(launcher.stdout.readline()) == launcher.pid
        launcher.kill()
        has_parent, grandparent = launcher.stdout.readline().split()
        assert has_parent == "True"
        assert int(grandparent) != launcher.pid


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_parent_of_a_living_process_is_noted_with_its_words():
    parent = started_by.note_parent_of(os.getpid())
    assert parent.pid == os.getppid()
    assert parent.command == tuple(Path(f"/proc/{parent.pid}/cmdline").read_text().split("\0")[:-1])
