"""Where a resumed run goes on: the checkpoint, checked whole before any model is built, and what it says of the run."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.checkpoint.manifest import Manifest
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config.arguments import flags
from sparseforge_ds.config.run_state import RunState, differences, shorten
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.engine import TrainContext
from sparseforge_ds.train.evaluation import Evaluation
from sparseforge_ds.train.random_state import (
    fits_accelerator,
    random_file,
    read_random_state,
    seed_anew,
    set_random_state,
)
from sparseforge_ds.train.spec import RunSpec

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that was found whole and of this run."""

    manifest: Manifest
    checkpoint: Checkpoint


def find_resumption(spec: RunSpec, ranks: Ranks, checkpoints: Checkpoints) -> Resumption:
    """Find the checkpoint to go on from and read every byte of it, each rank its share. Collective; loads nothing.

    Raises:
        AgreedError: there is none, a file is damaged, missing or foreign, or it belongs to another run.
    """
    for line in ranks.on_first(lambda: changed_flags(spec)):
        _LOG.info(f"changed since the last start: {line}")
    manifest = ranks.on_first(checkpoints.newest)  # a shared file system may show others an older one
    ranks.all_or_raise(lambda: checkpoints.check(manifest))
    return ranks.all_or_raise(lambda: Resumption(manifest, _open(spec, manifest)))


def load_position(found: Resumption, batches: Batches) -> None:
    """Set the stream of batches to where the checkpoint was taken.

    Raises:
        ValueError: it is of other data, or damaged.
    """
    try:
        batches.load_state_dict(found.checkpoint.client_state["train"]["data"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"--resume: {found.manifest.folder}: its data position cannot be read ({error!r:.200})"
        ) from None


def continue_from(found: Resumption, context: TrainContext, evaluation: Evaluation) -> None:
    """Make engine, forge, scores and generators what they were; the last thing before training goes on. Collective.

    Raises:
        ValueError: the checkpoint does not fit the engine.
        AgreedError: the file of a rank's generators, or what was scored, is damaged.
    """
    manifest, spec, ranks = found.manifest, context.spec, context.ranks
    ranks.all_or_raise(lambda: evaluation.load_state_dict(found.checkpoint.client_state["train"].get("evaluations")))
    context.forge.restore(found.checkpoint)
    line = f"resumed from {manifest.folder} at step {manifest.step}"
    before, now = (found.checkpoint.world_size, found.checkpoint.stage), (ranks.world_size, spec.stage)
    if before != now:
        line += f" (saved by {before[0]} ranks at ZeRO stage {before[1]}, going on with {now[0]} at stage {now[1]})"
    path = manifest.folder / random_file(ranks.rank)
    state = ranks.all_or_raise(lambda: read_random_state(path)) if before[0] == now[0] else None
    if state is not None and all(ranks.gather(fits_accelerator(state))):
        ranks.all_or_raise(lambda: set_random_state(state))
    else:
        seed_anew(spec.arguments.seed, manifest.step, ranks.rank)
        line += f"; random numbers start anew from seed {spec.arguments.seed}, step and rank"
    _LOG.info(line)


def _open(spec: RunSpec, manifest: Manifest) -> Checkpoint:
    folder = manifest.folder
    checkpoint = Checkpoint(folder)
    saved = RunState.parse(checkpoint.client_state.get("sparseforge"), f"--resume: {folder}")
    for what, recorded, found in (
        ("ranks", manifest.world_size, checkpoint.world_size),
        ("ZeRO stage", manifest.stage, checkpoint.stage),
        ("step", manifest.step, saved.step),
    ):
        if recorded != found:
            raise ValueError(
                f"--resume: {folder}: checkpoint.json says {what} {recorded}, the files {found}; use another checkpoint"
            )
    if not isinstance(checkpoint.client_state.get("train", {}).get("data"), dict):
        raise ValueError(f"--resume: {folder} was not written by this trainer: its client state has no data position")
    if unlike := saved.changes(RunState.from_weights(spec.config, spec.weights)):
        raise ValueError(
            f"--resume: {folder} is of a run with other settings: {shorten(unlike)}; use a checkpoint of this run"
        )
    return checkpoint


def _check_optimizer(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError for numbers of the optimizer that would be the checkpoint's whatever the JSON says; the learning
    rate is set at every step."""
    was, present = ((each.get("optimizer") or {}).get("params") or {} for each in (before, now))
    for key in sorted((was.keys() | present.keys()) - {"lr"}):
        old, new = was.get(key), present.get(key)
        if old != new and not isinstance(old, (bool, str)) and not isinstance(new, (bool, str)):
            raise ValueError(
                f"--resume: optimizer.params.{key} was {json.dumps(old)}, is {json.dumps(new)}: a run that goes on "
                "keeps that of its checkpoint; put it back, or begin a new run in another folder"
            )


def changed_flags(spec: RunSpec) -> list[str]:
    """Run flags and DeepSpeed keys that a resumed run has otherwise than before, as lines for the log."""
    run, engine = (read_json(spec.folder / name) for name in ("sparseforge.json", "ds_config.json"))
    found = []
    for name, before, after in (
        ("run", run.get("run", {}), flags(spec.arguments)),
        ("deepspeed", engine, spec.deepspeed),
    ):
        if not isinstance(before, dict):
            raise ValueError(
                f"--resume: {spec.folder / 'sparseforge.json'} is damaged: `run` is no object; bring it back"
            )
        now = json.loads(json.dumps(after))
        if name == "deepspeed":
            _check_optimizer(before, now)
        for either in (before, now):
            either.pop("resume", None)
            either.pop("sparseforge", None)  # no change, or the run would have been refused
        found += differences(before, now, name)
    return found
