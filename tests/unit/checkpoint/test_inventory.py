"""Inventory of a `checkpoints` folder, by names, sizes and manifests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sparseforge_ds.checkpoint import inventory as inventory_module
from sparseforge_ds.checkpoint.inventory import SavedCheckpoint, describe_all, describe_checkpoint, take_inventory
from sparseforge_ds.checkpoint.manifest import FORMAT


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for step in (100, 200):
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        sizes = {"a.pt": 5, "random_00000.json": 2, "random_00001.json": 2}
        for name, size in sizes.items():
            (folder / name).write_bytes(bytes(size))
        record = {"format": FORMAT, "step": step, "world_size": 2, "zero_stage": 3}
        record |= {"files": sizes, "fingerprints": dict.fromkeys(sizes, "00")}
        (folder / "checkpoint.json").write_text(json.dumps(record))
    return tmp_path


def test_complete_checkpoints_have_no_problem(checkpoints: Path) -> None:
    inventory = take_inventory(checkpoints)
    assert [(e.name, e.step, e.complete) for e in inventory.entries] == [
        ("step_000100", 100, True),
        ("step_000200", 200, True),
    ]
    assert inventory.problem is None and inventory.leftovers == []
    assert inventory.current == inventory.entries[1]
    assert inventory.current.bytes == sum(f.stat().st_size for f in (checkpoints / "step_000200").iterdir())


def test_the_newest_is_the_current_one_whatever_deepspeed_says(checkpoints: Path) -> None:
    (checkpoints / "latest").write_text("step_000100")
    (checkpoints / "step_000300").mkdir()
    inventory = take_inventory(checkpoints)
    assert inventory.current is not None and inventory.current.name == "step_000300" and inventory.problem is None
    assert "no *_model_states.pt" in (inventory.current.problem or "")


def test_where_a_run_removes_the_newest_in_the_meantime_the_one_after_it_is_current(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[str] = []

    def saved_meanwhile(folder: Path) -> SavedCheckpoint:
        described.append(folder.name)
        if described.count("step_000200") == 2 and (checkpoints / "step_000200").exists():
            (checkpoints / "step_000200").rename(checkpoints / "step_000300")
            (checkpoints / "latest").write_text("step_000300")
        return describe_checkpoint(folder)

    monkeypatch.setattr(inventory_module, "describe_checkpoint", saved_meanwhile)
    inventory = take_inventory(checkpoints)
    assert inventory.current is not None and inventory.current.name == "step_000300"
    assert [entry.name for entry in inventory.entries] == ["step_000100", "step_000300"]


def test_a_file_that_is_cut_off_or_missing_makes_a_checkpoint_incomplete(checkpoints: Path) -> None:
    (checkpoints / "step_000200" / "a.pt").write_bytes(b"1234")
    (checkpoints / "step_000100" / "a.pt").unlink()
    missing, cut = take_inventory(checkpoints).entries
    assert not missing.complete and "a.pt is missing" in (missing.problem or "")
    assert not cut.complete and "a.pt has 4 bytes instead of 5" in (cut.problem or "")


@pytest.mark.parametrize(("named", "shown"), [("step_000300", "'step_000300'"), ("../x", "'../x'"), ("", "''")])
def test_checkpoints_that_deepspeed_alone_saved_are_listed(checkpoints: Path, named: str, shown: str) -> None:
    for step in (100, 200):
        (checkpoints / f"step_{step:06d}").rename(checkpoints / f"global_step{step}")
    inventory = take_inventory(checkpoints)
    assert inventory.problem == f"{checkpoints / 'latest'}: no such file"
    (checkpoints / "latest").write_text(named)
    inventory = take_inventory(checkpoints)
    assert inventory.problem == f"{checkpoints / 'latest'}: names {shown}, which is no folder beside it"
    assert inventory.current is not None and inventory.current.name == "global_step200"
    (checkpoints / "latest").write_text("global_step100\n")
    inventory = take_inventory(checkpoints)
    assert inventory.current == inventory.entries[0] and inventory.problem is None


def test_leftovers_of_a_crash_are_listed(checkpoints: Path) -> None:
    (checkpoints / "step_000300.tmp").mkdir()
    (checkpoints / "step_000300.tmp" / "half_model_states.pt").write_bytes(b"1")
    (checkpoints / "latest.tmp").write_text("x")
    inventory = take_inventory(checkpoints)
    assert inventory.leftovers == ["latest.tmp", "step_000300.tmp"] and len(inventory.entries) == 2


def test_without_a_manifest_the_files_must_fit_together(tmp_path: Path) -> None:
    folder = tmp_path / "global_step5"
    folder.mkdir()
    for rank in (0, 2):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"1")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"1")
    (entry,) = take_inventory(tmp_path).entries
    assert entry.step == 5 and not entry.complete and "rank 1 is missing" in (entry.problem or "")


def test_a_folder_without_checkpoints_is_an_empty_inventory(tmp_path: Path) -> None:
    inventory = take_inventory(tmp_path / "checkpoints")
    assert inventory.entries == [] and inventory.current is None and inventory.problem is None


def test_checkpoints_that_a_run_removes_meanwhile_are_no_damage(tmp_path: Path) -> None:
    entries = [SavedCheckpoint(name, step, 1, None) for step, name in enumerate(("gone", "removed", "kept"))]
    for name in ("removed", "kept"):
        (tmp_path / name).mkdir()

    def verify(folder: Path) -> SavedCheckpoint:
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        if folder.name == "removed":
            folder.rmdir()
            return dataclasses.replace(entries[1], problem="incomplete")
        return entries[2]

    assert describe_all([tmp_path / entry.name for entry in entries], verify) == entries[2:]
