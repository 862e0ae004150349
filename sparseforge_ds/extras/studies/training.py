"""Subprocesses of the runs of a comparison: start, end, and outcome."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from sparseforge_ds.checkpoint.disk import open_own_file, write_json
from sparseforge_ds.train.launcher import free_port

_PRELOADED = ["sparseforge_ds.train.trainer"]
"""Modules that the fork server imports before it starts a rank, which saves every run some seconds."""
_GRACE = 120.0
"""Seconds that ranks get to save and end after SIGTERM."""
_STOPPED = 143
"""Exit code of a rank that SIGTERM has stopped and that has saved."""


class StoppedError(RuntimeError):
    """The run was asked to stop; it has saved and can continue."""


class DivergedRunError(RuntimeError):
    """The loss became infinite or NaN, which is a result of too high a learning rate."""


class Trainer:
    """Trainings in subprocesses, several at a time, with the devices divided among them.

    Args:
        ranks: processes of a run.
        threads: threads of a process.
        data: folder of the token cache that all runs share; None if each run reads its own stream.
    """

    def __init__(self, ranks: int, threads: int, data: Path | None) -> None:
        require_devices(ranks)
        self.ranks = ranks
        self.threads = threads
        self.data = data
        self._stop = threading.Event()
        # CUDA does not work in a fork of a process that has used it.
        kind = "spawn" if torch.cuda.is_available() else "forkserver"
        self._context: Any = multiprocessing.get_context(kind)
        if kind == "forkserver":
            self._context.set_forkserver_preload(_PRELOADED)
        # Ranks read one end, which closes when this process ends: then they stop.
        self._watched_end, self._open_end = self._context.Pipe(duplex=False)

    def stop(self) -> None:
        """Ask all trainings to save and end."""
        self._stop.set()

    def train(self, folder: Path, arguments: list[str], slot: int) -> tuple[dict[str, Any], bool]:
        """Train in a run folder, from its newest checkpoint if it has one, and log beside the folder.

        Args:
            folder: the run folder.
            arguments: the trainer's command line.
            slot: number of the worker, which decides the GPUs.

        Returns:
            The content of result.json, and whether an earlier launch was continued.

        Raises:
            StoppedError: `stop` was called.
            DivergedRunError: the loss is not finite.
            ValueError: the run failed otherwise.
        """
        wait_for_lock(folder / ".lock")
        resumed = has_checkpoint(folder)
        log = folder.with_name(f"{folder.name}.log")
        # Remains of a launch without a checkpoint are of no use.
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
            log.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        # The shared token cache appears as the run's own.
        if self.data is not None:
            self.data.mkdir(exist_ok=True)  # again, where somebody has removed it
            if not (folder / "data").exists():
                (folder / "data").symlink_to(os.path.relpath(self.data, folder), target_is_directory=True)
        words = [*arguments, "--resume"] if resumed else arguments
        return self._result(train_rank, words, folder, slot, self.ranks), resumed

    def prune(self, folder: Path, settings: dict[str, Any], out: Path, slot: int) -> dict[str, Any]:
        """Prune a model, from its newest finished block if it has one, and log beside the folder.

        Args:
            folder: gets a result.json, which is returned.
            settings: result of `Pruning.settings`.
            out: gets the model.
            slot: number of the worker, which decides the GPU.

        Raises:
            StoppedError: `stop` was called.
            ValueError: the model could not be pruned.
        """
        folder.mkdir(parents=True, exist_ok=True)
        result = {"result": str(folder / "result.json"), "out": str(out)}
        return self._result(prune_model, settings | result, folder, slot, ranks=1)

    def _result(self, target: Callable[..., None], work: Any, folder: Path, slot: int, ranks: int) -> dict[str, Any]:
        """Run `target` in a process for every rank, and return the content of the folder's result.json."""
        log = folder.with_name(f"{folder.name}.log")
        # The log of an earlier try stays; only what this one adds can say why it failed.
        begin = log.stat().st_size if log.exists() else 0
        processes = self._start(target, work, log, slot, ranks)
        while not self._have_ended(processes, 0.5):
            pass
        result = read_result(folder)
        self.check_outcome([process.exitcode for process in processes], result, log, begin)
        return result

    def _start(self, target: Callable[..., None], work: Any, log: Path, slot: int, ranks: int) -> list[BaseProcess]:
        """Start a process for every rank, in the environment that a launcher would set."""
        if self._stop.is_set():
            raise StoppedError
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        # The slot's share of the visible GPUs.
        if count := torch.cuda.device_count():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
            devices = [visible[(slot * self.ranks + rank) % count] for rank in range(ranks)]
            shared["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(devices))
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            arguments = (environment, str(log), self.threads, work, self._watched_end)
            processes.append(self._context.Process(target=target, args=arguments))
            processes[-1].start()
        return processes

    def _have_ended(self, processes: list[BaseProcess], seconds: float) -> bool:
        """Wait at most so long, and return True if all ranks have ended; a failure or `stop` ends the others."""
        running = [process for process in processes if process.exitcode is None]
        wait([process.sentinel for process in running], seconds)
        failed = any(process.exitcode for process in processes)
        if self._stop.is_set() or failed:
            _end(running)
        return all(process.exitcode is not None for process in processes)

    def check_outcome(self, codes: list[int | None], result: dict[str, Any], log: Path, begin: int) -> None:
        """Raise the error that explains exit codes other than 0; its words are in the log from byte `begin` on."""
        if all(code == 0 for code in codes):
            return
        if "diverged" in result:
            raise DivergedRunError(result["diverged"])
        # A rank that fails has the others stopped.
        has_failed = any(code not in (0, _STOPPED, -signal.SIGTERM) for code in codes)
        if self._stop.is_set() or (_STOPPED in codes and not has_failed):
            raise StoppedError
        lines = log.read_bytes()[begin:].decode(errors="replace").splitlines() if log.exists() else []
        message = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
        exit_codes = ", ".join(map(str, codes))
        cause = message or f"its processes ended with {exit_codes} (-9: killed, often for its memory)"
        raise ValueError(f"the run {log.stem} failed: {cause}; its log is {log}")


def require_devices(ranks: int) -> None:
    """Raise ValueError if this machine has GPUs, and fewer than a run has ranks."""
    if 0 < (count := torch.cuda.device_count()) < ranks:
        raise ValueError(f"ranks = {ranks}: every rank needs a GPU of its own, and there are {count}; use fewer")


def train_rank(
    environment: dict[str, str], log: str, threads: int, arguments: list[str], comparison: Connection
) -> None:
    """Run the trainer's `main` as one rank, and exit with its code.

    Args:
        environment: the launcher's variables.
        log: file that the output is appended to.
        threads: threads of the process.
        arguments: the trainer's command line.
        comparison: pipe whose other end is the comparison's; when that closes, the rank saves and stops.
    """
    _enter(environment, log, threads, comparison)
    from sparseforge_ds.train.trainer import main

    sys.exit(main(arguments))


def prune_model(
    environment: dict[str, str], log: str, threads: int, settings: dict[str, Any], comparison: Connection
) -> None:
    """Prune a model and write its result.json; after an error, which the log says, exit with 1.

    Args:
        environment: variables, among which are those of the GPU.
        log: file that the output is appended to.
        threads: threads of the process.
        settings: result of `Pruning.settings`, with `out`, the folder of the model, and `result`, the file.
        comparison: pipe whose other end is the comparison's; when that closes, the process ends.
    """
    _enter(environment, log, threads, comparison)
    from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig
    from sparseforge_ds.model.pretrained import find_model
    from sparseforge_ds.prune import PruneSettings, prune
    from sparseforge_ds.prune.sequences import read_sequences

    block_start = BlockStartConfig(**settings["start"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # The same text and sequences as `sparseforge prune` reads.
        dense = find_model(settings["model"], "model")
        assert block_start.tokens is not None
        sequences_NS = read_sequences(
            dense.tokenizer,
            dense.config,
            settings["text"],
            block_start.tokens,
            settings["seq_length"],
            settings["text_field"],
        )
        wanted = PruneSettings(SparseForgeConfig.from_dict(settings["block"]), block_start, settings["any_family"])
        pruned = prune(dense.folder, settings["out"], sequences_NS, wanted, device)
    except ValueError as error:
        print(f"error: {error}", flush=True)
        sys.exit(1)
    # The table counts tokens of a start and their passes; masks without training read each token once.
    counted = {"tokens": pruned.tokens, "epochs": max(1, block_start.epochs)}
    write_json(Path(settings["result"]), {"seconds": round(pruned.seconds, 1), "start": counted})


def _enter(environment: dict[str, str], log: str, threads: int, comparison: Connection) -> None:
    """Set up a process of a comparison."""
    threading.Thread(target=_stop_after, args=(comparison,), daemon=True).start()
    # Ctrl-C reaches the comparison, which stops its ranks in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = open_own_file(Path(log), os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(environment)
    torch.set_num_threads(threads)


def _stop_after(comparison: Connection) -> None:
    """Send this process SIGTERM once the comparison is gone."""
    # The parent of a rank is the fork server, which lives as long as a rank does: only the pipe shows the end.
    with contextlib.suppress(EOFError):
        comparison.recv()
    os.kill(os.getpid(), signal.SIGTERM)


def read_result(folder: Path) -> dict[str, Any]:
    """Read the `result.json` of a run; empty if there is none."""
    path = folder / "result.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def has_checkpoint(folder: Path) -> bool:
    """Return True if a run folder has a checkpoint to continue from."""
    return any((folder / "checkpoints").glob("step_*[0-9]"))


def wait_for_lock(lock: Path) -> None:
    """Wait until no process of an earlier launch, which may still be saving, locks a run folder."""
    if lock.exists():
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{lock.parent}: an earlier launch of this run is still saving; waiting for its end", flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)


def _end(processes: list[BaseProcess]) -> None:
    """Terminate processes, and kill those that take longer than `_GRACE`."""
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    for process in processes:
        process.join(_GRACE)
        if process.exitcode is None:
            process.kill()
            process.join()
