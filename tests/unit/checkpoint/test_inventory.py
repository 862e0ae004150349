"""What lies in a `checkpoints` folder, by names, sizes and manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseforge_ds.checkpoint.inventory import take_inventory
from sparseforge_ds.checkpoint.manifest import FORMAT


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for step in (100, 200):
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        (folder / "a.pt").write_bytes(b"12345")
        record = {"format": FORMAT, "step": step, "world_size": 2, "zero_stage": 3, "previous": None}
        record |= {"files": {"a.pt": 5}, "fingerprints": {"a.pt": "00"}}
        (folder / "checkpoint.json").write_text(json.dumps(record))
    (tmp_path / "latest").write_text("step_000200\n")
    return tmp_path


def test_all_in_order(checkpoints: Path) -> None:
    found = take_inventory(checkpoints)
    assert [(e.name, e.step, e.complete) for e in found.entries] == [
        ("step_000100", 100, True),
        ("step_000200", 200, True),
    ]
    assert found.latest == "step_000200" and found.latest_problem is None and found.leftovers == []
    assert found.current is found.entries[1]
    assert found.current.bytes == sum(f.stat().st_size for f in (checkpoints / "step_000200").iterdir())


def test_latest_may_name_an_older_one(checkpoints: Path) -> None:
    (checkpoints / "latest").write_text("step_000100")
    found = take_inventory(checkpoints)
    assert found.current is found.entries[0] and found.latest_problem is None


def test_a_file_that_is_cut_off_or_missing(checkpoints: Path) -> None:
    (checkpoints / "step_000200" / "a.pt").write_bytes(b"1234")
    (checkpoints / "step_000100" / "a.pt").unlink()
    missing, cut = take_inventory(checkpoints).entries
    assert not missing.complete and "a.pt is missing" in (missing.problem or "")
    assert not cut.complete and "a.pt has 4 bytes instead of 5" in (cut.problem or "")


@pytest.mark.parametrize(("named", "shown"), [("step_000300", "'step_000300'"), ("../x", "'../x'"), ("", "''")])
def test_latest_names_nothing(checkpoints: Path, named: str, shown: str) -> None:
    (checkpoints / "latest").write_text(named)
    found = take_inventory(checkpoints)
    assert found.latest_problem == f"{checkpoints / 'latest'}: names {shown}, which is no checkpoint beside it"
    assert found.current is not None and found.current.name == "step_000200"


def test_leftovers_of_a_crash(checkpoints: Path) -> None:
    (checkpoints / "step_000300.tmp").mkdir()
    (checkpoints / "step_000300.tmp" / "half_model_states.pt").write_bytes(b"1")
    (checkpoints / "latest.tmp").write_text("x")
    found = take_inventory(checkpoints)
    assert found.leftovers == ["latest.tmp", "step_000300.tmp"] and len(found.entries) == 2


def test_without_a_manifest_the_files_must_fit_together(tmp_path: Path) -> None:
    folder = tmp_path / "global_step5"
    folder.mkdir()
    for rank in (0, 2):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"1")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"1")
    (entry,) = take_inventory(tmp_path).entries
    assert entry.step == 5 and not entry.complete and "rank 1 is missing" in (entry.problem or "")


def test_nothing_there(tmp_path: Path) -> None:
    found = take_inventory(tmp_path / "checkpoints")
    assert found.entries == [] and found.current is None and found.latest is None
