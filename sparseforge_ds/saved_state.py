"""State of a forge in a checkpoint, beside the optimizer's, and a run that goes on from it."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from sparseforge_ds import __version__
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config.run_state import RunState, differences, shorten
from sparseforge_ds.curvature.running_curvature import RunningCurvature
from sparseforge_ds.model.branch import branches
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.restore import Masks, restore

_LOG = logging.getLogger(__name__)
VERSIONS = {"sparseforge_ds": __version__, "deepspeed": version("deepspeed"), "torch": version("torch")}
"""Versions of the packages on which the content of a checkpoint, and the next step, depend."""


class SavedState:
    """Saving and loading of a forge's state. Its methods are collective."""

    def __init__(self, weights: ShardedWeights, curvature: RunningCurvature) -> None:
        self._weights = weights
        self._curvature = curvature
        self.started = False
        """True if `forge.start` was called before the checkpoint that was loaded; unknown once a step was made."""
        self.loaded = False
        """True once a checkpoint was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of masks and curvature; see `SparseForge.state_dict`."""
        weights = self._weights
        run = RunState.from_weights(
            weights.config, list(weights.prunable.values()), weights.step, self._curvature.refreshes
        )
        curvature = self._curvature.state_dict()
        return {**run.to_dict(), "param_groups": weights.layout.param_group_names, "versions": VERSIONS, **curvature}

    def load(self, checkpoint: Checkpoint) -> None:
        """Load weights, masks, curvature, counts and branches as they were saved; see `SparseForge.restore`."""
        weights = self._weights
        state = self._checked(checkpoint.client_state.get("sparseforge"), str(checkpoint.folder))
        self.started = state.get("started") is True
        self._compare_versions(state, str(checkpoint.folder))
        masks = self._masks_of(state)
        restore(weights.layout, weights.state, checkpoint, masks)
        weights.step = state["step"]
        self._curvature.load_state_dict(state)
        weights.state.frozen = masks != "none" and weights.step >= weights.config.resolved_schedule.freeze_step
        if masks == "frozen":
            weights.check_frozen()
        weights.metrics.forget()
        for name, branch in branches(weights.engine.module).items():
            branch.enabled = weights.step >= weights.config.branch_step and name in weights.shards
        self.loaded = True

    def _checked(self, state: object, where: str) -> dict[str, Any]:
        """Return a saved state, after a check that it is of a run like this one."""
        current = RunState.from_weights(self._weights.config, list(self._weights.prunable.values()))
        saved = RunState.parse(state, where)
        # Another length alone has its own message: masks are scheduled in fractions of it.
        steps = current.config.max_steps
        unlike = saved.changes(current)
        if unlike and not replace(saved, config=replace(saved.config, max_steps=steps)).changes(current):
            before = saved.config.max_steps
            raise ValueError(
                f"{where} is of a run of {before} steps, and this one has {steps}: masks are scheduled in fractions of "
                f"them. Give {before} again (max_steps of sf.SparseForge, or a Trainer's max_steps or epochs). Once "
                "masks are frozen, a loop of your own may make more steps than that, and a Trainer is given more"
            )
        if unlike:
            raise ValueError(
                f"{where} is of a run with other settings: {shorten(unlike)}; resume with the saved settings, or start "
                "a fresh run in another output_dir"
            )
        # The running mean of the curvature must be of the same weights and estimator.
        assert isinstance(state, dict)
        try:
            self._curvature.check(state)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return state

    def _compare_versions(self, state: dict[str, Any], where: str) -> None:
        """Warn if other versions saved a checkpoint: the run goes on, but its last digits may differ."""
        saved = state.get("versions")
        unlike = differences(saved, VERSIONS, "version") if isinstance(saved, dict) else []
        if unlike and self._weights.layout.rank == 0:
            _LOG.warning("%s was saved by other versions: %s", where, "; ".join(unlike))

    def _masks_of(self, state: dict[str, Any]) -> Masks:
        """Return the phase that masks were in when a state was saved."""
        if not state["step"] and not (self.started and self._weights.config.release_step == 0):
            return "none"
        return "frozen" if state["step"] >= self._weights.config.release_step else "moving"
