"""Where a resumed run goes on: the checkpoint, checked whole before any model is built, and what it says of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparseforge_ds.checkpoint.manifest import Manifest
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config.run_state import RunState
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.engine import TrainContext
from sparseforge_ds.train.plan import Plan
from sparseforge_ds.train.random_state import (
    fits_accelerator,
    random_file,
    read_random_state,
    seed_anew,
    set_random_state,
)


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that was found whole and of this run."""

    manifest: Manifest
    checkpoint: Checkpoint

    @property
    def forge_state(self) -> dict[str, Any]:
        """What the forge saved."""
        return dict(self.checkpoint.client_state["sparseforge"])

    @property
    def data_state(self) -> dict[str, Any]:
        """What the stream of batches saved."""
        return dict(self.checkpoint.client_state["train"]["data"])


def find_resumption(plan: Plan, ranks: Ranks, checkpoints: Checkpoints) -> Resumption:
    """Find the checkpoint to go on from and read every byte of it, each rank its share. Collective; loads nothing.

    Raises:
        AgreedError: there is none, a file is damaged, missing or foreign, or it belongs to another run.
    """
    ranks.on_first(checkpoints.recover)
    manifest = ranks.on_first(checkpoints.find)  # a shared file system may show others an older one
    ranks.all_or_raise(lambda: checkpoints.check(manifest))
    return ranks.all_or_raise(lambda: _open(plan, manifest))


def continue_from(found: Resumption, context: TrainContext) -> str:
    """Make engine, forge and generators what they were; the last thing before training goes on. Collective.

    Returns:
        A line for the log.

    Raises:
        ValueError: the checkpoint does not fit the engine.
        AgreedError: the file of a rank's generators is damaged.
    """
    manifest, plan, ranks = found.manifest, context.plan, context.ranks
    context.forge.restore(found.checkpoint)
    line = f"resumed from {manifest.folder} at step {manifest.step}"
    before, now = (found.checkpoint.world_size, found.checkpoint.stage), (ranks.world_size, plan.stage)
    if before != now:
        line += f" (saved by {before[0]} ranks at ZeRO stage {before[1]}, going on with {now[0]} at stage {now[1]})"
    path = manifest.folder / random_file(ranks.rank)
    if before[0] == now[0] and path.name in manifest.files:
        state = ranks.all_or_raise(lambda: read_random_state(path))
        if all(ranks.gather(fits_accelerator(state))):
            ranks.all_or_raise(_named(path.name, lambda: set_random_state(state)))
            return line
    seed_anew(plan.arguments.seed, manifest.step, ranks.rank)
    return f"{line}; random numbers start anew from seed {plan.arguments.seed}, step and rank"


def load_position(found: Resumption, batches: Batches) -> None:
    """Set the stream of batches to where the checkpoint was taken.

    Raises:
        ValueError: it is of other data, or damaged.
    """
    try:
        batches.load_state_dict(found.data_state)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"--resume: {found.manifest.folder}: its data position cannot be read ({error!r:.200})"
        ) from None


def _open(plan: Plan, manifest: Manifest) -> Resumption:
    folder = manifest.folder
    checkpoint = Checkpoint(folder)
    for what, recorded, found in (
        ("ranks", manifest.world_size, checkpoint.world_size),
        ("ZeRO stage", manifest.stage, checkpoint.stage),
    ):
        if recorded != found:
            raise ValueError(
                f"--resume: {folder}: checkpoint.json says {what} {recorded}, the files {found}; use another checkpoint"
            )
    saved = RunState.parse(checkpoint.client_state.get("sparseforge"), f"--resume: {folder}")
    if not isinstance(checkpoint.client_state.get("train", {}).get("data"), dict):
        raise ValueError(f"--resume: {folder} was not written by this trainer: its client state has no data position")
    if saved.step != manifest.step:
        raise ValueError(f"--resume: {folder}: checkpoint.json says step {manifest.step}, the files {saved.step}")
    if unlike := saved.changes(RunState.of(plan.config, plan.weights)):
        raise ValueError(
            f"--resume: {folder} is of a run with other settings: {'; '.join(unlike[:8])}; use a checkpoint of this run"
        )
    return Resumption(manifest, checkpoint)


def _named(name: str, work: Callable[[], None]) -> Callable[[], None]:
    def attempt() -> None:
        try:
            work()
        except ValueError as error:
            raise ValueError(f"{name}: {error}; use another checkpoint") from None

    return attempt
