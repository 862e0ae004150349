"""Judgement of checkpoints as intact, by every byte of small ones with a manifest, or with nothing but their files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sparseforge_ds.checkpoint.damage import check_intact, suggest_intact_checkpoint, verify_checkpoint
from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.checkpoint.folder import MANIFEST, checkpoint_step, random_file, read_json_object
from sparseforge_ds.checkpoint.inventory import describe_checkpoint
from sparseforge_ds.checkpoint.manifest import Manifest, fingerprint

FILE = "mp_rank_00_model_states.pt"


def write_checkpoint(folder: Path, manifest: bool = True) -> Path:
    folder.mkdir(parents=True)
    file = folder / FILE
    torch.save({"weight": torch.arange(5000.0)}, file)
    if manifest:
        (folder / random_file(0)).write_text("{}")
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        stored = Manifest(
            folder, checkpoint_step(folder), 1, 0, sizes, {name: fingerprint(folder / name) for name in sizes}
        )
        write_json(folder / MANIFEST, stored.record())
    return folder


def flip(folder: Path) -> None:
    """Flip a bit in the middle of the file, among the weights."""
    content = bytearray((folder / FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / FILE).write_bytes(content)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_flipped_byte_is_found(tmp_path: Path, manifest: bool) -> None:
    folder = write_checkpoint(tmp_path / "step_000003", manifest)
    entry = verify_checkpoint(folder)
    assert entry.complete and not entry.damaged and entry.step == 3
    flip(folder)
    entry = verify_checkpoint(folder)
    assert entry.damaged and not entry.complete and f"{folder / FILE}: checksum of" in (entry.problem or "")
    (folder / FILE).unlink()
    with pytest.raises(ValueError, match="is missing|no .*_model_states.pt in it"):
        check_intact(folder)
    entry = verify_checkpoint(folder)
    assert not entry.complete and not entry.damaged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 4}, "holds step 4 .* its name says another"),
        ({"world_size": 10**15}, r"random_00001\.json is missing in"),
        ({"world_size": 0}, r"random_00000\.json does not belong in"),
    ],
)
def test_a_manifest_that_contradicts_its_folder_is_found(tmp_path: Path, change: dict[str, int], message: str) -> None:
    """A copy under a name of its own may have any."""
    folder = write_checkpoint(tmp_path / "step_000003")
    write_json(folder / MANIFEST, {**read_json_object(folder / MANIFEST), **change})
    assert re.search(message, describe_checkpoint(folder).problem or "")
    assert describe_checkpoint(folder.rename(tmp_path / "the_best")).complete == ("step" in change)


def test_the_newest_intact_sibling_is_named(tmp_path: Path) -> None:
    older, old, newest = (write_checkpoint(tmp_path / f"step_{step:06d}") for step in (2, 3, 4))
    for damaged, message in (
        (newest, f"one beside it is {old}"),
        (old, f"is {older}"),
        (older, "no other one beside it"),
    ):
        flip(damaged)
        with pytest.raises(ValueError, match="checksum of") as refused, suggest_intact_checkpoint(newest):
            check_intact(newest)
        assert message in str(refused.value)
    with (
        pytest.raises(ValueError, match="^alone$"),
        suggest_intact_checkpoint(write_checkpoint(tmp_path / "run" / "step_000001")),
    ):
        raise ValueError("alone")


def test_only_damage_has_a_sibling_for_a_cure(tmp_path: Path) -> None:
    """The others would fail alike."""
    newest, _ = (write_checkpoint(tmp_path / f"step_{step:06d}") for step in (4, 3))
    with pytest.raises(ValueError, match="^no masks yet$"), suggest_intact_checkpoint(newest):
        raise ValueError("no masks yet")
    record = read_json_object(newest / MANIFEST)
    write_json(newest / MANIFEST, {**record, "format": 99})
    with pytest.raises(ValueError, match="resume with the version that wrote it$"), suggest_intact_checkpoint(newest):
        check_intact(newest)
