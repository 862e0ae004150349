"""SIGTERM and Ctrl-C, as one process sees them; tests/end_to_end/test_preemption.py sends it to whole runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from sparseforge_ds.started_by import Ancestor
from sparseforge_ds.train import preemption
from sparseforge_ds.train.preemption import PreemptedError, Preemption
from tests.distributed import PATIENCE


@pytest.fixture(autouse=True)
def in_a_terminal():
    """Restore Ctrl-C, which a script's background processes ignore; these tests may be one of them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


@SIGNALS
def test_in_training_a_signal_is_noted_however_often_a_launcher_sends_it(number, code):
    before = signal.getsignal(number)
    with Preemption() as preemption:
        preemption.begin_steps()
        assert not preemption.requested
        for again in (number, number, signal.SIGTERM):
            os.kill(os.getpid(), again)
        assert preemption.requested == number
    assert signal.getsignal(number) is before


@SIGNALS
def test_once_stopped_the_signal_changes_nothing(number, code):
    before = {item: signal.getsignal(item) for item in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(PreemptedError, match="at step 3") as stopped, Preemption():
            raise PreemptedError(number, "at step 3")
        assert stopped.value.exit_code == code
        os.kill(os.getpid(), number)
    finally:
        for item, handler in before.items():
            signal.signal(item, handler)


def test_ctrl_c_leaves_a_job_in_the_background_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Preemption():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


BEFORE_TRAINING = """
import os, resource, time
from sparseforge_ds.train.preemption import Preemption
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
files = [os.dup(0) for _ in range(1100)]  # a run with many shards and texts open
with Preemption():
    print("ready", flush=True)
    {wait}
"""
# What holds the interpreter's main thread in C, where no handler of Python's runs until it is done.
STUCK = "import ctypes; libc = ctypes.CDLL(None); [libc.sleep(600) for _ in range(2)]"


@SIGNALS
@pytest.mark.parametrize("wait", ["time.sleep(600)", STUCK])
def test_before_training_a_signal_ends_the_process_at_once(number, code, wait):
    process = subprocess.Popen(
        [sys.executable, "-c", BEFORE_TRAINING.format(wait=wait)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE) == code
    assert time.monotonic() - began < 30
    message = f"stopped by {signal.Signals(number).name} before its first step: there is nothing to save\n"
    assert process.stdout.read() == message


COMPILING = """
import time
from pathlib import Path
from torch.utils.file_baton import FileBaton
from sparseforge_ds.train.preemption import Preemption
folder = Path({folder!r})
held, foreign = (FileBaton(str(folder / name / "lock")) for name in ("held", "foreign"))
with Preemption():
    print(held.try_acquire(), foreign.try_acquire(), flush=True)
    time.sleep(600)
"""


def test_a_process_that_is_ended_while_it_compiles_leaves_no_lock_of_its_own(tmp_path, monkeypatch):
    """Else processes that wait for the lock already, having looked for old ones, would wait for ever."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("held", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / "lock").touch()
    script = COMPILING.format(folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "True False\n"
    process.terminate()
    assert process.wait(timeout=PATIENCE) == 143
    process.stdout.close()
    assert [file.parent.name for file in tmp_path.rglob("lock")] == ["foreign"]


IN_TRAINING = """
import ctypes
from sparseforge_ds.train.preemption import Preemption
with Preemption() as preemption:
    preemption.begin_steps()
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(600)
    while True:
        ctypes.CDLL(None).sleep(600)
"""


def test_a_process_ends_although_nobody_reads_its_output():
    """Close its output, as the `| tee` behind it is ended by the same Ctrl-C."""
    process = subprocess.Popen([sys.executable, "-c", IN_TRAINING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE) == 130


@pytest.mark.parametrize(("environment", "last"), [({}, signal.SIGINT), ({"TORCHELASTIC_RUN_ID": "x"}, signal.SIGTERM)])
def test_the_second_ctrl_c_ends_a_step_that_takes_long(environment, last):
    """torchrun keeps the second for itself and sends SIGTERM instead; deepspeed does that with the first already."""
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TRAINING], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("SIGINT: the run saves after this step or the next; Ctrl-C again ")
    process.send_signal(signal.SIGINT)  # the same one, once more from a launcher
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(last)
    assert process.wait(timeout=PATIENCE) == 130
    assert process.stdout.read() == "ended at once by SIGINT; --resume continues from the newest checkpoint\n"


INIT = Ancestor(1, ("/sbin/init",))
BASH = Ancestor(77, ("bash",))
LAUNCH = ("python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30=")
RUNNER = Ancestor(70, ("/usr/bin/python3", "/usr/bin/deepspeed", "launch/train.py"))
IN_LAUNCH = {"CROSS_RANK": "0", "CROSS_SIZE": "1"}
IN_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "parent", "grandparent", "lost"),
    [
        (IN_TORCHRUN, INIT, Ancestor(0, ()), True),
        (IN_TORCHRUN, Ancestor(1, ("/usr/bin/python3", "/usr/bin/torchrun")), Ancestor(0, ()), False),
        (IN_TORCHRUN, BASH, INIT, False),
        (IN_LAUNCH, INIT, Ancestor(0, ()), True),
        (IN_LAUNCH, Ancestor(71, LAUNCH), INIT, True),
        (IN_LAUNCH, Ancestor(71, LAUNCH), RUNNER, False),
        (IN_LAUNCH, Ancestor(71, LAUNCH), Ancestor(1, RUNNER.command), False),
        (IN_LAUNCH | {"CROSS_SIZE": "2"}, Ancestor(71, LAUNCH), INIT, False),
        (IN_LAUNCH, BASH, INIT, False),
        ({}, INIT, Ancestor(0, ()), False),
    ],
)
def test_a_process_knows_if_its_launcher_was_gone_at_its_start(monkeypatch, environment, parent, grandparent, lost):
    for name in ("CROSS_RANK", "CROSS_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(preemption, "PARENT", parent)
    monkeypatch.setattr(preemption, "GRANDPARENT", grandparent)
    assert preemption.began_as_an_orphan() is lost
