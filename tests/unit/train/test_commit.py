"""A process that dies before any one of the file-system actions by which a checkpoint is committed, or by which an
interrupted commit is finished: afterwards the old newest checkpoint or the new one is there, whole."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseforge_ds.checkpoint.folder import MANIFEST, find_checkpoint, list_checkpoints
from sparseforge_ds.checkpoint.manifest import Manifest
from sparseforge_ds.train.checkpoints import Checkpoints
from tests.distributed import PATIENCE
from tests.durable_order import record_durable_order
from tests.unit.train.test_checkpoints import TwoRanks, write_checkpoint

ACTIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
KILLED = 9
MODEL_FILE = "mp_rank_00_model_states.pt"


def die_before(action: int, work: Callable[[], Any]) -> bool:
    """Do `work` in a process that ends before its file-system action number `action`; whether it came to that."""

    def body() -> None:
        left = action

        def hook(event: str, arguments: Any) -> None:
            nonlocal left
            is_read = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in ACTIONS and not is_read:  # a file that is read leaves everything as it is
                left -= 1
                if left == 0:
                    os._exit(KILLED)

        sys.addaudithook(hook)
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(PATIENCE)
    process.kill()
    assert process.exitcode in (0, KILLED)
    return process.exitcode == KILLED


def checkpoints_in(folder: Path) -> Checkpoints:
    return Checkpoints(folder, TwoRanks(), stage=0, keep=1)


class Engine:
    """DeepSpeed's engine, whose file is written already."""

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        assert Path(folder, tag, MODEL_FILE).is_file()


def commit_step_300(folder: Path) -> None:
    """Commit step 300 once DeepSpeed has written its file, and remove what is older."""
    checkpoints = checkpoints_in(folder)
    checkpoints.save(Engine(), 300, {})
    checkpoints.remove_old()


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Return every file of a folder with its bytes, and every folder in it."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def nothing_before(folder: Path) -> None:
    pass


def two_before(folder: Path) -> None:
    write_checkpoint(folder, 100)
    write_checkpoint(folder, 200)


def newest(folder: Path) -> int | None:
    """Return the step that a launch goes on from, every byte of it checked; None without a checkpoint."""
    checkpoints = checkpoints_in(folder)
    checkpoints.recover()
    assert not list(folder.glob("*.tmp"))
    try:
        result = checkpoints.newest()
    except ValueError as error:
        assert "start the run without --resume" in str(error)
        return None
    for name in result.files:
        result.check_file(name)
    return result.step


@pytest.mark.parametrize("before", [nothing_before, two_before])
def test_a_kill_before_any_action_of_a_commit_leaves_an_intact_checkpoint(tmp_path, before):
    start = tmp_path / "start"
    start.mkdir()
    before(start)
    unfinished = start / "step_000300.tmp"
    unfinished.mkdir()
    torch.save({"step": 300, "weight": torch.arange(8.0)}, unfinished / MODEL_FILE)
    old = None if before is nothing_before else 200
    results: list[int | None] = []
    recovered: list[dict[str, bytes | None]] = []
    twice = 0
    for action in range(1, 200):
        folder = tmp_path / str(action)
        shutil.copytree(start, folder)
        died = die_before(action, lambda folder=folder: commit_step_300(folder))
        if list_checkpoints(folder):  # what the offline tools see, which recover nothing
            Manifest.read(find_checkpoint(folder)).check_sizes()
        again = tmp_path / "again"
        shutil.copytree(folder, again)
        results.append(newest(folder))
        # An action may leave what an earlier one left, of which every recovery has been seen.
        state = content_of(again)
        ends = () if state in recovered else range(1, 200)
        recovered.append(state)
        for second in ends:
            interrupted = tmp_path / "interrupted"
            shutil.copytree(again, interrupted)
            stopped = die_before(second, lambda folder=interrupted: checkpoints_in(folder).recover())
            assert newest(interrupted) == results[-1], (
                f"died before action {action}, then before {second} of recovering"
            )
            shutil.rmtree(interrupted)
            twice += stopped
            if not stopped:
                break
        shutil.rmtree(again)
        shutil.rmtree(folder)
        if not died:
            break
    commit = results.index(300)
    assert results == [old] * commit + [300] * (len(results) - commit)
    assert 3 <= commit < len(results) - 2, "dying early leaves the old checkpoint, dying late the new one"
    print(
        f"{before.__name__}: died before each of {len(results) - 1} actions, and {twice} times in the recovery as well"
    )


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    unfinished = folder / "step_000300.tmp"
    unfinished.mkdir(parents=True)
    torch.save({"step": 300}, unfinished / MODEL_FILE)
    order = record_durable_order(monkeypatch)
    commit_step_300(folder)
    commit = order.index("-> step_000300")
    names = sorted(path.name for path in (folder / "step_000300").iterdir())
    assert {entry.partition(":")[0] for entry in order[:commit]} >= {*names} - {MANIFEST}  # atomic by itself
    assert order[commit - 1 : commit + 3] == [
        f"step_000300.tmp/: {' '.join(names)}",
        "-> step_000300",
        "checkpoints/: step_000300",
        f"{tmp_path.name}/: checkpoints",
    ]
