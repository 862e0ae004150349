"""SIGTERM and Ctrl-C to a real run under real launchers: it saves, ends, and goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch.utils.cpp_extension import get_default_build_root

from sparseforge_ds.train.launcher import free_port
from tests.distributed import PATIENCE, ROOT, run_distributed
from tests.end_to_end.test_train import differences, flags_of, run_trainer, states
from tests.tiny_folders import deepspeed_json, write_text

STEPS = 1000
"""More than any run here makes: they are stopped once something has happened."""

BIN = Path(sys.executable).parent
ALONE = [sys.executable, "-m", "sparseforge_ds", "train"]


def deepspeed() -> list[str]:
    return [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port()), "launch/train.py"]


def torchrun() -> list[str]:
    command = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())]
    return [*command, "-m", "sparseforge_ds", "train"]


@contextlib.contextmanager
def launched(command: list[str], *flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own, like a terminal's; nothing of it survives."""
    process = subprocess.Popen(
        [*command, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heeds_ctrl_c,
    )
    # Whoever reads its output would wait for ever for a run that hangs.
    limit = threading.Timer(PATIENCE, _kill_family, (process.pid,))
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        _kill_family(process.pid)
        process.wait()


def _kill_family(pid: int) -> None:
    """Kill the leader of a session, and all that it has started."""
    for item in descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            item.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def heeds_ctrl_c() -> None:
    """Jobs that a script starts in the background do not, and these tests may be part of one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes that a process has started; those of torchrun have sessions of their own."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def family(process: subprocess.Popen[str]) -> tuple[psutil.Process, list[psutil.Process]]:
    """launch.py and the ranks."""
    (launcher,) = psutil.Process(process.pid).children()
    ranks = ranks_of(process)
    assert len(ranks) == 2
    return launcher, ranks


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes under launch.py which run our script."""
    results = []
    for item in descendants(process.pid):
        with contextlib.suppress(psutil.Error):
            if "launch/train.py" in item.cmdline()[:3]:  # python -u launch/train.py
                results.append(item)
    return results


def until(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    """Wait for something that a process does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def to_the_group(process: subprocess.Popen[str]) -> None:
    """Signal as a batch system does: every process gets it, and the ranks get it again from their launcher."""
    os.killpg(process.pid, signal.SIGTERM)


def to_the_command(process: subprocess.Popen[str]) -> None:
    """`kill` of what was typed: it dies of it and tells nobody."""
    process.terminate()


def kill_the_command(process: subprocess.Popen[str]) -> None:
    """Kill the command as a machine does that is out of memory."""
    process.kill()


def ctrl_c(process: subprocess.Popen[str]) -> None:
    """Send Ctrl-C as a terminal does: the launcher gets it too, and passes it on in its own way."""
    os.killpg(process.pid, signal.SIGINT)


def stopped(
    command: list[str], flags: list[str], send: Callable[[subprocess.Popen[str]], None], **environment: str
) -> tuple[int, int, str]:
    """Start a run, stop it some steps later; the exit code, the step at which it says it stopped, and the signal."""
    with launched(command, *flags, **environment) as process:
        assert process.stdout is not None
        lines = []
        records = 0
        for line in process.stdout:
            lines.append(line)
            records += line.startswith("step ")
            if records == 3:
                break
        assert records == 3, "".join(lines)
        ranks = descendants(process.pid)
        send(process)
        rest = process.stdout.read()
        code = process.wait(timeout=PATIENCE)
        gone, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
        assert not alive, "no rank trains on"
        (messages,) = re.findall(r"stopped by (\w+) at step (\d+); continue with --resume\n", rest)
        # deepspeed and torchrun have a traceback of their own for Ctrl-C, the ranks have none.
        assert not re.search('File ".*(launch/train.py|sparseforge_ds).*", line', rest), rest
        assert send is ctrl_c and command != ALONE or "Traceback" not in rest, rest
        removed = [line for line in lines if "left by a process that was killed" in line]
        assert len(removed) == len(environment), lines  # by one rank, where a lock was left
        return code, int(messages[1]), messages[0]


def left_lock(extensions: Path) -> Path:
    """Leave a lock as a compiler does that was killed with `kill -9` some minutes ago."""
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    shutil.copytree(built, extensions, ignore=shutil.ignore_patterns("lock"))  # with its times: nothing is built again
    lock = extensions / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    os.utime(lock, (time.time() - 600,) * 2)
    return lock


def _main_until(flags: list[str], saved: str) -> int:
    """Train; rank 1, and no other, gets SIGTERM once a checkpoint is there. The exit code."""
    if os.environ["RANK"] == "1":
        threading.Thread(target=_terminate_after, args=(Path(saved),), daemon=True).start()
    return run_trainer(flags)


def _terminate_after(saved: Path) -> None:
    while not saved.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_stopped_in_every_way_equals_an_unbroken_one(tmp_path):
    """Stop every launch by a signal to another process; all launches together equal the run that was left alone.

    The first launch finds the lock of a compiler that was killed, and removes it. The last one, and the run that was
    left alone until then, have no launcher: there one rank gets the signal.
    """
    content = deepspeed_json(batch=4, max_steps=STEPS, method={"update_every": 10, "hardening": [0.02, 0.75]})
    more = {"max_steps": STEPS, "log_every": 1, "keep_checkpoints": 0}
    flags = flags_of(tmp_path, content, save_every=0, **more)
    checkpoints = tmp_path / "run" / "checkpoints"
    lock = left_lock(tmp_path / "extensions")
    last_step = 0
    # Each launch is stopped on its way, and saves the step that it has reached.
    for command, send, code in (
        (deepspeed(), to_the_group, None),
        (deepspeed(), ctrl_c, -signal.SIGINT),
        (torchrun(), kill_the_command, -signal.SIGKILL),
    ):
        environment = {} if last_step else {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
        ended, step, by = stopped(command, [*flags, "--resume"] if last_step else flags, send, **environment)
        assert not lock.exists()
        assert last_step < step < STEPS, send.__name__
        assert ended == code if code is not None else ended != 0, send.__name__
        assert by == ("SIGINT" if send is ctrl_c else "SIGTERM"), send.__name__
        assert (checkpoints / "latest").read_text() == f"step_{step:06d}"
        assert not (tmp_path / "run" / "result.json").exists()
        assert not list(checkpoints.glob("*.tmp"))
        last_step = step
    # Let both runs pass one more update of masks, and compare all states there.
    end = last_step + 11  # with an update of masks on the way
    tag = f"step_{end:06d}"
    compared = []
    for name, resume in (("run", ["--resume"]), ("unbroken", [])):
        run = tmp_path / name
        flags = [*flags_of(tmp_path, content, output_dir=run, save_every=end, **more), *resume]
        assert run_distributed(_main_until, 2, flags, str(run / "checkpoints" / tag)) == [143, 143]
        assert (run / "checkpoints" / "latest").read_text() > tag
        compared.append(states(run / "checkpoints" / tag))
    assert differences(*compared) == []


def test_one_process_without_a_launcher_stops_at_ctrl_c_and_goes_on(tmp_path):
    """Stop a run as a user does in a terminal."""
    flags = flags_of(tmp_path, deepspeed_json(batch=4, max_steps=STEPS), max_steps=STEPS, save_every=0, log_every=1)
    code, step, by = stopped(ALONE, flags, ctrl_c)
    assert (code, by) == (130, "SIGINT")
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step_{step:06d}"
    code, later, by = stopped(ALONE, [*flags, "--resume"], to_the_command)
    assert (code, by) == (143, "SIGTERM")
    assert later > step


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_while_the_program_is_read_is_quiet(tmp_path):
    with launched(ALONE, *flags_of(tmp_path, deepspeed_json(batch=4))) as process:
        until(process, lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
        ctrl_c(process)
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
        assert process.wait(timeout=PATIENCE) in (-signal.SIGINT, 130)  # shells say 130 of both
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_in_a_start_all_ranks_end_with_the_command_that_started_them(tmp_path):
    """It dies of SIGTERM and tells nobody. The start takes far longer than the ranks may."""
    flags = flags_of(tmp_path, deepspeed_json(batch=4, start={"tokens": 1280, "epochs": 10_000}))
    with launched(deepspeed(), *flags) as process:
        assert process.stdout is not None
        printed = iter(process.stdout.readline, "")
        assert any("start: 1,280 tokens" in line for line in printed)  # and reads on from there
        launcher, ranks = family(process)
        process.terminate()
        assert process.wait(timeout=PATIENCE) == -signal.SIGTERM
        _, alive = psutil.wait_procs([launcher, *ranks], timeout=PATIENCE)
        assert not alive
        rest = process.stdout.read()
        assert "stopped by SIGTERM before its first step: there is nothing to save" in rest
        assert "Traceback" not in rest and "step 1/" not in rest
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("command", [deepspeed, torchrun])
def test_while_ranks_import_they_end_with_the_command_that_started_them(command, tmp_path):
    """It is killed before they could look who it is."""
    write_text(tmp_path / "text.jsonl")
    with launched(command(), *flags_of(tmp_path, deepspeed_json(batch=4))) as process:
        until(process, lambda: len(with_rank(process)) == 2)
        everybody = descendants(process.pid)
        process.kill()
        _, alive = psutil.wait_procs(everybody, timeout=PATIENCE)
        assert not alive
    assert not (tmp_path / "run" / "checkpoints").exists()


def with_rank(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes that a launcher has told their rank."""
    results = []
    for item in descendants(process.pid):
        with contextlib.suppress(psutil.Error):
            if "RANK" in item.environ():
                results.append(item)
    return results


def listens(pid: int) -> bool:
    """Return whether a rank has its handlers; while the program is read Ctrl-C has none, or is ignored."""
    if "libtorch" not in Path(f"/proc/{pid}/maps").read_text():
        return False
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())

    def has(kind: str, number: int) -> bool:
        return bool(int(status[kind], 16) >> (number - 1) & 1)

    return has("SigCgt", signal.SIGTERM if has("SigIgn", signal.SIGINT) else signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_before_training_a_rank_ends_at_once(tmp_path):
    """It waits, inside a C function, for another rank that will never come."""
    flags = flags_of(tmp_path, deepspeed_json(batch=4))
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, "launch/train.py", *flags],
        cwd=ROOT,
        env={**os.environ, **environment, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
    )
    try:
        until(process, lambda: listens(process.pid))
        time.sleep(3)
        began = time.monotonic()
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 143
        assert time.monotonic() - began < 150  # the other rank would be waited for half an hour
    finally:
        process.kill()
    assert not (tmp_path / "run" / "checkpoints").exists()
