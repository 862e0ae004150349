"""SIGTERM: the run is to make room. What a process does then depends on where it is.

Before training there is nothing to save: it ends at once. In training the signal is only noted; the ranks agree on it
at the end of an optimizer step, save, and end together (loop.py). More of the same signal change nothing, because
launchers send it again to ranks that have had it: whoever cannot wait sends SIGKILL, which costs the steps since the
newest checkpoint and nothing else.

The exit code is 143, as of a process that SIGTERM ended, and not 0: `train && consolidate` must not take a half-trained
model. `deepspeed` itself dies of a SIGTERM without telling its ranks; that they have lost it counts as the signal.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil  # type: ignore[import-untyped]

EXIT_CODE = 128 + signal.SIGTERM
"""143."""
_PATIENCE = 5.0
"""Seconds that a start-up has for cleaning up before it is cut off inside whatever it waits for."""


class Stopped(Exception):
    """All ranks ended the training at a step because of SIGTERM; what there is to save is saved."""


class _AtOnce(SystemExit):
    """SIGTERM before training: on the way out, what is half-written is removed."""


class Preemption(AbstractContextManager["Preemption"]):
    """Listens for SIGTERM in a `with` block of the main thread."""

    def __init__(self) -> None:
        self._noted = False
        self._training = False
        self._launcher = _deepspeed_launcher()

    def __enter__(self) -> Preemption:
        # The interpreter runs handlers between two bytecodes of the main thread, which may be waiting for another rank
        # in C for hours; the byte that arrives here wakes a thread of its own at once.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handler = signal.signal(signal.SIGTERM, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="sigterm", daemon=True).start()
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, _AtOnce):
            sys.stdout.flush()
            os._exit(EXIT_CODE)  # closing connections properly would wait for the other ranks
        signal.set_wakeup_fd(self._wakeup)
        # What a launcher sends again now must not change the exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if isinstance(error, Stopped) else self._handler)
        self._writer.close()

    def begin_training(self) -> None:
        """From now on the signal is noted instead of obeyed."""
        self._training = True

    @property
    def requested(self) -> bool:
        """Whether this process has been asked to stop, or has lost its launcher."""
        return self._noted or (self._launcher is not None and _parent(self._launcher[0]) != self._launcher[1])

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        first, self._noted = not self._noted, True
        if not self._training and first:
            raise _AtOnce(EXIT_CODE)

    def _watch(self) -> None:
        while received := self._reader.recv(1):
            if received[0] == signal.SIGTERM and not self._training:
                threading.Event().wait(_PATIENCE)
                if not self._training:
                    os._exit(EXIT_CODE)
        self._reader.close()


def _deepspeed_launcher() -> tuple[int, int] | None:
    """(launch.py, the `deepspeed` command that started it) where this process is a rank of that command."""
    try:
        parent = psutil.Process(os.getppid())
        runner = parent.parent()
        if runner is not None and any(Path(part).name in ("deepspeed", "ds") for part in runner.cmdline()[:2]):
            return parent.pid, runner.pid
    except psutil.Error:  # gone, or not ours to look at
        pass
    return None


def _parent(process: int) -> int | None:
    try:
        return psutil.Process(process).ppid()
    except psutil.Error:
        return None
