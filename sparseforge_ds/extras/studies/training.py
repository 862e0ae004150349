"""Starts the trainer for one run, waits for it, and says how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from sparseforge_ds.checkpoint.disk import open_own_file

_PRELOADED = ["sparseforge_ds.train.trainer"]
"""What the fork server has imported before it starts a rank, which spares every run some seconds."""
_GRACE = 120.0
"""Seconds that ranks get to save and end after SIGTERM."""
_STOPPED = 143


class StoppedError(RuntimeError):
    """The run was asked to stop, and can go on from where it was."""


class RunDivergedError(RuntimeError):
    """The loss became infinite or NaN: a result, of a learning rate that is too high."""


class Trainer:
    """Runs trainings, several at a time, on devices that are divided among them.

    `data` is the folder of the token cache that all runs share; None where each reads a stream of its own.
    """

    def __init__(self, ranks: int, threads: int, data: Path | None) -> None:
        if 0 < (count := torch.cuda.device_count()) < ranks:
            raise ValueError(f"ranks = {ranks}: a run of so many needs as many GPUs, and there are {count}")
        self.ranks = ranks
        self.threads = threads
        self.data = data
        self._stop = threading.Event()
        # A fork of a process that has spoken to CUDA cannot.
        kind = "spawn" if torch.cuda.is_available() else "forkserver"
        self._context: Any = multiprocessing.get_context(kind)
        if kind == "forkserver":
            self._context.set_forkserver_preload(_PRELOADED)
        self._seen_by_ranks, self._held = self._context.Pipe(duplex=False)

    def stop(self) -> None:
        """End all trainings; they save."""
        self._stop.set()

    def train(self, folder: Path, arguments: list[str], slot: int) -> tuple[dict[str, Any], bool]:
        """Train in a run folder, from the beginning or from its newest checkpoint; its log lies beside it.

        Raises StoppedError after `stop`, RunDivergedError where the loss is not finite, and ValueError where it failed
        otherwise.

        The worker's `slot` decides the GPUs. Returns result.json, and whether an earlier start was continued.
        """
        _wait_for(folder / ".lock")
        resumed = has_checkpoint(folder)
        log = folder.with_name(f"{folder.name}.log")
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
            log.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if self.data is not None and not (folder / "data").exists():
            self.data.mkdir(exist_ok=True)
            (folder / "data").symlink_to(os.path.relpath(self.data, folder), target_is_directory=True)
        words = [*arguments, "--resume"] if resumed else arguments
        processes = self._start(words, log, slot)
        while not self._ended(processes, 0.5):
            pass
        result = _result_of(folder)
        self._judge([process.exitcode for process in processes], result, log)
        return result, resumed

    def _start(self, arguments: list[str], log: Path, slot: int) -> list[BaseProcess]:
        if self._stop.is_set():
            raise StoppedError
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(self.ranks)}
        if count := torch.cuda.device_count():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
            devices = [visible[(slot * self.ranks + rank) % count] for rank in range(self.ranks)]
            meeting["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(devices))
        processes: list[BaseProcess] = []
        for rank in range(self.ranks):
            environment = {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.ranks)}
            work = (environment, str(log), self.threads, arguments, self._seen_by_ranks)
            processes.append(self._context.Process(target=train_rank, args=work))
            processes[-1].start()
        return processes

    def _ended(self, processes: list[BaseProcess], seconds: float) -> bool:
        """Whether all ranks have ended; when one has failed, or on `stop`, the others are ended too."""
        running = [process for process in processes if process.exitcode is None]
        wait([process.sentinel for process in running], seconds)
        failed = any(process.exitcode for process in processes)
        if self._stop.is_set() or failed:
            _end(running)
        return all(process.exitcode is not None for process in processes)

    def _judge(self, codes: list[int | None], result: dict[str, Any], log: Path) -> None:
        if all(code == 0 for code in codes):
            return
        if "diverged" in result:
            raise RunDivergedError(result["diverged"])
        if self._stop.is_set() or _STOPPED in codes:
            raise StoppedError
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        said = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
        what = said or f"its processes ended with {', '.join(map(str, codes))} (-9: killed, often for its memory)"
        raise ValueError(f"the run {log.stem} failed: {what}; its log is {log}")


def train_rank(
    environment: dict[str, str], log: str, threads: int, arguments: list[str], comparison: Connection
) -> None:
    """The trainer's own `main` as one rank of a run, in the launcher's environment; ends the process with its exit
    code, or saves and stops when the comparison, which holds the other end of a pipe, is gone."""
    threading.Thread(target=_stop_after, args=(comparison,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = open_own_file(Path(log), os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(environment)
    torch.set_num_threads(threads)
    from sparseforge_ds.train.trainer import main

    sys.exit(main(arguments))


def _stop_after(comparison: Connection) -> None:
    # The parent of a rank is the fork server, which lives on while a rank does: it tells nothing of the comparison.
    with contextlib.suppress(EOFError):
        comparison.recv()
    os.kill(os.getpid(), signal.SIGTERM)


def _result_of(folder: Path) -> dict[str, Any]:
    """`result.json` of a run; empty where it has none."""
    path = folder / "result.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder has something to continue from."""
    return any((folder / "checkpoints").glob("step_*[0-9]"))


def _wait_for(lock: Path) -> None:
    """Until no process of an earlier start, which may be saving still, holds the lock of a run folder."""
    if lock.exists():
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{lock.parent}: an earlier start of this run is saving still; waiting for its end", flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    for process in processes:
        process.join(_GRACE)
        if process.exitcode is None:
            process.kill()
            process.join()


def _free_port() -> int:
    """Below those that systems hand out on their own, so that nothing takes it before the ranks meet there."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
