"""SIGTERM to a real run under the real launcher: it saves, ends, and goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.distributed import ROOT
from tests.end_to_end.test_train import differences, flags_of, states, train
from tests.tiny_folders import deepspeed_json

STEPS = 400


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@contextlib.contextmanager
def launched(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """`deepspeed --num_gpus 2 launch/train.py FLAGS` in a process group of its own, of which nothing survives."""
    bin_folder = Path(sys.executable).parent
    command = [str(bin_folder / "deepspeed"), "--num_gpus", "2", "--master_port", free_port(), "launch/train.py"]
    process = subprocess.Popen(
        [*command, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def family(process: subprocess.Popen[str]) -> tuple[psutil.Process, list[psutil.Process]]:
    """launch.py and the ranks."""
    (launcher,) = psutil.Process(process.pid).children()
    ranks = [child for child in launcher.children() if "launch/train.py" in child.cmdline()]
    assert len(ranks) == 2
    return launcher, ranks


def to_the_group(process: subprocess.Popen[str]) -> None:
    """What a batch system does: every process gets it, and the ranks get it again from their launcher."""
    os.killpg(process.pid, signal.SIGTERM)


def to_one_rank(process: subprocess.Popen[str]) -> None:
    family(process)[1][1].terminate()


def to_launch_py(process: subprocess.Popen[str]) -> None:
    family(process)[0].terminate()


def to_the_command(process: subprocess.Popen[str]) -> None:
    """`kill` of what was typed: it dies of it and tells nobody."""
    process.terminate()


def stopped(flags: list[str], send: Callable[[subprocess.Popen[str]], None]) -> tuple[int, int]:
    """Start a run, stop it some steps later; the exit code and the step at which it says it stopped."""
    with launched(*flags) as process:
        assert process.stdout is not None
        lines = []
        seen = 0
        for line in process.stdout:
            lines.append(line)
            seen += line.startswith("step ")
            if seen == 3:
                break
        assert seen == 3, "".join(lines)
        _, ranks = family(process)
        send(process)
        rest = process.stdout.read()
        code = process.wait(timeout=60)
        gone, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive, "no rank trains on"
        (line,) = [line for line in rest.splitlines() if line.startswith("stopped by SIGTERM")]
        assert line.endswith("; continue with --resume")
        assert "Traceback" not in rest, rest
        return code, int(line.split("at step ")[1].split(";")[0])


def test_a_run_that_is_stopped_in_every_way_equals_an_unbroken_one(tmp_path):
    """Each start is stopped by a signal to someone else; the sum of them is the run that was left alone."""
    content = deepspeed_json(batch=4, max_steps=STEPS, schedule={"update_every": 10, "hardening": [0.25, 0.75]})
    more = {"max_steps": STEPS, "save_every": 0, "log_every": 1}
    flags = flags_of(tmp_path, content, **more)
    checkpoints = tmp_path / "run" / "checkpoints"
    last = 0
    for send, code in ((to_the_group, None), (to_one_rank, 143), (to_launch_py, 1), (to_the_command, -signal.SIGTERM)):
        ended, step = stopped([*flags, "--resume"] if last else flags, send)
        assert last < step < STEPS, send.__name__
        assert ended == code if code is not None else ended != 0, send.__name__
        assert (checkpoints / "latest").read_text() == f"step_{step:06d}"
        assert not (tmp_path / "run" / "result.json").exists()
        assert not list(checkpoints.glob("*.tmp"))
        last = step
    train(*flags, "--resume")
    train(*flags_of(tmp_path, content, output_dir=tmp_path / "unbroken", **more))
    tag = f"step_{STEPS:06d}"
    unbroken = states(tmp_path / "unbroken" / "checkpoints" / tag)
    assert differences(states(checkpoints / tag), unbroken) == []


def handles_sigterm(pid: int) -> bool:
    """Whether a process has a handler of its own by now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    raise AssertionError("no SigCgt")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_before_training_a_rank_ends_at_once(tmp_path):
    """It waits, inside a C function, for another rank that will never come."""
    flags = flags_of(tmp_path, deepspeed_json(batch=4))
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, "launch/train.py", *flags],
        cwd=ROOT,
        env={**os.environ, **environment, "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"},
    )
    try:
        while not handles_sigterm(process.pid):
            time.sleep(0.1)
        time.sleep(3)
        began = time.monotonic()
        process.terminate()
        assert process.wait(timeout=60) == 143
        assert time.monotonic() - began < 15
    finally:
        process.kill()
    assert not (tmp_path / "run" / "checkpoints").exists()
