"""Run a function on real DeepSpeed ranks: gloo processes of this machine, forked from a server with the imports done.

    def body(stage):                       # module level, so that a worker can import it
        ...
        return loss

    losses = run_distributed(body, 2, stage=3)     # one return value per rank

Results and arguments travel through files. A failure on any rank ends all of them, and nothing outlives the call.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from sparseforge_ds.train.launcher import free_port

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 1200.0
"""Seconds that a test waits for what comes in seconds: they end what would hang, and fail no slow machine."""
_EXIT_FAILED = 17


class RankFailure(RuntimeError):
    """Failure of a rank, with its traceback; cause of the exception that `run_distributed` raises."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = PATIENCE,
    device: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` ranks, with `deepspeed.init_distributed` done.

    Args:
        function: a function at the top level of a module.
        world_size: number of processes.
        timeout: seconds after which all ranks are killed.
        device: "cpu" (gloo) or "cuda" (NCCL when there is a GPU for every rank, gloo otherwise); by default
            SPARSEFORGE_TEST_DEVICE, or "cpu".

    Returns:
        The return values, by rank. Tensors come back on the CPU.

    Raises:
        TimeoutError: a rank was still running; the message has the stacks of all ranks.
        Exception: the first failure of a rank, with its own type where it can be pickled, and RankFailure (the rank and
            its traceback) as its cause.
    """
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__}: a worker cannot import it; move it to the top level of its module")
    # Ranks are forked from a process that has imported everything; CUDA needs processes of its own.
    device = device or os.environ.get("SPARSEFORGE_TEST_DEVICE", "cpu")
    context = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
    if device != "cuda":
        start_forkserver()
    # Arguments go to the ranks, and results come back, as files of one folder.
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        torch.save((args, kwargs), folder / "call.pt")
        target = (function.__module__, function.__qualname__)
        environment = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        # End all ranks, however it went, and show what they printed.
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                process = context.Process(
                    target=rank_main, args=(rank, environment, device, target, timeout, folder), daemon=True
                )
                process.start()
                processes.append(process)
            _wait(processes, timeout, folder)
        finally:
            kill(processes)
            for rank in range(world_size):
                _echo(folder, rank)
        return [torch.load(folder / f"{rank}.result.pt", weights_only=False) for rank in range(world_size)]


def _wait(processes: list[BaseProcess], timeout: float, folder: Path) -> None:
    deadline = time.monotonic() + timeout
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()], timeout=max(0.0, deadline - time.monotonic()))
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
        if any(process.exitcode for process in processes):
            time.sleep(0.2)  # the rank that failed first is not always the one whose end is seen first
            _raise_failure(processes, folder)
        if running and time.monotonic() >= deadline:
            stacks = "\n".join(_stack(process, folder, rank) for rank, process in running.items())
            raise TimeoutError(f"ranks {sorted(running)} of {len(processes)} still ran after {timeout:g} s\n{stacks}")


def _raise_failure(processes: list[BaseProcess], folder: Path) -> None:
    world_size = len(processes)
    for rank, process in enumerate(processes):
        if process.exitcode is not None and process.exitcode not in (0, _EXIT_FAILED):
            raise RankFailure(f"rank {rank} of {world_size} died with exit code {process.exitcode}")
    reports = sorted((pickle.loads(path.read_bytes()) for path in folder.glob("*.failure")), key=lambda r: r["time"])
    first = reports[0]
    cause = RankFailure(f"rank {first['rank']} of {world_size} failed:\n{first['traceback']}")
    if first["exception"] is None:
        raise cause
    raise pickle.loads(first["exception"]) from cause


def rank_main(
    rank: int,
    environment: dict[str, str],
    device: str,
    target: tuple[str, str],
    timeout: float,
    folder: Path,
) -> None:
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The server's own streams may still belong to the test that started it.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (open until the process ends)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"{rank}.stack", "w"), all_threads=False)  # noqa: SIM115
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    if device == "cuda":
        os.environ.pop("DS_ACCELERATOR", None)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        _join(device, int(environment["WORLD_SIZE"]), timeout)
        function = importlib.import_module(target[0])
        for part in target[1].split("."):
            function = getattr(function, part)
        args, kwargs = torch.load(folder / "call.pt", weights_only=False)
        random.seed(0)
        torch.manual_seed(0)
        result = function(*args, **kwargs)
        torch.save(_to_cpu(result), folder / f"{rank}.result.pt")
        # A rank that ends closes its connections, and another one may still connect to it for a new group.
        while len([*folder.glob("*.result.pt")]) < int(environment["WORLD_SIZE"]):
            time.sleep(0.005)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 (whatever it is, the caller raises it)
        # Told before this rank's connections close, so that the complaints of its peers come later.
        _report(error, rank, folder)
        sys.stdout.flush()
        os._exit(_EXIT_FAILED)


def _join(device: str, world_size: int, timeout: float) -> None:
    import deepspeed

    from tests import rank_preload

    rank_preload.quiet()
    torch.set_num_threads(1)
    nccl = device == "cuda" and torch.cuda.device_count() >= world_size
    if device == "cuda":
        # Ranks beyond the GPUs share them: DeepSpeed takes the one that this names.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(
        dist_backend="nccl" if nccl else "gloo", verbose=False, timeout=timedelta(seconds=timeout)
    )


def _report(error: BaseException, rank: int, folder: Path) -> None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError):
        pickled = None
    report = {"rank": rank, "time": time.time(), "traceback": traceback.format_exc(), "exception": pickled}
    unfinished = folder / f"{rank}.failure.tmp"
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.rename(folder / f"{rank}.failure")


def _to_cpu(value: Any) -> Any:
    """Tensors detached and without the storage they are a view of; containers rebuilt around them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_cpu(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(item) for item in value)
    return value


def start_forkserver() -> None:
    """Start the server once, with the packages imported, so that a rank costs a fork instead of seconds of import."""
    multiprocessing.set_forkserver_preload(["tests.rank_preload"])
    wanted = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _stack(process: BaseProcess, folder: Path, rank: int) -> str:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)
    path = folder / f"{rank}.stack"
    for _ in range(200):
        if path.exists() and path.stat().st_size:
            break
        time.sleep(0.05)
    return f"rank {rank}:\n{path.read_text() if path.exists() else '(not started)'}"


def kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _echo(folder: Path, rank: int) -> None:
    """Show a rank's output through our own stdout, where pytest captures it."""
    path = folder / f"{rank}.output"
    text = path.read_text(errors="replace") if path.exists() else ""
    if text:
        print(f"--- output of rank {rank} ---\n{text}", end="" if text.endswith("\n") else "\n")
