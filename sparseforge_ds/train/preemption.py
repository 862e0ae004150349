"""SIGTERM and Ctrl-C: the run is to end. What a process does then depends on where it is.

Before training there is nothing to save: it ends at once, and the next start removes what is half-written. In training
the signal is only noted; the ranks agree on it at the end of an optimizer step, save, and end together (loop.py). More
of the same signal change nothing, because launchers send it again to ranks that have had it: whoever cannot wait sends
SIGKILL, which costs the steps since the newest checkpoint and nothing else. A second Ctrl-C, which a person presses,
ends the process like that.

The exit code is 143 or 130, as of a process that the signal ended, and not 0: `train && consolidate` must not take a
half-trained model. `deepspeed` itself dies of both without telling its ranks; that they have lost it counts as SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil  # type: ignore[import-untyped]

from sparseforge_ds.started_by import GRANDPARENT, PARENT, Ancestor
from sparseforge_ds.train.launcher import rank_from_launcher

_ECHO = 2.0
"""Seconds in which another SIGINT is the first one, passed on by a launcher."""
_LOOK = 1.0
"""Seconds between looks whether the launcher lives."""
_LAUNCH = "deepspeed.launcher.launch"
_SHELL = 128
"""The exit code of a process that a signal ended is this and the signal's number, as shells have it."""


class Stopped(Exception):
    """All ranks ended the training at a step because of a signal; what there is to save is saved.

    Args:
        number: the signal.
        where: the step.
    """

    def __init__(self, number: int, where: str) -> None:
        super().__init__(f"{signal.Signals(number).name} {where}")
        self.exit_code = _SHELL + number


class Preemption(AbstractContextManager["Preemption"]):
    """Listens for SIGTERM and SIGINT in a `with` block of the main thread."""

    def __init__(self) -> None:
        self._noted = 0
        self._training = False
        self._parents = _launchers()
        self._orphan = _began_as_an_orphan()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        # The interpreter runs handlers between two bytecodes of the main thread, which may be waiting for another rank
        # in C for hours; the byte that arrives here wakes a thread of its own at once.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # Ctrl-C is for others
                self._before[number] = signal.signal(number, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if error is not None and not self._training:
            # What went wrong may be that another rank has noticed the signal sooner and is gone.
            self._noted = self._noted or (signal.SIGTERM if self._has_lost_its_launcher() else 0)
            if self._noted:
                self._end(self._noted)  # closing connections properly would wait for the other ranks
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            # What a launcher sends again now must not change the exit code.
            signal.signal(number, signal.SIG_IGN if isinstance(error, Stopped) else handler)
        self._writer.close()

    def begin_training(self) -> None:
        """From now on the first signal is noted instead of obeyed."""
        self._training = True

    @property
    def requested(self) -> int:
        """The signal by which this process has been asked to stop, 0 if it has not been."""
        return self._noted

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._noted = self._noted or number

    def _watch(self) -> None:
        first, pressed = 0, 0.0
        # torchrun turns the second Ctrl-C into SIGTERM.
        again = (signal.SIGINT, signal.SIGTERM) if "TORCHELASTIC_RUN_ID" in os.environ else (signal.SIGINT,)
        while True:
            if select.select([self._reader], [], [], _LOOK)[0]:
                received = self._reader.recv(1)
                if not received:
                    break
                number = received[0]
                if number in self._before:
                    now = time.monotonic()
                    if not self._training:
                        self._end(number)
                    if not first:
                        first = number
                        if number == signal.SIGINT:
                            _tell("SIGINT: the run saves at the end of this step; Ctrl-C again ends it without")
                    elif pressed and now - pressed > _ECHO and number in again:
                        self._end(signal.SIGINT)
                    if number == signal.SIGINT and not pressed:
                        pressed = now
            elif not first and self._has_lost_its_launcher():
                os.kill(os.getpid(), signal.SIGTERM)  # which whoever is gone should have passed on
        self._reader.close()

    def _has_lost_its_launcher(self) -> bool:
        return self._orphan or any(_parent(child) != parent for child, parent in self._parents)

    def _end(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._training:
            _tell(f"ended at once by {name}; --resume continues from the newest checkpoint")
        else:
            _tell(f"stopped by {name} before training: there is nothing to save")
        os._exit(_SHELL + number)


def _tell(line: str) -> None:
    """Say it on rank 0, whatever the main thread may be doing with its buffers, and if anybody is left to listen."""
    if rank_from_launcher() == 0:
        with contextlib.suppress(OSError):
            os.write(1, f"{line}\n".encode())


def _launchers() -> list[tuple[int, int]]:
    """Return a process and its parent, for every two that stay together as long as the launcher of this rank lives.

    That is this process and torchrun, or this process, launch.py and the `deepspeed` command that started it. They are
    those that this process began with, however long its imports took.
    """
    me = (os.getpid(), PARENT.pid)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [me]
    if _LAUNCH not in PARENT.command:
        return []
    # Over ssh the parent of launch.py is something else.
    return [me, (PARENT.pid, GRANDPARENT.pid)] if _is_deepspeed(GRANDPARENT) else [me]


def _began_as_an_orphan() -> bool:
    """Return whether the launcher was gone before this process noted it, and process 1 has adopted its children."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun may be process 1 of a container; whatever it is called there, it is a Python program.
        return PARENT.pid == 1 and not any("python" in Path(word).name for word in PARENT.command[:1])
    if "CROSS_RANK" not in os.environ:  # which launch.py sets
        return False
    if PARENT.pid == 1:
        return _LAUNCH not in PARENT.command
    on_one_machine = os.environ.get("CROSS_SIZE") == "1"
    return _LAUNCH in PARENT.command and on_one_machine and GRANDPARENT.pid == 1 and not _is_deepspeed(GRANDPARENT)


def _parent(process: int) -> int | None:
    """Asked anew each time: of a kept `psutil.Process`, psutil before 7 doubts who it is once the clock was set."""
    try:
        return int(psutil.Process(process).ppid())
    except psutil.Error:
        return None


def _is_deepspeed(process: Ancestor) -> bool:
    words = process.command
    return any(Path(word).name in ("deepspeed", "ds") for word in words[:2]) or "deepspeed.launcher.runner" in words
