"""Identity of a run: its block, its pruned weights and its step, as checkpoints and `sparseforge.json` have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.pattern import Pattern

STATE_VERSION = 4
"""Version of the entry `sparseforge` in a checkpoint's client state."""
_FEW = 8
"""Most differences that a message lists."""


@dataclass(frozen=True)
class SparseWeight:
    """Weight that is in the pattern, or will be."""

    name: str
    """Name in `model.named_parameters()`."""
    shape: tuple[int, ...]
    """Full shape, also under ZeRO-3; (out, in), (in, out) or (experts, out, in)."""
    input_axis: int
    """Axis of the inputs: -1 if it is the last one, -2 if the last but one."""

    @classmethod
    def parse(cls, entry: object, pattern: Pattern, where: str) -> SparseWeight:
        """Check and parse a JSON object with name, shape and input_axis; other keys are ignored.

        Raises:
            ValueError: it is damaged, or the weight cannot have the pattern. The message begins with `where`.
        """
        fields = entry if isinstance(entry, dict) else {}
        name = fields.get("name")
        shape = fields.get("shape")
        axis = fields.get("input_axis")
        sizes = shape if isinstance(shape, (list, tuple)) and all(type(n) is int and n > 0 for n in shape) else ()
        if not isinstance(name, str) or len(sizes) < 2 or type(axis) is not int or axis not in (-1, -2):
            raise ValueError(f"{where} lists a damaged weight, {entry!r:.200}")
        if (why := pattern.misfit(tuple(sizes), axis)) is not None:
            raise ValueError(f"{where}: {name} cannot be {pattern}: {why}")
        return cls(name, tuple(sizes), axis)


@dataclass(frozen=True)
class RunState:
    """Settings, pruned weights and progress of a run."""

    config: SparseForgeConfig
    weights: tuple[SparseWeight, ...]
    step: int = 0
    """Optimizer steps that were applied."""
    refreshes: int = 0
    """Measurements of the curvature so far."""

    @classmethod
    def from_weights(
        cls, config: SparseForgeConfig, weights: Iterable[SparseWeight], step: int = 0, refreshes: int = 0
    ) -> RunState:
        """Describe a running forge by its config and weights."""
        listed = tuple(SparseWeight(weight.name, tuple(weight.shape), weight.input_axis) for weight in weights)
        return cls(config, listed, step, refreshes)

    @classmethod
    def parse(cls, state: object, where: str) -> RunState:
        """Check and parse the result of `to_dict`; other keys are ignored.

        Raises:
            ValueError: it is damaged or of another version. The message begins with `where`.
        """
        # 1. An object of this version, with values of the right types.
        if not isinstance(state, dict):
            raise ValueError(
                f"{where} was not saved by SparseForge: engine.save_checkpoint saves its state once sf.SparseForge is "
                "attached to the engine, which SparseForgeTrainer does and a plain Trainer does not"
            )
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"{where} has sparseforge state version {state.get('version')!r:.100}, this is {STATE_VERSION}: use "
                "the release that wrote it"
            )
        for key, kind in (("config", dict), ("weights", list), ("step", int), ("refreshes", int)):
            if type(state.get(key)) is not kind or (kind is int and state[key] < 0):
                raise ValueError(f"{where} has a sparseforge state with a damaged {key}: {state.get(key)!r:.100}")
        # 2. The block, and the weights under its pattern.
        try:
            config = SparseForgeConfig.from_dict(state["config"])
        except ValueError as error:
            raise ValueError(f"{where} has a sparseforge state with a damaged config: {str(error)[:300]}") from None
        weights = tuple(SparseWeight.parse(entry, config.parsed_pattern, where) for entry in state["weights"])
        if len({weight.name for weight in weights}) != len(weights):
            raise ValueError(f"{where} has a sparseforge state that lists a weight twice")
        return cls(config, weights, state["step"], state["refreshes"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        weights = [{**asdict(weight), "shape": list(weight.shape)} for weight in self.weights]
        numbers = {"step": self.step, "refreshes": self.refreshes}
        return {"version": STATE_VERSION, "config": self.config.to_dict(), "weights": weights, **numbers}

    def changes(self, now: RunState) -> list[str]:
        """Return the differences of this saved run from `now` as lines; empty for the same run, at any step.

        Settings that do not change the result may differ (`SparseForgeConfig.comparable`).
        """
        config = differences(self.config.comparable(), now.config.comparable(), "sparseforge")
        return config or differences(self._described(), now._described(), "weights")

    def _described(self) -> dict[str, Any]:
        return {weight.name: [list(weight.shape), weight.input_axis] for weight in self.weights}

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Raise ValueError if a weight is missing in `shapes`, or has another shape there."""
        for weight in self.weights:
            if (shape := shapes.get(weight.name)) != weight.shape:
                raise ValueError(
                    f"{where}: {weight.name} is {shape or 'missing'}, its sparseforge state says {weight.shape}"
                )


def differences(before: Any, now: Any, where: str) -> list[str]:
    """Return the values of two nested dicts that differ, as lines with dotted names below `where`."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(set(before) | set(now))
        return [line for key in keys for line in differences(before.get(key), now.get(key), f"{where}.{key}")]
    return [] if before == now else [f"{where} was {_as_json(before)}, is {_as_json(now)}"]


def _as_json(value: Any) -> str:
    """Return a value as JSON of at most 80 characters; one that is cut ends in dots."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def shorten(lines: Sequence[str]) -> str:
    """Join the first lines of many into one, and say how many more there are."""
    more = len(lines) - _FEW
    return "; ".join(lines[:_FEW]) + (f"; and {more:,} more" if more > 0 else "")
