"""Locks of compilers that are gone.

torch lets one process at a time compile an extension: it makes the file `lock` in the extension's folder, keeps it open
and removes it when it is done; all others wait until the file is gone. A compiler that is killed leaves it, and every
later process waits for ever, without a word. `watch_extension_locks` has a process look at a lock before it waits:
a living compiler is waited for and named, what a dead one left is removed.

Who has the file open, or is the ninja of a dead compiler at work in the folder, /proc says. It cannot say it of other
users, machines and containers; there we wait, and tell what to do.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

Say = Callable[[str], None]

_GRACE = 3.0
"""Seconds without a holder before a lock counts as left behind: for /proc, making and holding it are two moments."""
_POLL = 0.5
_REMIND = 60.0
_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""File systems that no other machine writes to."""
_FIRST_NAMESPACE = "pid:[4026531836]"
"""The kernel's PROC_PID_INIT_INO: the namespace from which all processes are seen."""

_watching = False


def watch_extension_locks(say: Say | None = None) -> None:
    """From now on, whenever torch is about to compile an extension or to wait for one, say so, and look at its lock.

    A loop of your own calls it before DeepSpeed does anything; more calls change nothing. One process of a machine
    speaks, by LOCAL_RANK, but whoever removes a lock says that.

    Args:
        say: takes a line for people; by default it is printed.
    """
    global _watching
    if _watching:
        return
    _watching = True
    speak = _print if say is None else say

    def look(event: str, arguments: tuple[object, ...]) -> None:
        # torch has no hook of its own; this event is raised just before it tries to make the lock.
        if event != "open":
            return
        path, _, flags = arguments
        if isinstance(path, str) and isinstance(flags, int) and flags & os.O_EXCL and os.path.basename(path) == "lock":
            lock = Path(path)
            wait_for_lock(lock, speak)
            if _speaks() and not any(lock.parent.glob("*.so")):
                speak(f"set-up: {lock.parent.name} is compiled for this machine once, which takes a minute or two")

    sys.addaudithook(look)


def wait_for_lock(lock: Path, say: Say) -> None:
    """Return when `lock` is gone: released by its holder, or removed here because nobody holds it.

    Args:
        lock: the file of the lock.
        say: takes a line for people.
    """
    unheld: tuple[tuple[int, int, int], float] | None = None
    said, at, began = "", 0.0, time.monotonic()
    while (identity := _identity(lock)) is not None:
        now = time.monotonic()
        holder = _holder(lock)
        hidden = None if holder else _why_hidden(lock)
        if holder or hidden:
            unheld = None
            remark = (
                f"waiting for {holder}, which compiles {lock.parent.name}"
                if holder
                else (
                    f"waiting for {lock}, of a process that compiles {lock.parent.name}; {hidden}. "
                    f"If nothing compiles there any more: rm {lock}"
                )
            )
            lasting = now - began >= _GRACE  # ranks that load what is compiled already hold it for a moment
            if lasting and (remark != said or now - at >= _REMIND) and _speaks():
                say(f"set-up: {remark}")
                said, at = remark, now
        elif unheld is None or unheld[0] != identity:
            unheld = identity, now
        elif now - unheld[1] >= _GRACE and _remove(lock, identity):
            say(f"set-up: removed {lock}, left by a process that was killed while it compiled {lock.parent.name}")
            return
        time.sleep(_POLL)


def _identity(lock: Path) -> tuple[int, int, int] | None:
    """What tells this lock from a later one of the same name."""
    try:
        status = lock.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _remove(lock: Path, identity: tuple[int, int, int]) -> bool:
    """Remove it if it still is this one. One process at a time does that, so that none takes a fresh one for it."""
    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _identity(lock) != identity or _holder(lock):
            return False
        lock.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(folder)


def _holder(lock: Path) -> str | None:
    """The process that has the lock open, or compiles in its folder on behalf of one that is gone."""
    try:
        wanted, folder = os.stat(lock), os.stat(lock.parent)
    except FileNotFoundError:
        return None
    for process in psutil.process_iter():
        home = f"/proc/{process.pid}"
        try:
            if any(_is(f"{home}/fd/{number}", wanted, lock.name) for number in os.listdir(f"{home}/fd")):
                return _named(process)
            if process.name().startswith("ninja") and os.path.samestat(os.stat(f"{home}/cwd"), folder):
                return _named(process)
        except (OSError, psutil.Error):  # it has just ended, or it is not ours; `_why_hidden` deals with the latter
            continue
    return None


def _is(descriptor: str, wanted: os.stat_result, name: str) -> bool:
    try:
        return os.path.basename(os.readlink(descriptor)) == name and os.path.samestat(os.stat(descriptor), wanted)
    except OSError:  # closed meanwhile
        return False


def _named(process: psutil.Process) -> str:
    words = " ".join(process.cmdline()).split()
    return f"process {process.pid} ({' '.join(words)[:120]})"


def _why_hidden(lock: Path) -> str | None:
    """Why its holder might live where we cannot see it."""
    if not os.path.isdir("/proc/self/fd"):
        return "this system does not say whether it lives"
    try:
        owner = lock.stat().st_uid
    except FileNotFoundError:
        return None
    if owner != os.geteuid():
        return f"it is of user {owner}, whose processes we cannot see"
    real = lock.resolve()
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    place = next((str(parent) for parent in real.parents if str(parent) in mounts), "/")
    if mounts.get(place, "overlay") not in _LOCAL:
        return f"it may live on another machine, as {place} is {mounts[place]}"
    if place != "/" and os.readlink("/proc/self/ns/pid") != _FIRST_NAMESPACE:
        return f"it may live outside this container, as {place} comes from there"
    return None


def _speaks() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _print(line: str) -> None:
    print(line, flush=True)
