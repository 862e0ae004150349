"""The `sparseforge` block of a DeepSpeed JSON, as frozen dataclasses.

DeepSpeed's own keys belong to DeepSpeed, run flags (model, data, output) to `launch/train.py`; everything that changes
*which weights survive* is here. Parsing is strict: an unknown key, a wrong type or an impossible value is a ValueError
that names the key, the value and the cure.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparseforge_ds.mask.anneal import Schedule
from sparseforge_ds.mask.pattern import Pattern, parse_pattern
from sparseforge_ds.presets import PRESETS

Importance = Literal["hutchinson", "gauss_newton", "fisher", "magnitude", "wanda"]
Threshold = Literal["midpoint", "nth"]
Window = tuple[float, float]


@dataclass(frozen=True)
class ScheduleConfig:
    """Annealing, in fractions of `max_steps` wherever a time is meant, so that a preset fits every run length."""

    update_every: int = 5
    """Optimizer steps between two mask updates (T_update)."""
    temperature: float = 1.0
    """T0 of the soft gate (design eq. 5), in standard deviations of the score."""
    temperature_min: float = 0.05
    """Floor of the temperature."""
    temperature_decay: float | None = None
    """gamma per mask update; null: the value that reaches the floor when hardening ends."""
    blend: Window = (0.0, 0.1)
    """beta rises from 0 to 1 as a smooth step over this window (eq. 7)."""
    mid_penalty: float = 0.3
    """Final lambda_mid (eq. 8)."""
    mid_penalty_ramp: Window = (0.0, 0.1)
    """lambda_mid rises linearly over this window."""
    penalty_rate: float = 0.2
    """eta (eq. 8)."""
    mask_rate: float = 0.1
    """alpha (eq. 9): share of the gate that enters the mask at an update."""
    hardening: Window = (0.0, 0.3)
    """x falls from 1 to 0 over this window (eq. 10); at its end the mask is projected and frozen (eq. 11).
    (0, 0) fixes the mask before the first step: the trainer is then a plain fixed-mask retrain."""

    def __post_init__(self) -> None:
        _require(self.update_every >= 1, "schedule.update_every", self.update_every, "use an integer >= 1")
        _require(self.temperature_min > 0, "schedule.temperature_min", self.temperature_min, "use a value > 0")
        _require(
            self.temperature >= self.temperature_min,
            "schedule.temperature",
            self.temperature,
            f"use at least temperature_min = {self.temperature_min}",
        )
        decay = self.temperature_decay
        _require(decay is None or 0 < decay <= 1, "schedule.temperature_decay", decay, "use null or 0 < gamma <= 1")
        for name in ("blend", "mid_penalty_ramp", "hardening"):
            start, stop = getattr(self, name)
            _require(
                0 <= start <= stop <= 1, f"schedule.{name}", [start, stop], "use fractions 0 <= start <= stop <= 1"
            )
        for name in ("mid_penalty", "penalty_rate"):
            _require(getattr(self, name) >= 0, f"schedule.{name}", getattr(self, name), "use a value >= 0")
        _require(0 < self.mask_rate <= 1, "schedule.mask_rate", self.mask_rate, "use 0 < alpha <= 1")


@dataclass(frozen=True)
class CurvatureConfig:
    """How the diagonal of the Hessian is estimated (design eq. 2)."""

    decay: float = 0.9
    """EMA decay per refresh, bias-corrected."""
    probes: int = 1
    """Probe batches averaged in one refresh."""
    first_probes: int = 4
    """Probe batches of the very first refresh, which has no history to lean on."""
    damping: float = 1e-4
    """eps of the score, relative to the mean curvature of the matrix (eq. 3)."""
    per_token: bool = True
    """fisher and gauss_newton: square gradients per token where the weight belongs to a linear layer (far less noise);
    false squares the gradient of the whole probe batch."""
    radius: float | None = None
    """hutchinson: step of the gradient difference relative to the RMS of the matrix; null picks by dtype
    (fp32 1e-3, fp16 1e-2, bf16 1e-1)."""

    def __post_init__(self) -> None:
        _require(0 <= self.decay < 1, "curvature.decay", self.decay, "use 0 <= decay < 1")
        _require(self.probes >= 1, "curvature.probes", self.probes, "use an integer >= 1")
        _require(self.first_probes >= 1, "curvature.first_probes", self.first_probes, "use an integer >= 1")
        _require(self.damping >= 0, "curvature.damping", self.damping, "use a value >= 0")
        _require(self.radius is None or self.radius > 0, "curvature.radius", self.radius, "use null or a value > 0")


@dataclass(frozen=True)
class LowRankConfig:
    """SLoRB (design eq. 13): y = x (w^T + P^T B^T), P a fixed sum over runs of `k` inputs, B learned, rank in/k."""

    k: int = 16
    """Inputs that share one column of B; must divide the input axis of every prunable weight."""
    start: float | None = None
    """When the branch is switched on and B started from what the mask removes at that moment, as a fraction of
    max_steps; null: when the mask is frozen, and all that it removes is known."""

    def __post_init__(self) -> None:
        _require(self.k >= 2, "low_rank.k", self.k, "use an integer >= 2")
        _require(
            self.start is None or 0 <= self.start <= 1, "low_rank.start", self.start, "use null or 0 <= start <= 1"
        )


@dataclass(frozen=True)
class DistillationConfig:
    """Forward KL from the frozen dense teacher (design eq. 12)."""

    weight: float = 1.0
    """l_KL."""
    task_weight: float = 1.0
    """l_task, the weight of the cross-entropy."""
    temperature: float = 1.0
    """Both logits are divided by it and the KL is multiplied by its square."""
    hold: Literal["zero3", "replicated"] = "zero3"
    """Where the teacher lives: partitioned over the ranks by ZeRO-3 inference, or whole on every rank."""
    chunk_tokens: int = 1024
    """Tokens whose fp32 [tokens, vocabulary] log-probabilities exist at a time."""

    def __post_init__(self) -> None:
        _require(self.weight >= 0, "distillation.weight", self.weight, "use a value >= 0")
        _require(self.task_weight >= 0, "distillation.task_weight", self.task_weight, "use a value >= 0")
        _require(
            self.weight + self.task_weight > 0, "distillation.weight", self.weight, "one of the weights must be > 0"
        )
        _require(self.temperature > 0, "distillation.temperature", self.temperature, "use a value > 0")
        _require(self.chunk_tokens >= 1, "distillation.chunk_tokens", self.chunk_tokens, "use an integer >= 1")


@dataclass(frozen=True)
class MonitorConfig:
    """What is logged beyond the loss, and how often (in optimizer steps; 0 switches it off)."""

    histograms_every: int = 0
    """Per-matrix histograms of mask and curvature."""
    gap_every: int = 0
    """Soft-to-hard gap: the loss with the mask hardened now, minus the loss with the soft mask."""

    def __post_init__(self) -> None:
        for name in ("histograms_every", "gap_every"):
            _require(getattr(self, name) >= 0, f"monitor.{name}", getattr(self, name), "use an integer >= 0")


@dataclass(frozen=True)
class SparseForgeConfig:
    """Everything that decides which weights survive. The `sparseforge` block of the DeepSpeed JSON."""

    preset: str = "default"
    """Named starting point (see PRESETS); keys given beside it override it."""
    max_steps: int = 400
    """Optimizer steps of the whole run, the unit of every fraction below; the launcher's `--max_steps` wins."""
    pattern: str = "2:4"
    """n:m or block<size>[:density]."""
    importance: Importance = "fisher"
    """Which curvature the score uses."""
    threshold: Threshold = "midpoint"
    """tau of the soft gate: between the N-th and (N+1)-th score, or at the N-th as the paper writes it."""
    include: tuple[str, ...] = ()
    """Patterns of weight names (fnmatch); when given, only these are pruned."""
    exclude: tuple[str, ...] = ()
    """Patterns of weight names that stay dense."""
    allow_dense: tuple[str, ...] = ()
    """Patterns of names of linear weights that the family table does not know, and that may stay dense; the launcher's
    `--allow_dense` adds to them. Unlike `exclude` they never take a weight out of the pattern."""
    seed: int = 0
    """Seed of probes and of sampled labels."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    low_rank: LowRankConfig | None = None
    distillation: DistillationConfig | None = field(default_factory=DistillationConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        _require(self.preset in PRESETS, "preset", self.preset, f"use one of {', '.join(PRESETS)}")
        _require(self.max_steps >= 0, "max_steps", self.max_steps, "use an integer >= 0")
        parse_pattern(self.pattern)
        schedule = self.resolved_schedule
        _require(
            schedule.freeze_step == 0 or schedule.freeze_step > schedule.update_every,
            "schedule.update_every",
            schedule.update_every,
            f"hardening ends at step {schedule.freeze_step} of {self.max_steps}, before the first mask update; "
            "lower update_every, move hardening later, or use hardening [0, 0] for a fixed mask",
        )
        if self.low_rank is not None and self.low_rank.start is not None and schedule.freeze_step:
            _require(
                self.branch_step >= min(schedule.update_every, schedule.hardening[0] + 1),
                "low_rank.start",
                self.low_rank.start,
                f"at step {self.branch_step} no mask has removed anything yet; use null or a later start",
            )
        untouched = [
            key for key in PRESETS[self.preset] if getattr(self, key) == _default(key) != PRESETS[self.preset][key]
        ]
        if self.preset != "default" and len(untouched) == len(PRESETS[self.preset]):
            raise ValueError(
                f"SparseForgeConfig(preset={self.preset!r}) names a preset without applying it: "
                f'write SparseForgeConfig.from_dict({{"preset": "{self.preset}"}})'
            )

    @property
    def resolved_schedule(self) -> Schedule:
        """The schedule in optimizer steps: every fraction times `max_steps`, rounded."""

        def steps(window: Window) -> tuple[int, int]:
            return round(window[0] * self.max_steps), round(window[1] * self.max_steps)

        part = self.schedule
        return Schedule(
            update_every=part.update_every,
            temperature=part.temperature,
            temperature_min=part.temperature_min,
            temperature_decay=part.temperature_decay,
            blend=steps(part.blend),
            mid_penalty=part.mid_penalty,
            mid_penalty_ramp=steps(part.mid_penalty_ramp),
            penalty_rate=part.penalty_rate,
            mask_rate=part.mask_rate,
            hardening=steps(part.hardening),
        )

    @property
    def branch_step(self) -> int:
        """The optimizer step at whose end SLoRB's branches are switched on; -1 without them."""
        if self.low_rank is None:
            return -1
        if self.low_rank.start is None:
            return self.resolved_schedule.freeze_step
        return round(self.low_rank.start * self.max_steps)

    @property
    def parsed_pattern(self) -> Pattern:
        """The pattern as an object."""
        return parse_pattern(self.pattern)

    @classmethod
    def from_dict(cls, block: dict[str, Any]) -> SparseForgeConfig:
        """Build from a parsed `sparseforge` block, preset first, given keys over it."""
        preset = block.get("preset", "default")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"sparseforge.preset: unknown preset {preset!r}, use one of {', '.join(PRESETS)}")
        return typing.cast(SparseForgeConfig, _build(cls, _merge(PRESETS[preset], block), "sparseforge"))

    @classmethod
    def from_json(cls, path: str | Path, **overrides: Any) -> SparseForgeConfig:
        """Read the `sparseforge` block of a DeepSpeed JSON.

        Args:
            path: the file that is also given to `deepspeed.initialize`.
            **overrides: top-level keys that win over the file, for example `max_steps=1000`.

        Raises:
            ValueError: the file is missing, is not JSON, has no `sparseforge` block, or the block is wrong.
        """
        path = Path(path)
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(
                f"{path}: no such file; give the DeepSpeed JSON, for example ds_configs/zero3.json"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
            raise ValueError(f"{path}: not a readable JSON file ({error})") from None
        if not isinstance(content, dict) or not isinstance(content.get("sparseforge"), dict):
            raise ValueError(f'{path}: no "sparseforge" block; add "sparseforge": {{}} for the defaults')
        return cls.from_dict(_merge(content["sparseforge"], overrides))

    def allowing_dense(self, globs: Sequence[str]) -> SparseForgeConfig:
        """The same with more of `allow_dense`."""
        return dataclasses.replace(self, allow_dense=tuple(dict.fromkeys((*self.allow_dense, *globs))))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every value resolved; `from_dict` of it gives an equal config."""
        return typing.cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(self))))


def _default(key: str) -> Any:
    """What a top-level key is when nothing is said."""
    found = next(item for item in dataclasses.fields(SparseForgeConfig) if item.name == key)
    return found.default if found.default_factory is dataclasses.MISSING else found.default_factory()


def _require(condition: bool, key: str, value: object, cure: str) -> None:
    if not condition:
        raise ValueError(f"sparseforge.{key} = {json.dumps(value)} is not valid: {cure}")


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both_dicts = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_dicts else value
    return merged


def _build(kind: type, block: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    for key in block:
        if key not in hints:
            by_lower = {name.lower(): name for name in hints}
            near = by_lower[difflib.get_close_matches(key.lower(), by_lower, n=1, cutoff=0.0)[0]]
            raise ValueError(f"{where}.{key}: unknown key; did you mean {where}.{near}?")
    return kind(**{key: _convert(value, hints[key], f"{where}.{key}") for key, value in block.items()})


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return _convert(value, next(option for option in options if option is not type(None)), where)
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"{where} = {value!r}: expected an object with keys, like {{}}")
        return _build(typing.cast(type, hint), value, where)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{where} = {value!r} is not valid: use one of {', '.join(map(str, options))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} = {value!r}: expected a list")
        if Ellipsis in options:
            return tuple(_convert(item, options[0], f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(options):
            raise ValueError(f"{where} = {value!r}: expected {len(options)} values")
        return tuple(_convert(item, option, where) for item, option in zip(value, options, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} = {value!r}: expected a {hint.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} = {value!r}: expected a finite number")
    return value
