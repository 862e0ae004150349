"""A folder that takes the place of another one: there is always a whole one. And errors that name a file."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from sparseforge_ds.checkpoint import disk
from sparseforge_ds.checkpoint.disk import atomic_file, atomic_folder, measurements_text, write_json
from sparseforge_ds.cli import inspect
from sparseforge_ds.cli.main import main
from tests.durable_order import record_durable_order
from tests.tiny_folders import file_size_limit


def written(path: Path, content: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "file").write_text(content)
    return path


def test_contents_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "final", "old")
    handles = len(os.listdir("/proc/self/fd"))
    order = record_durable_order(monkeypatch)
    with atomic_file(tmp_path / "alone") as file:
        file.write(b"content")
        temporary = Path(file.name).name
    assert order == [f"{temporary}: b'content'", "-> alone", f"{tmp_path.name}/: alone final"]
    order.clear()
    with atomic_folder(tmp_path / "final", replace=True) as folder:
        (folder / "file").write_text("new")
    in_folder = ["file: b'new'", "final.tmp/: file"]
    assert order == [*in_folder, "-> final.old", "-> final", f"{tmp_path.name}/: alone final"]
    assert len(os.listdir("/proc/self/fd")) == handles


def test_the_old_folder_stays_until_the_new_one_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = written(tmp_path / "final", "old")
    written(tmp_path / "final.old", "of a killed process")
    contents = []
    monkeypatch.setattr(disk, "sync_tree", lambda _: contents.append((final / "file").read_text()))
    with atomic_folder(final, replace=True) as folder:
        (folder / "file").write_text("new")
    assert contents == ["old"] and (final / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_an_error_leaves_the_old_folder(tmp_path: Path) -> None:
    final = written(tmp_path / "final", "old")
    with pytest.raises(RuntimeError), atomic_folder(final, replace=True) as folder:
        (folder / "file").write_text("new")
        raise RuntimeError
    assert (final / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_process_moved_aside_is_removed(tmp_path: Path) -> None:
    """It may be the only whole one until there is another."""
    old = written(tmp_path / "final.old", "of a killed process")
    with atomic_folder(tmp_path / "final", replace=True) as folder:
        (folder / "file").write_text("new")
        assert old.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    written(tmp_path / "final.old", "of somebody else")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "other"):
        raise RuntimeError
    assert (tmp_path / "final.old").exists()


def test_parents_that_an_error_leaves_empty_go_too(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "mine" / "a" / "b" / "final"):
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "mine" / "a" / "b" / "final"):
        written(tmp_path / "mine" / "a" / "other", "of another process")
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "file", "mine", "other"]
    with atomic_folder(tmp_path / "new" / "final"):
        pass
    assert (tmp_path / "new" / "final").is_dir()


def test_a_folder_that_exists_is_not_replaced_by_default(tmp_path: Path) -> None:
    final = written(tmp_path / "final", "old")
    with pytest.raises(OSError), atomic_folder(final) as folder:
        (folder / "file").write_text("new")
    assert (final / "file").read_text() == "old"


@pytest.mark.parametrize("size", [10, 10**6])
def test_a_file_that_the_disk_does_not_take_is_named(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Write less than Python's buffer, which is written at the end, and more."""

    def write(_: object) -> int:
        with file_size_limit(5), atomic_file(tmp_path / "block") as file:
            file.write(b"0" * size)
        return 0

    monkeypatch.setattr(inspect, "run", write)
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'block'}: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_an_error_keeps_the_file_that_it_names(tmp_path: Path) -> None:
    def read(_: BinaryIO) -> None:
        raise OSError(errno.EACCES, "denied", "other")

    with pytest.raises(OSError, match="denied: 'other'"), atomic_file(tmp_path / "file") as file:
        read(file)


def test_a_folder_that_cannot_be_synced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        disk.sync(tmp_path)


def test_measurements_have_no_numbers_that_others_cannot_read(tmp_path: Path) -> None:
    content = {"a": [1.5, math.inf, {"b": math.nan}], "c": (-math.inf, "Infinity", 2, True)}
    assert json.loads(measurements_text(content), parse_constant=pytest.fail) == {
        "a": [1.5, None, {"b": None}],
        "c": [None, "Infinity", 2, True],
    }
    # A config.json is written as it was read: Mamba's limits of time steps are infinite.
    write_json(tmp_path / "config.json", {"time_step_limit": [0.0, math.inf]})
    assert json.loads((tmp_path / "config.json").read_text()) == {"time_step_limit": [0.0, math.inf]}
