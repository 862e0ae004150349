"""`zero3` for a DeepSpeed JSON that comes with the package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.shipped import configuration_file, shipped_names

TOP = Path(__file__).resolve().parents[3] / "ds_configs"


def test_every_json_of_the_top_folder_has_a_name_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_names() == sorted(path.stem for path in TOP.iterdir())
    for path in TOP.iterdir():
        for name in (path.stem, path.name):
            assert configuration_file(name).samefile(path)
        assert SparseForgeConfig.from_json(path.stem) == SparseForgeConfig.from_json(path)


def test_a_file_wins_and_a_folder_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero3").mkdir()
    assert configuration_file("zero3").samefile(TOP / "zero3.json")
    content = {**json.loads((TOP / "zero3.json").read_text()), "train_batch_size": 4}
    Path("zero3.json").write_text(json.dumps(content))
    assert configuration_file("zero3.json") == Path("zero3.json")
    shutil.rmtree("zero3")
    Path("zero3").write_text(json.dumps(content))
    assert configuration_file("zero3") == Path("zero3")


def test_a_path_that_cannot_be_looked_at_is_one_error() -> None:
    with pytest.raises(
        ValueError, match=r"^x{200}: cannot be looked at \(File name too long\); check its name and its"
    ):
        configuration_file("x" * 300)


@pytest.mark.parametrize("wrong", ["zero4", "zero4.json", "ds_configs/zero3.json", "/zero3", "./zero3"])
def test_an_unknown_name_lists_those_that_there_are(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{wrong}: no such file; .*: zero1, zero2, zero3, zero3_offload$"):
        configuration_file(wrong)
