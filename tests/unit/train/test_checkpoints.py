"""Checkpoints that can be resumed, and those that are removed; tests/zero/test_kill.py saves some."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from typing_extensions import override

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.checkpoint.folder import random_file
from sparseforge_ds.checkpoint.manifest import Manifest, fingerprint
from sparseforge_ds.ranks import AgreedError, Ranks, all_or_raise
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.zero.forge_error import ForgeError


class TwoRanks(Ranks):
    """Two ranks in one process: what both shall do is done for one after the other."""

    def __init__(self):
        super().__init__()
        self.world_size = 2
        self.answers = []

    @override
    def all_or_raise(self, work):
        self.answers = []
        try:
            for self.rank in range(2):
                self.answers.append(all_or_raise(work, lambda problem: [problem]))
        finally:
            self.rank = 0
        return self.answers[0]

    @override
    def gather(self, value):
        """Return the answers of both ranks to what they did last."""
        return self.answers


class Engine:
    """DeepSpeed's engine at ZeRO-3, as far as files go; the disk loses the file `lost`."""

    def __init__(self, lost=None):
        self.lost = lost

    def save_checkpoint(self, folder, tag, client_state, save_latest):
        for rank, kind in itertools.product(range(2), ("model", "optim")):
            file = Path(folder, tag, f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
            file.parent.mkdir(exist_ok=True)
            if file.name != self.lost:
                torch.save({"rank": rank, **client_state}, file)


def write_checkpoint(parent, step, name=None):
    folder = parent / (name or f"step_{step:06d}")
    folder.mkdir()
    torch.save({"step": step, "weight": torch.arange(8.0)}, folder / "a.pt")
    for rank in range(2):
        (folder / random_file(rank)).write_text("{}")
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    prints = {path.name: fingerprint(path) for path in folder.iterdir()}
    manifest = Manifest(folder, step, 2, 3, files, prints)
    (folder / "checkpoint.json").write_text(json.dumps(manifest.record()))
    return folder


@pytest.fixture
def checkpoints(tmp_path):
    write_checkpoint(tmp_path, 100)
    write_checkpoint(tmp_path, 200)
    return Checkpoints(tmp_path, TwoRanks(), stage=3, keep=2)


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def tags(checkpoints):
    return [name for name in names(checkpoints) if name.startswith("step_")]


def test_the_newest_complete_checkpoint_is_found(checkpoints):
    result = checkpoints.newest()
    assert (result.folder, result.step) == (checkpoints.folder / "step_000200", 200)
    checkpoints.check(result)


def test_a_user_goes_back_by_moving_the_newer_ones_away(checkpoints):
    (checkpoints.folder / "latest").write_text("step_000200")  # for DeepSpeed's own tools
    shutil.rmtree(checkpoints.folder / "step_000200")
    assert checkpoints.newest().step == 100


def test_the_newest_step_is_the_largest_number(checkpoints):
    for name in ("step_1000000", "step_x00300", "step_000300.tmp", "global_step400"):
        write_checkpoint(checkpoints.folder, 1000000, name=name)
    (checkpoints.folder / "step_2000000").touch()
    assert checkpoints.newest().step == 1000000


def edit(checkpoints, **changes):
    path = checkpoints.folder / "step_000200" / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def remove_all(checkpoints):
    for tag in tags(checkpoints):
        (checkpoints.folder / tag).rename(checkpoints.folder / f"no_{tag}")


def damage(name, change):
    def apply(checkpoints):
        path = checkpoints.folder / "step_000200" / name
        path.write_bytes(change(path.read_bytes()))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_all, "no checkpoint in .*without --resume"),
        (
            lambda c: (c.folder / "step_000300").mkdir(),
            "not written by this trainer.*: step_000100, step_000200",
        ),
        (lambda c: (c.folder / "step_000200" / "checkpoint.json").unlink(), "not written by this trainer"),
        (lambda c: (c.folder / "step_000200" / "checkpoint.json").write_text("{"), "not written by this trainer"),
        (lambda c: (c.folder / "step_000200" / "checkpoint.json").write_text("[]"), "not written by this trainer"),
        (
            lambda c: (c.folder / "step_000200" / "a.pt").unlink(),
            r"a\.pt is missing.*move .*_000200 elsewhere \(complete: step_000100\)",
        ),
        (damage("a.pt", lambda content: content[:300]), r"a\.pt has 300 bytes instead of \d+"),
        (lambda c: (c.folder / "step_000200" / "b.pt").touch(), r"b\.pt: does not belong"),
        (lambda c: edit(c, format=1), "has format 1, this version of sparseforge_ds reads 4"),
        (lambda c: edit(c, step=300), "holds step 300"),
        (lambda c: edit(c, step="200"), "'200' is no int"),
        (lambda c: edit(c, world_size=3), r"random_00002\.json is missing"),
        (lambda c: edit(c, files={"../a": 1}, fingerprints={"../a": "0"}), "not written by this trainer"),
        (lambda c: edit(c, fingerprints={}), "files and fingerprints"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_says_why(checkpoints, damage, message):
    damage(checkpoints)
    with pytest.raises(ValueError, match=f"--resume: .*{message}"):
        checkpoints.newest()


def flip(position):
    def change(content):
        flipped = bytearray(content)
        flipped[position] ^= 16
        return bytes(flipped)

    return change


class Hostile:
    """A pickle that leaves a file behind when it is executed."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def replace_by_hostile(checkpoints):
    path = checkpoints.folder / "step_000200" / "a.pt"
    torch.save({"x": Hostile(checkpoints.folder / "executed")}, path)
    record = json.loads((path.parent / "checkpoint.json").read_text())
    record["files"]["a.pt"] = path.stat().st_size
    record["fingerprints"]["a.pt"] = fingerprint(path)
    edit(checkpoints, **record)


def replace_by_the_other_step(checkpoints):
    other = checkpoints.folder / "step_000100" / "a.pt"
    (checkpoints.folder / "step_000200" / "a.pt").write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage("a.pt", flip(600)), r"a\.pt: "),
        (damage("a.pt", flip(-60)), r"a\.pt: "),
        (damage(random_file(0), flip(0)), r"random_00000\.json: damaged"),
        (replace_by_the_other_step, r"a\.pt: damaged, or of another step"),
        (replace_by_hostile, "nothing was executed"),
    ],
)
def test_damage_inside_a_file_is_named_before_anything_is_loaded(checkpoints, damage, message):
    damage(checkpoints)
    result = checkpoints.newest()
    with pytest.raises(ValueError, match=f"--resume: .*{message}.*complete: step_000100"):
        for rank in range(2):
            checkpoints.ranks.rank = rank
            checkpoints.check(result)
    assert not (checkpoints.folder / "executed").exists()


def test_leftovers_of_a_crash_are_removed(checkpoints):
    (checkpoints.folder / "step_000300.tmp").mkdir()
    (checkpoints.folder / "step_000300.tmp" / "half.pt").write_bytes(b"1")
    (checkpoints.folder / "latest.tmp").write_text("step_0003")
    checkpoints.recover()
    assert names(checkpoints) == ["step_000100", "step_000200"]


def save_and_remove_old(checkpoints, step, keep):
    checkpoints.keep = keep
    checkpoints.save(Engine(), step, {})
    checkpoints.remove_old()
    assert (checkpoints.folder / "latest").read_text() == f"step_{step:06d}"
    return tags(checkpoints)


def test_the_newest_checkpoints_stay(checkpoints):
    assert save_and_remove_old(checkpoints, 300, 0) == ["step_000100", "step_000200", "step_000300"]
    assert save_and_remove_old(checkpoints, 400, 2) == ["step_000300", "step_000400"]
    assert save_and_remove_old(checkpoints, 500, 1) == ["step_000500"]


def test_no_checkpoint_is_removed_before_the_newest_is_known_to_be_good(checkpoints):
    checkpoints.keep = 1
    checkpoints.remove_old()
    assert tags(checkpoints) == ["step_000100", "step_000200"], "nothing was saved"
    assert checkpoints.newest_before(200) == (checkpoints.folder / "step_000100", [checkpoints.folder / "step_000200"])
    assert checkpoints.newest_before(100) == (None, [checkpoints.folder / f"step_000{step}00" for step in (1, 2)])


def test_a_gap_in_the_past_costs_no_good_checkpoint(checkpoints):
    write_checkpoint(checkpoints.folder, 300)
    shutil.rmtree(checkpoints.folder / "step_000200")
    assert save_and_remove_old(checkpoints, 400, 3) == ["step_000100", "step_000300", "step_000400"]


@pytest.mark.parametrize("change", ["damaged", "a file too many"])
def test_what_does_not_look_intact_is_not_removed_with_old_checkpoints(checkpoints, caplog, change):
    """A note beside the weights, or one failed read, must cost no checkpoint; nor does it count as one that is kept."""
    newest = write_checkpoint(checkpoints.folder, 300)
    if change == "damaged":
        (newest / "checkpoint.json").write_text("{")
    else:
        (newest / "notes.txt").write_text("the best so far")
    assert save_and_remove_old(checkpoints, 400, 2) == ["step_000200", "step_000300", "step_000400"]
    assert save_and_remove_old(checkpoints, 500, 2) == ["step_000300", "step_000400", "step_000500"]
    assert caplog.text.count("it is not removed with old checkpoints") == 1 and "step_000300" in caplog.text


def test_a_file_that_cannot_be_removed_ends_nothing(checkpoints, monkeypatch, caplog):
    """Fail to remove, as on a network file system while someone reads the file."""

    def busy(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    unremoved = ["step_000100.old.tmp", "step_000200.old.tmp"]
    assert save_and_remove_old(checkpoints, 300, 1) == [*unremoved, "step_000300"]
    assert all(f"{name} cannot be removed now" in caplog.text for name in unremoved)
    checkpoints.recover()
    monkeypatch.undo()
    checkpoints.recover()
    assert tags(checkpoints) == ["step_000300"]


def test_the_best_stays_where_a_resumed_run_scores_another_text_or_none(checkpoints):
    checkpoints.keep = 1
    checkpoints.save(Engine(), 300, {}, {200: 1.0, 300: 2.0})
    checkpoints.remove_old()
    for step, losses in ((400, {}), (500, None), (600, {})):
        checkpoints.save(Engine(), step, {}, losses)
        checkpoints.remove_old()
        assert tags(checkpoints) == ["step_000200", f"step_000{step}"]
        assert (checkpoints.folder / "best").read_text() == "step_000200"
    # It may have been moved away, as a message advises who goes back.
    (checkpoints.folder / "step_000200").rename(checkpoints.folder.parent / "elsewhere")
    assert checkpoints.name_best({}) is None
    checkpoints.save(Engine(), 700, {}, {700: 5.0})
    checkpoints.remove_old()
    assert tags(checkpoints) == ["step_000700"] and (checkpoints.folder / "best").read_text() == "step_000700"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ForgeError("step was not called")])
def test_what_is_no_fault_of_the_disk_is_not_told_as_one(checkpoints, error, monkeypatch):
    def fail(_engine, folder, tag, *_args, **_options):
        (Path(folder) / tag).mkdir()
        raise error

    monkeypatch.setattr(Engine, "save_checkpoint", fail)
    with pytest.raises(type(error), match=f"^{error}$"):
        checkpoints.save(Engine(), 300, {})
    assert tags(checkpoints) == ["step_000100", "step_000200"] and not list(checkpoints.folder.glob("*.tmp"))


@pytest.mark.parametrize("missing", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "random_00001.json"])
def test_a_save_without_the_file_of_a_rank_is_not_complete(checkpoints, missing, monkeypatch):
    checkpoints.save(Engine(), 300, {})
    assert len(checkpoints.newest().files) == 6
    with monkeypatch.context() as patch:

        def write(path, *content, **options):
            if path.name != missing:
                write_json(path, *content, **options)

        patch.setattr("sparseforge_ds.train.checkpoints.write_json", write)
        with pytest.raises(AgreedError, match="has 1 (optimizer|random) files of 2"):
            checkpoints.save(Engine(lost=missing), 400, {})
    assert tags(checkpoints) == ["step_000100", "step_000200", "step_000300"]
