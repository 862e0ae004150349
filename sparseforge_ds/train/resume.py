"""Resumption of a run: its checkpoint is checked completely before any model is built, and restored afterwards."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from sparseforge_ds.checkpoint.folder import random_file, read_json_object
from sparseforge_ds.checkpoint.manifest import Manifest
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config.arguments import flags
from sparseforge_ds.config.optimizer_settings import MUON_RATES, default_params
from sparseforge_ds.config.run_state import RunState, differences, shorten
from sparseforge_ds.config.strict import convert
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.engine import Beginning, TrainContext
from sparseforge_ds.train.evaluation import Evaluation
from sparseforge_ds.train.random_state import (
    fits_accelerator,
    read_random_state,
    seed_anew,
    set_random_state,
)
from sparseforge_ds.train.spec import RunSpec

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """An intact checkpoint of this run."""

    manifest: Manifest
    checkpoint: Checkpoint


def find_resumption(spec: RunSpec, ranks: Ranks, checkpoints: Checkpoints) -> Resumption:
    """Find the checkpoint to go on from and read every byte of it, each rank a share. Collective; loads nothing.

    Raises:
        AgreedError: there is no checkpoint, a file is damaged, missing or foreign, or it belongs to another run.
    """
    for line in ranks.on_first(lambda: changed_flags(spec)):
        _LOG.info(f"changed since the last launch: {line}")
    manifest = ranks.on_first(checkpoints.newest)  # a shared file system may show others an older one
    ranks.all_or_raise(lambda: checkpoints.check(manifest))
    return ranks.all_or_raise(lambda: Resumption(manifest, _open(spec, manifest)))


def load_position(resumption: Resumption, batches: Batches) -> None:
    """Set the stream of batches to the position of the checkpoint.

    Raises:
        ValueError: the position belongs to other data, or is damaged.
    """
    try:
        batches.load_state_dict(resumption.checkpoint.launcher_state["data"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"--resume: {resumption.manifest.folder}: its data position cannot be read ({error!r:.200})"
        ) from None


def continue_from(resumption: Resumption, context: TrainContext, evaluation: Evaluation) -> None:
    """Restore engine, forge, scores and generators; the last thing before training goes on. Collective.

    Raises:
        ValueError: the checkpoint does not fit the engine.
        AgreedError: the file of a rank's generators, or the saved scores, are damaged.
    """
    spec = context.spec
    ranks = context.ranks
    manifest = resumption.manifest
    checkpoint = resumption.checkpoint

    # Restore the scores, and then weights, optimizer and masks, whatever the ranks and the stage were.
    saved = checkpoint.launcher_state
    ranks.all_or_raise(lambda: evaluation.load_state_dict(saved.get("evaluations", {})))
    where = f"--resume: {manifest.folder}:"
    context.beginning = ranks.all_or_raise(
        lambda: convert(saved.get("beginning"), Beginning | None, f"{where} beginning")
    )
    context.rates = ranks.all_or_raise(lambda: convert(saved.get("rates"), float, f"{where} rates"))
    context.forge.restore(checkpoint)
    line = f"resumed from {manifest.folder} at step {manifest.step}"
    same_ranks = checkpoint.world_size == ranks.world_size
    if not same_ranks or checkpoint.stage != spec.stage:
        line += (
            f" (saved by {checkpoint.world_size} ranks at ZeRO stage {checkpoint.stage}, "
            f"going on with {ranks.world_size} at stage {spec.stage})"
        )

    # Restore the generators where every rank has its own file for its kind of accelerator.
    path = manifest.folder / random_file(ranks.rank)
    state = ranks.all_or_raise(lambda: read_random_state(path)) if same_ranks else None
    if state is not None and all(ranks.gather(fits_accelerator(state))):
        ranks.all_or_raise(lambda: set_random_state(state))
    else:
        seed_anew(spec.arguments.seed, manifest.step, ranks.rank)
        line += f"; random numbers start anew from seed {spec.arguments.seed}, step and rank"
    _LOG.info(line)


def _open(spec: RunSpec, manifest: Manifest) -> Checkpoint:
    """Open the checkpoint; ValueError where it contradicts its manifest, or is of another trainer or run."""
    folder = manifest.folder
    checkpoint = Checkpoint(folder)
    saved = RunState.parse(checkpoint.client_state.get("sparseforge"), f"--resume: {folder}")
    # The manifest must describe these files: a mixture of two checkpoints has neither's state.
    for name, recorded, actual in (
        ("ranks", manifest.world_size, checkpoint.world_size),
        ("ZeRO stage", manifest.stage, checkpoint.stage),
        ("step", manifest.step, saved.step),
    ):
        if recorded != actual:
            raise ValueError(
                f"--resume: {folder}: checkpoint.json says {name} {recorded}, the files {actual}; "
                "use another checkpoint"
            )
    # The checkpoint must be of this trainer, and of a run with these settings.
    if not isinstance(checkpoint.launcher_state.get("data"), dict):
        raise ValueError(f"--resume: {folder} was not written by this trainer: its client state has no data position")
    if unlike := saved.changes(RunState.from_weights(spec.config, spec.weights)):
        raise ValueError(
            f"--resume: {folder} is of a run with other settings: {shorten(unlike)}; use a checkpoint of this run"
        )
    return checkpoint


def _check_optimizer(before: dict[str, Any], current: dict[str, Any]) -> None:
    """Reject changed numbers of the optimizer, whose old values a checkpoint brings back whatever the JSON says.

    Learning rates may change: they are set at every step. A key that is left out has its default.
    """
    old_params, new_params = ((config.get("optimizer") or {}).get("params") or {} for config in (before, current))
    defaults = default_params(current["optimizer"])
    for key in sorted((old_params.keys() | new_params.keys()) - {"lr", *MUON_RATES}):
        old = old_params.get(key, defaults.get(key))
        new = new_params.get(key, defaults.get(key))
        if old != new and not isinstance(old, (bool, str)) and not isinstance(new, (bool, str)):
            raise ValueError(
                f"--resume: optimizer.params.{key} was {json.dumps(old)}, is {json.dumps(new)}: a run that goes on "
                "keeps that of its checkpoint; put it back, or begin a new run in another folder"
            )


def changed_flags(spec: RunSpec) -> list[str]:
    """Return the run flags and DeepSpeed keys that have changed since the last launch, as lines for the log."""
    run, engine = (read_json_object(spec.folder / name) for name in ("sparseforge.json", "ds_config.json"))
    changes = []
    for name, before, after in (
        ("run", run.get("run", {}), flags(spec.arguments)),
        ("deepspeed", engine, spec.deepspeed),
    ):
        if not isinstance(before, dict):
            raise ValueError(
                f"--resume: {spec.folder / 'sparseforge.json'} is damaged: `run` is no object; bring it back"
            )
        current = json.loads(json.dumps(after))
        if name == "deepspeed":
            _check_optimizer(before, current)
        for settings in (before, current):
            settings.pop("resume", None)
            settings.pop("sparseforge", None)  # unchanged, or the run would have been refused
        changes += differences(before, current, name)
    return changes
