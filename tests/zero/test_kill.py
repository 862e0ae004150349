"""A save that is killed: whatever the moment, the newest complete checkpoint is there, loads, and is the right one.

Ranks train a small model and save at every step, as a run does, and are killed (SIGKILL) at random moments, most of
them inside a save. tests/unit/train/test_commit.py kills at every single file-system action instead.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.ranks import AgreedError, Ranks
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.launcher import free_port
from tests import distributed
from tests.distributed import run_distributed
from tests.zero.case import Case, build, probe_of, train_step

STEPS = 5
CASES = {3: Case(stage=3, dtype="bf16", steps=STEPS), 1: Case(stage=1, dtype="bf16", steps=STEPS)}
PARTS = ("writing", "checking", "committing", "naming", "pruning")


class OneRank:
    """Offline stand-in for `Ranks`."""

    rank = 0
    world_size = 1
    first = True


def note(folder: Path, line: str) -> None:
    """Write an event to a file that survives the process."""
    with (folder / "log").open("a") as file:
        file.write(f"{time.monotonic()} {line}\n")


class WatchedRanks(Ranks):
    """Ranks of which the first notes each part of a save and of the removal after it, as it begins."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.parts = itertools.cycle(PARTS[1:])

    @override
    def on_first(self, work: Callable[[], Any]) -> Any:
        part = next(self.parts)
        if self.first:
            note(self.folder, part)
        return super().on_first(work)


def train_and_save(stage: int, folder: str, keep: int, steps: int = STEPS) -> None:
    """Train and save at every step; rank 0 notes where it is."""
    case = CASES[stage]
    root = Path(folder)
    ranks = WatchedRanks(root)
    saves = Checkpoints(root / "checkpoints", ranks, stage, keep)
    if ranks.first:
        saves.folder.mkdir(parents=True, exist_ok=True)
    engine, forge = build(case)
    forge.start(probe_of(engine, case, 0))
    for step in range(1, steps + 1):
        train_step(engine, case, step - 1)
        forge.step(probe_of(engine, case, step - 1))
        state = {"train": {"step": step, "data": {"position": step}}}
        if ranks.first:
            note(root, f"writing {step}")
        saves.save(engine, step, state)
        saves.remove_old()
        if ranks.first:
            note(root, f"done {step}")


def content_of(folder: Path) -> str:
    """Return a hash of everything that a checkpoint says, read offline."""
    checkpoint = Checkpoint(folder)
    digest = hashlib.sha256()
    for name in checkpoint.shapes:
        digest.update(name.encode() + checkpoint.weight(name).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for key in checkpoint.states(name):
            state = checkpoint.state(name, key).contiguous().view(-1)
            digest.update(key.encode() + state.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def newest(folder: Path) -> tuple[int, str]:
    """Return the step and content of the checkpoint that a launch finds after a kill: recovered and whole."""
    result = Checkpoints(folder / "checkpoints", OneRank(), 0, 0)  # type: ignore[arg-type]
    result.recover()
    manifest = result.newest()
    result.check(manifest)
    assert not list(result.folder.glob("*.tmp"))
    return manifest.step, content_of(manifest.folder)


class Killed:
    """Ranks of their own, to be killed from here."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def run(self, folder: Path, moment: Callable[[Path], None], victims: list[int]) -> None:
        """Start the ranks, wait for `moment`, kill `victims`, and the others a little later."""
        distributed.start_forkserver()
        context = multiprocessing.get_context("forkserver")
        (folder / "ranks").mkdir(parents=True)
        torch.save((self.args, {}), folder / "ranks" / "call.pt")
        # Start ranks as `run_distributed` does, and keep their processes to kill them.
        environment = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        target = (train_and_save.__module__, train_and_save.__qualname__)
        processes = [
            context.Process(
                target=distributed.rank_main,
                args=(rank, environment, "cpu", target, distributed.PATIENCE, folder / "ranks"),
                daemon=True,
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        try:
            # Kill the victims first; a survivor has a moment to do harm in.
            moment(folder)
            for victim in victims:
                os.kill(processes[victim].pid, signal.SIGKILL)
            wait([processes[victim].sentinel for victim in victims], timeout=distributed.PATIENCE)
            time.sleep(0.05)  # what a survivor still does must do no harm
        finally:
            distributed.kill(processes)


def events(folder: Path) -> list[tuple[float, str]]:
    path = folder / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines]


def wait_for(folder: Path, line: str) -> None:
    deadline = time.monotonic() + distributed.PATIENCE
    while not any(event == line for _, event in events(folder)):
        assert time.monotonic() < deadline, f"no {line!r} in {events(folder)}"
        time.sleep(0.001)


@pytest.fixture(scope="module", params=sorted(CASES))
def unbroken(request, tmp_path_factory) -> tuple[int, dict[int, str], dict[str, float]]:
    """Stage, content of every step's checkpoint, and how long each part of a save takes."""
    folder = tmp_path_factory.mktemp(f"unbroken{request.param}")
    run_distributed(train_and_save, 2, request.param, str(folder), 0)
    records = events(folder)
    seconds = dict.fromkeys(PARTS, 0.0)
    for (start, part), (stop, _) in zip(records, records[1:], strict=False):
        if part.split()[0] in PARTS:
            seconds[part.split()[0]] += (stop - start) / STEPS
    contents = {step: content_of(folder / "checkpoints" / f"step_{step:06d}") for step in range(1, STEPS + 1)}
    assert len(set(contents.values())) == STEPS
    return request.param, contents, seconds


KILLS = int(os.environ.get("SPARSEFORGE_KILLS", "8"))
"""For each stage."""


def test_a_run_killed_at_random_moments_ends_where_the_unbroken_one_does(unbroken, tmp_path):
    stage, contents, seconds = unbroken
    chance = random.Random(stage)
    fell: Counter[str] = Counter()
    for number in range(KILLS):
        folder = tmp_path / str(number)
        step = chance.randint(2, STEPS - 1)
        delay = chance.uniform(0, 1.15) * sum(seconds.values())
        victims = [[0, 1], [1, 0], [0], [1]][number % 4]

        def moment(folder: Path, step: int = step, delay: float = delay) -> None:
            wait_for(folder, f"writing {step}")
            time.sleep(delay)

        Killed(stage, str(folder), 2).run(folder, moment, victims)
        last = events(folder)[-1][1]
        done = [int(event.split()[1]) for _, event in events(folder) if event.startswith("done")]
        fell[last.split()[0]] += 1
        result, content = newest(folder)
        assert result >= max(done), f"kill {number} during {last}"
        assert content == contents[result], f"kill {number} during {last}"
        shutil.rmtree(folder)
    print(f"stage {stage}: {KILLS} kills, by the last thing begun: {dict(fell)}")
    assert sum(fell[part] for part in PARTS) >= KILLS // 3


def save_on_a_bad_disk(folder: str) -> tuple[str, list[str], int]:
    """Return the message about a file that is not on disk as it was written, what is left, and the step after it."""
    case = CASES[3]
    ranks = Ranks()
    saves = Checkpoints(Path(folder), ranks, 3, 2)
    engine, forge = build(case)
    forge.start(probe_of(engine, case, 0))
    save_checkpoint = engine.save_checkpoint

    # A disk that keeps something else than what was written, on the other rank.
    def save_and_flip_a_bit(folder: str, tag: str, *state: Any, **options: Any) -> None:
        save_checkpoint(folder, tag, *state, **options)
        ranks.barrier()
        if ranks.first:
            path = next(Path(folder, tag).glob("*zero_pp_rank_1_*optim_states.pt"))
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        ranks.barrier()

    # The second of three saves fails: all ranks know, and the first one stays the newest until the third.
    message = ""
    left = []
    for step in (1, 2, 3):
        train_step(engine, case, step - 1)
        forge.step(probe_of(engine, case, step - 1))
        engine.save_checkpoint = save_and_flip_a_bit if step == 2 else save_checkpoint
        try:
            saves.save(engine, step, {"train": {"step": step, "data": {}}})
        except AgreedError as error:
            message = str(error)
            ranks.barrier()
            left = sorted(path.name for path in saves.folder.iterdir() if path.suffix != ".py")  # DeepSpeed's scripts
            ranks.barrier()
    return message, left, saves.newest().step


def test_a_file_that_cannot_be_read_back_never_counts(tmp_path):
    for message, left, after in run_distributed(save_on_a_bad_disk, 2, str(tmp_path)):
        assert "step_000002 cannot be written" in message and "rank_1_mp_rank_00_optim_states.pt" in message
        assert "continue from the checkpoint before" in message
        assert left == ["latest", "step_000001"]
        assert after == 3
