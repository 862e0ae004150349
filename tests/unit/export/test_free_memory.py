"""Limits of control groups, in a made-up tree."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sparseforge_ds.export.free_memory import free_memory

MACHINE = 10**9


def group(folder: Path, limit: object, used: int, stat: str, names: tuple[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (*zip(names, (limit, used), strict=True), ("memory.stat", stat)):
        (folder / name).write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("lines", "outer", "inner", "free"),
    [
        ("0::/job/step", 700, 500, 500 - 200 + 50),
        ("0::/job/step", 300, 500, 300 - 200 + 50),  # the limit of a group above
        ("0::/job/step", "max", "max", MACHINE),
        ("0::/job/step", 10**12, 100, 0),  # more in use than was allowed later
        ("0::/seen/from/the/host", 300, 500, 300 - 200 + 50),  # in a container, whose own group is mounted as the root
        ("5:cpu:/job/step\n4:hugetlb,memory:/job/step\n0::/", 9, 500, 500 - 200 + 60),
        ("5:cpu:/job/step", 9, 9, MACHINE),
        ("", 9, 9, MACHINE),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, outer: object, inner: object, free: int
) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=MACHINE))
    (tmp_path / "cgroup").write_text(lines + "\n" * bool(lines))
    if "memory" in lines:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group(tmp_path / "fs" / "memory", 2**63 - 4096, 200, "inactive_file 9\ntotal_inactive_file 60", names)
        group(tmp_path / "fs" / "memory/job/step", inner, 200, "inactive_file 9\ntotal_inactive_file 60", names)
    else:
        group(tmp_path / "fs", outer, 200, "anon 7\ninactive_file 50", ("memory.max", "memory.current"))
        group(tmp_path / "fs/job/step", inner, 200, "anon 7\ninactive_file 50", ("memory.max", "memory.current"))
    assert free_memory(tmp_path / "cgroup", tmp_path / "fs") == free
    assert free_memory(tmp_path / "no such file", tmp_path / "fs") == MACHINE
    assert free_memory() > 0
