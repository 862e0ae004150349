"""Files that unpickle without executing anything and are refused all the same."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseforge_ds.checkpoint import untrusted
from sparseforge_ds.checkpoint.pt_file import PtFile

NAME = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def save(folder: Path, content: Any) -> PtFile:
    torch.save(content, folder / NAME)
    return PtFile(folder / NAME)


def test_plain_content_passes(tmp_path: Path) -> None:
    shared = {"a": torch.zeros(3)}
    content = {"x": torch.arange(4), "view": torch.arange(9)[3:6], "t": torch.ones(2, 3).t(), "same": [shared, shared]}
    assert torch.equal(save(tmp_path, content).content["t"], torch.ones(3, 2))


@pytest.mark.parametrize("kind", ["expanded", "sparse", "meta", "conjugate", "negated", "quantized"])
def test_tensors_that_are_not_plain_numbers_are_refused(tmp_path: Path, kind: str) -> None:
    made = {
        "expanded": lambda: torch.ones(1).expand(1 << 40),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.ones(3, device="meta"),
        "conjugate": lambda: torch.conj(torch.ones(3, dtype=torch.complex64)),
        "negated": lambda: torch._neg_view(torch.ones(3)),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    with pytest.raises(ValueError, match=rf"{NAME}: .*refused"):
        _ = save(tmp_path, {"deep": [{"x": made[kind]()}]}).content


def test_a_list_that_unfolds_without_end_is_refused(tmp_path: Path) -> None:
    nested: list[Any] = [1]
    for _ in range(50):
        nested = [nested, nested]
    with pytest.raises(ValueError, match=rf"{NAME}: refused, it unfolds to more than 50,000,000 values"):
        _ = save(tmp_path, {"x": nested}).content


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(untrusted.MAX_DEPTH):
        nested = [nested]
    with pytest.raises(ValueError, match=rf"{NAME}: refused, it nests more than {untrusted.MAX_DEPTH} levels"):
        _ = save(tmp_path, {"x": nested}).content


def rezip(path: Path, compression: int, more: bool = False) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        if more:
            new.writestr("another/data.pkl", b"")
    path.write_bytes(made.getvalue())


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    archive = save(tmp_path, {"x": torch.zeros(1000)})
    rezip(tmp_path / NAME, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=rf"{NAME}: refused, its records are compressed"):
        _ = archive.content


def test_records_of_two_files_are_refused(tmp_path: Path) -> None:
    archive = save(tmp_path, {"x": torch.zeros(10)})
    rezip(tmp_path / NAME, zipfile.ZIP_STORED, more=True)
    with pytest.raises(ValueError, match=rf"{NAME}: refused, it holds records of more than one file"):
        _ = archive.content


def test_a_file_saved_under_another_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.zeros(10)})
    other = tmp_path / NAME.replace("rank_0", "rank_1", 1)
    shutil.copy(tmp_path / NAME, other)
    with pytest.raises(ValueError, match=rf"{other.name}: is the file that was saved as {NAME}, under another name"):
        _ = PtFile(other).content
