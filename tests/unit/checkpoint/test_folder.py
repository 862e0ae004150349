"""Small files that nobody has checked yet: whatever is in their place, one ValueError that names it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sparseforge_ds.checkpoint.folder import (
    check_outside_checkpoints,
    find_checkpoint,
    find_run,
    list_files,
    newest_trainer_checkpoint,
    read_json_object,
)
from sparseforge_ds.checkpoint.manifest import fingerprint
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.checkpoint.tensors import TensorFolder

IN_PLACE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_anything_in_the_place_of_a_file_but_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    for name in ("a.json", "model.safetensors", "a_states.pt"):
        IN_PLACE[kind](tmp_path / name)
    with pytest.raises(ValueError, match=rf"a\.json: {'no such' if kind == 'nothing' else 'not a readable JSON'} file"):
        read_json_object(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json: is a link" if kind == "endless device" else r"model\.safetensors"):
        TensorFolder(tmp_path)
    for name in ("a.json", "a_states.pt"):
        with pytest.raises(ValueError, match=f"{name}: no such file"):
            fingerprint(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b'{"a": ' + b"9" * 10_000 + b"}", b"\xff\xfe", b'{"a": 1} {}', b"", b"[]", b"\xef\xbb\xbf{}"],
)
def test_files_that_are_no_json_object_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json: (not a readable JSON file|holds a list)") as refused:
        read_json_object(tmp_path / "a.json")
    assert type(refused.value) is ValueError and len(str(refused.value)) < 500


@pytest.mark.parametrize("tag", ["", "..", ".", "x" * 5000, "\0", "/etc", "a/b"])
def test_a_latest_file_that_names_no_folder_is_refused(tmp_path: Path, tag: str) -> None:
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(ValueError, match=r"latest: names .*, which is no folder beside it"):
        find_checkpoint(tmp_path)


def test_the_newest_complete_checkpoint_of_a_trainer_is_found(tmp_path: Path) -> None:
    assert newest_trainer_checkpoint(tmp_path) is None
    for name, files in {
        "checkpoint-9": ("latest", "trainer_state.json"),
        "checkpoint-10": ("latest", "trainer_state.json"),
        "checkpoint-11": ("latest",),  # killed while it was saved
        "checkpoint-12": ("trainer_state.json",),  # save_only_model
        "checkpoint-best": ("latest", "trainer_state.json"),
    }.items():
        (tmp_path / name / "global_step1").mkdir(parents=True)
        for file in files:
            (tmp_path / name / file).write_text("global_step1")
    assert newest_trainer_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-10" / "global_step1"
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="holds no checkpoint .*no checkpoint-N of a Trainer that is complete"):
        find_checkpoint(tmp_path / "model")


def test_a_file_in_the_place_of_a_folder_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    with pytest.raises(ValueError, match="file: is a file; give a run's output folder or one checkpoint in it"):
        find_checkpoint(tmp_path / "file")
    with pytest.raises(ValueError, match="none: no such folder; give"):
        find_checkpoint(tmp_path / "none")


def test_a_universal_checkpoint_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="is a universal checkpoint of DeepSpeed; give the one that it was made from"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"], "a shard of tensor or pipeline parallelism"),
        (["mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"], "expert parallelism is not"),
        (
            ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"],
            "rank 0 has two files, the other",
        ),
        ([f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 2)], "the model file of rank 1 is missing"),
        (["zero_pp_rank_0_mp_rank_00_optim_states.pt"], r"no \*_model_states.pt in it"),
    ],
)
def test_files_of_other_kinds_of_parallelism_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        list_files(tmp_path)


def test_files_of_ranks_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(11)]
    for name in names:
        (tmp_path / name).touch()
    assert [file.name for file in list_files(tmp_path).model] == names


def test_links_to_the_folders_of_a_run_are_followed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    elsewhere = tmp_path / "scratch" / "disk"
    step = run / "checkpoints" / "step_000004"
    for folder in (step, elsewhere / "step_000002"):
        folder.mkdir(parents=True)
    (run / "sparseforge.json").write_text("{}")
    (run / "data").symlink_to(elsewhere)
    (tmp_path / "short").symlink_to(run / "checkpoints")
    (tmp_path / "newest").symlink_to(step)
    for out in (tmp_path / "short" / "out", run / "data" / "out", run / "gone" / ".." / "model"):
        with pytest.raises(ValueError, match=r"out: lies in the folder|model: lies in the folder"):
            check_outside_checkpoints(out)
    # Behind a link, .. is the folder above the one that it leads to.
    (tmp_path / "deep").symlink_to(run / "model" / "sub")
    (run / "model" / "sub").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"lies in the folder model of the run {run}"):
        check_outside_checkpoints(tmp_path / "deep" / ".." / "out")
    check_outside_checkpoints(run / "checkpoints" / ".." / "export")
    check_outside_checkpoints(tmp_path / "data" / "model" / "out")  # folders of no run
    assert find_run(step) == run == find_run(tmp_path / "newest") and find_run(elsewhere) is None
    assert find_run(run / "gone" / ".." / "checkpoints") == run


@pytest.mark.parametrize("name", [".lock", "sparseforge.json"])
def test_a_run_that_ended_before_its_first_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    for folder in ("checkpoints", "data"):
        (tmp_path / folder).mkdir()
    with pytest.raises(ValueError, match=r"a run began here and has no checkpoint yet; .* start it again"):
        find_checkpoint(tmp_path)
