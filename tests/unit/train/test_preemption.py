"""SIGTERM, as one process sees it; tests/end_to_end/test_preemption.py sends it to whole runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from sparseforge_ds.train.preemption import Preemption, Stopped


def test_in_training_it_is_noted_however_often_it_comes():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        preemption.begin_training()
        assert not preemption.requested
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_once_stopped_the_signal_changes_nothing():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Stopped), Preemption():
            raise Stopped("for a test")
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


BEFORE_TRAINING = """
import sys, time
from pathlib import Path
from sparseforge_ds.train.preemption import Preemption
with Preemption():
    try:
        print("ready", flush=True)
        {wait}
    finally:
        Path(sys.argv[1]).unlink()
"""
# What holds the interpreter's main thread in C, where no handler of Python's runs until it is done.
STUCK = "import ctypes; libc = ctypes.CDLL(None); [libc.sleep(60) for _ in range(2)]"


@pytest.mark.parametrize(("wait", "cleaned", "seconds"), [("time.sleep(60)", True, 3), (STUCK, None, 10)])
def test_before_training_it_ends_the_process_at_once(tmp_path, wait, cleaned, seconds):
    leftover = tmp_path / "half-written"
    leftover.touch()
    process = subprocess.Popen(
        [sys.executable, "-c", BEFORE_TRAINING.format(wait=wait), str(leftover)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert time.monotonic() - began < seconds
    if cleaned:
        assert not leftover.exists()
