"""A folder that takes the place of another one: there is always a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseforge_ds.checkpoint import disk
from sparseforge_ds.checkpoint.disk import atomic_folder


def written(path: Path, content: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "file").write_text(content)
    return path


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


def test_a_folder_that_exists_is_not_replaced_by_default(tmp_path: Path) -> None:
    final = written(tmp_path / "final", "old")
    with pytest.raises(OSError), atomic_folder(final) as folder:
        (folder / "file").write_text("new")
    assert (final / "file").read_text() == "old"
