"""Memory of the ranks of a launcher, seen from outside while they run."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path

import psutil

INTERVAL = 0.02
"""Seconds between two looks at every rank."""


class RankMemory(threading.Thread):
    """Samples resident memory of every rank below a launcher, apart for every moment of its run.

    Set `moment` to say what the ranks are doing. `own` leaves out mapped files, which the system may take back.
    """

    def __init__(self, launcher: int) -> None:
        super().__init__(daemon=True)
        self.moment = "start"
        self.own: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        """Peak bytes by moment and process."""
        self.last: dict[int, int] = {}
        """Own bytes of every process when it was last seen."""
        self.together = 0
        """The most that all ranks had of their own at once."""
        self.peak: dict[int, int] = defaultdict(int)
        """Peak resident bytes of every process, mapped files among them."""
        self._launcher = psutil.Process(launcher)
        self._done = threading.Event()

    def run(self) -> None:
        """Look until `stop`."""
        ranks: list[int] = []
        while not self._done.wait(INTERVAL):
            if not ranks or self.moment == "start":
                ranks = self.ranks()
            result = {rank: status for rank in ranks if (status := _status(rank))}
            moment = self.moment
            for rank, status in result.items():
                own = self.last[rank] = status["RssAnon"]
                self.own[moment][rank] = max(self.own[moment][rank], own)
                self.peak[rank] = max(self.peak[rank], status["VmHWM"])
            self.together = max(self.together, sum(status["RssAnon"] for status in result.values()))

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self.join()

    def highest(self, moment: str) -> int:
        """Own bytes of the rank with most at a moment."""
        return max(self.own[moment].values(), default=0)

    def ranks(self) -> list[int]:
        """Return the process ids of the launcher's ranks."""
        try:
            below = self._launcher.children(recursive=True)
            ranks = {process.pid: process.ppid() for process in below if _is_rank(process)}
            # A rank that starts a program is forked first, and shares its memory with what looks like another rank
            return [pid for pid, parent in ranks.items() if parent not in ranks]
        except psutil.Error:
            return []


def _is_rank(process: psutil.Process) -> bool:
    return any("--local_rank=" in word for word in process.cmdline())


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {key: int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "VmHWM") if key in fields}
