"""SIGTERM and Ctrl-C: requests that end a run, at once before its first step and with a save afterwards.

Until a start is over there is nothing to save: the process ends at once, and the next launch removes half-written
files. From then on the process only notes the signal. At the end of an optimizer step, or of the next one on a GPU, the
ranks agree on it, save, and end together (loop.py). The same signal again changes nothing, because launchers send it
twice to some ranks. SIGKILL ends a run that cannot wait, and costs the steps since the newest checkpoint. A second
Ctrl-C, which a person presses, does the same.

The exit code is 143 or 130, as that of a process which the signal ended, and not 0: `train && consolidate` must not
take a half-trained model. `deepspeed` dies of both signals without telling its ranks, so losing it counts as SIGTERM.
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

from sparseforge_ds.extension_locks import release_locks
from sparseforge_ds.started_by import GRANDPARENT, PARENT, Ancestor
from sparseforge_ds.train.launcher import rank_from_launcher

_ECHO = 2.0
"""Seconds in which another SIGINT counts as the first one, passed on by a launcher."""
_LOOK = 1.0
"""Seconds between checks that the launcher lives."""
_LAUNCH = "deepspeed.launcher.launch"
_SHELL = 128
"""Number that shells add to a signal's number for the exit code of a process which the signal ended."""


class PreemptedError(Exception):
    """End of training on all ranks because of a signal; everything that there is to save is saved.

    Args:
        number: the signal.
        step: words for the step, such as "at step 4".
    """

    def __init__(self, number: int, step: str) -> None:
        super().__init__(f"{signal.Signals(number).name} {step}")
        self.exit_code = _SHELL + number


class Preemption(AbstractContextManager["Preemption"]):
    """Listener for SIGTERM and SIGINT in a `with` block of the main thread."""

    def __init__(self) -> None:
        self.requested = 0
        """Signal that has asked this process to stop, or 0."""
        self._in_steps = False
        self._parents = _launchers()
        self._is_orphan = began_as_an_orphan()
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        # The interpreter runs handlers between two bytecodes of the main thread, which may be waiting for another rank
        # in C for hours; the byte that arrives here wakes a thread of its own at once.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:  # Ctrl-C is for others
                self._old_handlers[number] = signal.signal(number, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if error is not None and not self._in_steps:
            # The error may come from another rank, which noticed the signal sooner and is gone.
            self.requested = self.requested or (signal.SIGTERM if self._has_lost_its_launcher() else 0)
            if self.requested:
                self._end(self.requested)  # closing connections properly would wait for the other ranks
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._old_handlers.items():
            # A signal that a launcher sends again now must not change the exit code.
            signal.signal(number, signal.SIG_IGN if isinstance(error, PreemptedError) else handler)
        self._writer.close()

    def begin_steps(self) -> None:
        """Note the first signal from now on, instead of obeying it."""
        self._in_steps = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.requested = self.requested or number

    def _watch(self) -> None:
        """Obey signals that cannot wait for the main thread, in a thread that lasts as long as the `with` block."""
        first_signal = 0
        press_time = 0.0
        # torchrun turns the second Ctrl-C into SIGTERM.
        repeats = (signal.SIGINT, signal.SIGTERM) if "TORCHELASTIC_RUN_ID" in os.environ else (signal.SIGINT,)
        arrivals = select.poll()  # select() refuses a descriptor above 1023, which a run with many files open has
        arrivals.register(self._reader, select.POLLIN)
        while True:
            if arrivals.poll(_LOOK * 1000):
                received = self._reader.recv(1)
                if not received:
                    break
                number = received[0]
                if number in self._old_handlers:
                    now = time.monotonic()
                    # Before the first step the process ends at once. Afterwards only a second Ctrl-C does that.
                    if not self._in_steps:
                        self._end(number)
                    if not first_signal:
                        first_signal = number
                        if number == signal.SIGINT:
                            _tell("SIGINT: the run saves after this step or the next; Ctrl-C again ends it without")
                    elif press_time and now - press_time > _ECHO and number in repeats:
                        self._end(signal.SIGINT)
                    if number == signal.SIGINT and not press_time:
                        press_time = now
            # A launcher that is gone cannot pass its signal on.
            elif not first_signal and self._has_lost_its_launcher():
                os.kill(os.getpid(), signal.SIGTERM)
        self._reader.close()

    def _has_lost_its_launcher(self) -> bool:
        return self._is_orphan or any(_parent(child) != parent for child, parent in self._parents)

    def _end(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._in_steps:
            _tell(f"ended at once by {name}; --resume continues from the newest checkpoint")
        else:
            _tell(f"stopped by {name} before its first step: there is nothing to save")
            release_locks()  # the main thread may be compiling, and other processes may be waiting for it
        os._exit(_SHELL + number)


def _tell(line: str) -> None:
    """Print a line on rank 0, past the buffers that the main thread may be using; a closed pipe is no error."""
    if rank_from_launcher() == 0:
        with contextlib.suppress(OSError):
            os.write(1, f"{line}\n".encode())


def _launchers() -> list[tuple[int, int]]:
    """Return (process, parent) for every pair that stays together as long as the launcher of this rank lives.

    Under torchrun that is this process and torchrun; under deepspeed also launch.py and the command that started it.
    The parents are those of the start of this process, however long its imports took.
    """
    own_pair = (os.getpid(), PARENT.pid)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [own_pair]
    if _LAUNCH not in PARENT.command:
        return []
    # Over ssh the parent of launch.py is something else.
    return [own_pair, (PARENT.pid, GRANDPARENT.pid)] if _is_deepspeed(GRANDPARENT) else [own_pair]


def began_as_an_orphan() -> bool:
    """Return whether the launcher was gone before this process noted it, so that process 1 has adopted its children."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun may be process 1 of a container; whatever it is called there, it is a Python program.
        return PARENT.pid == 1 and not any("python" in Path(word).name for word in PARENT.command[:1])
    if "CROSS_RANK" not in os.environ:  # launch.py sets it
        return False
    if PARENT.pid == 1:
        return _LAUNCH not in PARENT.command
    on_one_machine = os.environ.get("CROSS_SIZE") == "1"
    return _LAUNCH in PARENT.command and on_one_machine and GRANDPARENT.pid == 1 and not _is_deepspeed(GRANDPARENT)


def _parent(process: int) -> int | None:
    """Return the parent of a process, or None if it is gone.

    Every call makes a new `psutil.Process`: psutil before 7 mistakes an old one once the clock was set.
    """
    try:
        return int(psutil.Process(process).ppid())
    except psutil.Error:
        return None


def _is_deepspeed(process: Ancestor) -> bool:
    words = process.command
    return any(Path(word).name in ("deepspeed", "ds") for word in words[:2]) or "deepspeed.launcher.runner" in words
