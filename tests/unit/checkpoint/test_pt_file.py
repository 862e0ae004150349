from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

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


def test_a_class_that_is_refused_is_named(tmp_path: Path) -> None:
    torch.save({"path": Path("x")}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"foreign\.pt: refused, it refers to pathlib\."):
        _ = PtFile(tmp_path / "foreign.pt").content


def test_a_missing_file_and_wrong_content_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.pt: no such file"):
        _ = PtFile(tmp_path / "none.pt").content
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt: holds a list"):
        _ = PtFile(tmp_path / "list.pt").content


def test_a_compressed_record_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 20))
    content = bytearray(path.read_bytes())
    content[60] ^= 0xFF  # inside what is compressed: unpacking it would end in zlib's own error
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bomb\.pt: .*compressed"):
        PtFile(path).check_bytes()


def test_content_can_be_released_and_read_again(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(4)}, tmp_path / "good.pt")
    archive = PtFile(tmp_path / "good.pt")
    first = archive.content["x"].clone()
    archive.release()
    assert torch.equal(archive.content["x"], first)
    archive.check_bytes()


class _Taken:
    """Pickled as getattr(owner, name), as Python 3.11.0 to 3.11.3 does with members of an enumeration."""

    def __init__(self, owner: object, name: str) -> None:
        self.taken = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.taken


@pytest.mark.parametrize("member", list(ZeroStageEnum))
def test_a_member_of_an_enumeration_is_read_however_it_was_saved(tmp_path: Path, member: ZeroStageEnum) -> None:
    torch.save({"by name": _Taken(ZeroStageEnum, member.name), "by value": member}, tmp_path / "a.pt")
    content = PtFile(tmp_path / "a.pt").content
    assert content["by name"] == content["by value"] == int(member)


@pytest.mark.parametrize("name", ["__subclasses__", "from_bytes", "__class__"])
def test_no_other_attribute_is_read_by_getattr(tmp_path: Path, name: str) -> None:
    torch.save({"x": _Taken(ZeroStageEnum, name)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=f"refused, it takes '{name}' of"):
        _ = PtFile(tmp_path / "a.pt").content
    torch.save({"x": _Taken(_Taken, "__init__")}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="refused, it refers to .*_Taken"):
        _ = PtFile(tmp_path / "b.pt").content
