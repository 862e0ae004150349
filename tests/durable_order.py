"""The order in which contents and names reach the disk, where tests do not wait for a disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def record_durable_order(patch: pytest.MonkeyPatch) -> list[str]:
    """Record `file: content`, `folder/: names in it` when they are forced to disk, and `-> name` for a new name."""
    order: list[str] = []
    rename = os.replace

    def replace(source: str | Path, target: str | Path) -> None:
        rename(source, target)
        order.append(f"-> {Path(target).name}")

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            order.append(f"{path.name}/: {' '.join(sorted(child.name for child in path.iterdir()))}")
        else:
            order.append(f"{path.name}: {path.read_bytes()[:20]!r}")

    patch.setattr(os, "replace", replace)
    patch.setattr(os, "fsync", fsync)
    return order
