"""What a checkpoint carries of a forge beside the optimizer's state, and a run that goes on from it."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from sparseforge_ds import __version__
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config.run_state import RunState, differences, shorten
from sparseforge_ds.methods import CurvatureMean, ShardedWeights
from sparseforge_ds.model.branch import branches
from sparseforge_ds.zero.restore import Masks, restore

_LOG = logging.getLogger(__name__)
VERSIONS = {"sparseforge_ds": __version__, "deepspeed": version("deepspeed"), "torch": version("torch")}
"""Packages that decide what is in a checkpoint, and what the next step makes of it."""


class SavedState:
    """The state of the masks of an engine, as a whole. Its methods are collective."""

    def __init__(self, on: ShardedWeights, mean: CurvatureMean) -> None:
        self._on = on
        self._mean = mean
        self.started = False
        """True if `forge.start` was called before the checkpoint that was loaded; unknown once a step was made."""

    def state_dict(self) -> dict[str, Any]:
        """See `SparseForge.state_dict`."""
        on = self._on
        if on.state.released and on.layout.all_reduce(on.state.mark_kept_zeros()).item():
            on.layout.push()
        run = RunState.from_weights(on.config, list(on.weights.values()), on.step, on.refreshes)
        mean = self._mean.state_dict()
        return {**run.to_dict(), "groups": on.layout.groups, "versions": VERSIONS, **mean}

    def load(self, checkpoint: Checkpoint) -> None:
        """See `SparseForge.restore`: weights, masks, curvature, counts and branches as they were saved."""
        on = self._on
        state = self._checked(checkpoint.client_state.get("sparseforge"), str(checkpoint.folder))
        self.started = state.get("started") is True
        self._compare_versions(state, str(checkpoint.folder))
        masks = self._masks_of(state)
        restore(on.layout, on.state, checkpoint, masks)
        on.step, on.refreshes = state["step"], state["refreshes"]
        self._mean.load_state_dict(state)
        on.state.frozen = masks != "none" and on.step >= on.config.resolved_schedule.freeze_step
        if masks == "frozen":
            on.state.read_kept_from_weights()
            on.check_frozen()
        on.health.forget_targets()
        for name, branch in branches(on.engine.module).items():
            branch.enabled = on.step >= on.config.branch_step and name in on.shards

    def _checked(self, state: object, where: str) -> dict[str, Any]:
        """A saved state, which is of a run like this one."""
        now = RunState.from_weights(self._on.config, list(self._on.weights.values()))
        saved, steps = RunState.parse(state, where), now.config.max_steps
        unlike = saved.changes(now)
        if unlike and not replace(saved, config=replace(saved.config, max_steps=steps)).changes(now):
            was = saved.config.max_steps
            raise ValueError(
                f"{where} is of a run of {was} steps, and this one has {steps}: masks are scheduled in fractions of "
                f"them. Give {was} again (max_steps of sf.SparseForge, or a Trainer's max_steps or epochs). Once masks "
                "are frozen, a loop of your own may make more steps than that, and a Trainer is given more"
            )
        if unlike:
            raise ValueError(
                f"{where} is of a run with other settings: {shorten(unlike)}; resume with the saved settings, or start "
                "a fresh run in another output_dir"
            )
        assert isinstance(state, dict)
        try:
            self._mean.check(state)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return state

    def _compare_versions(self, state: dict[str, Any], where: str) -> None:
        """Warn where other versions saved a checkpoint: the run goes on, and its last digits may be others."""
        saved = state.get("versions")
        unlike = differences(saved, VERSIONS, "version") if isinstance(saved, dict) else []
        if unlike and self._on.layout.rank == 0:
            _LOG.warning("%s was saved by other versions: %s", where, "; ".join(unlike))

    def _masks_of(self, state: dict[str, Any]) -> Masks:
        """How far masks were when a state was saved."""
        if not state["step"] and not (self.started and self._on.config.release_step == 0):
            return "none"
        return "frozen" if state["step"] >= self._on.config.release_step else "moving"
