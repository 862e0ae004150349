from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from sparseforge_ds.checkpoint.pt_file import PtFile


class _Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, (f"touch {self.marker}",))


def test_hostile_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    torch.save({"module": _Hostile(marker)}, tmp_path / "hostile.pt")
    with pytest.raises(ValueError, match=r"hostile\.pt: .*refers to (posix|nt)\.system.*nothing was executed"):
        _ = PtFile(tmp_path / "hostile.pt").content
    assert not marker.exists()


def test_plain_pickle_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(_Hostile(marker)))
    with pytest.raises(ValueError, match=r"plain\.pt: "):
        _ = PtFile(tmp_path / "plain.pt").content
    assert not marker.exists()


def test_a_class_of_somebody_else_is_named(tmp_path: Path) -> None:
    torch.save({"path": Path("x")}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"foreign\.pt: refused, it refers to pathlib\."):
        _ = PtFile(tmp_path / "foreign.pt").content


def test_missing_file_and_wrong_content(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.pt: no such file"):
        _ = PtFile(tmp_path / "none.pt").content
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt: holds a list"):
        _ = PtFile(tmp_path / "list.pt").content


def test_content_can_be_released_and_read_again(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(4)}, tmp_path / "good.pt")
    archive = PtFile(tmp_path / "good.pt")
    first = archive.content["x"].clone()
    archive.release()
    assert torch.equal(archive.content["x"], first)
    archive.check_bytes()
