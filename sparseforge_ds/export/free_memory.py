"""How much memory this process can still take: what the machine has, or what a container or a Slurm job may use."""

from __future__ import annotations

from pathlib import Path

import psutil


def free_memory(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes, the least of the machine's and of what the control groups of this process (Linux) have left.

    Args:
        groups: a line for each group that the process is in.
        mounted: where the groups are; those of version 1 that limit memory are in `memory`.
    """
    free = [psutil.virtual_memory().available]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = mounted, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = mounted / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):  # a limit holds for all groups below; in a container some are not seen
            free += _left(folder, *names)
            if folder == root:
                break
    return max(0, min(free))


def _left(folder: Path, limit: str, used: str) -> list[int]:
    """What one group has left, with the file cache that its use includes; nothing where it has no limit."""
    try:
        most, taken = (int((folder / name).read_text()) for name in (limit, used))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return []
    return [most - taken + int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))]
