"""Memory that this process can still take, within the limits of the machine, a container or a Slurm job."""

from __future__ import annotations

from pathlib import Path

import psutil


def free_memory(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that are free on the machine and in all control groups (Linux) of this process.

    Args:
        groups: file with a line for each group that the process is in.
        mounted: folder of the groups; those of version 1 that limit memory are in its `memory`.
    """
    free = [psutil.virtual_memory().available]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        # Version 2 names no controllers.
        if controllers == "":
            root = mounted
            files = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = mounted / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # A limit holds for all groups below. A container does not see every group above its own.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            free += _free_in_group(folder, *files)
            if folder == root:
                break
    return max(0, min(free))


def _free_in_group(folder: Path, limit_file: str, usage_file: str) -> list[int]:
    """Return the free bytes of one group, in a list that is empty if the group has no limit.

    The usage includes file cache, which the kernel gives back.
    """
    try:
        limit, usage = (int((folder / name).read_text()) for name in (limit_file, usage_file))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return []
    return [limit - usage + int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))]
