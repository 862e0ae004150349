"""The `sparseforge` block of a DeepSpeed JSON, as frozen dataclasses.

DeepSpeed's own keys belong to DeepSpeed, run flags (model, data, output) to `launch/train.py`; everything that changes
*which weights survive* is here. Parsing is strict: an unknown key, a wrong type or an impossible value is a ValueError
that names the key, the value and the cure.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparseforge_ds.config.json_file import read_json
from sparseforge_ds.config.method_rules import check_method, default_of
from sparseforge_ds.config.parts import (
    CurvatureConfig,
    DistillationConfig,
    Importance,
    LowRankConfig,
    MonitorConfig,
    PermuteConfig,
    ScheduleConfig,
    Threshold,
)
from sparseforge_ds.config.presets import METHODS, PRESETS
from sparseforge_ds.config.rules import (
    Method,
    ReconstructionConfig,
    RefreshConfig,
    SamplingConfig,
    logit_keys,
)
from sparseforge_ds.config.schedule import check_length, schedule_of
from sparseforge_ds.config.shipped import configuration_file
from sparseforge_ds.config.strict import build, merge, require
from sparseforge_ds.mask.anneal import Schedule
from sparseforge_ds.mask.pattern import NM, Pattern, parse_pattern


@dataclass(frozen=True)
class SparseForgeConfig:
    """Everything that decides which weights survive. The `sparseforge` block of the DeepSpeed JSON."""

    method: Method = "sparseforge"
    """Which rule forms the mask: ours, or one that it is compared with."""
    preset: str = "default"
    """Named starting point; keys given beside it override it."""
    max_steps: int = 400
    """Optimizer steps of the whole run, the unit of every fraction below; the launcher's `--max_steps` wins."""
    pattern: str = "2:4"
    """n:m, or block<size>[:density]: `block16` is tiles of 16 x 16 that keep half their entries."""
    importance: Importance = "fisher"
    """Which curvature the score uses; of other methods than `sparseforge`, what their starting mask goes by, which may
    also be `sparsegpt`."""
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
    permute: PermuteConfig | None = None
    low_rank: LowRankConfig | None = None
    distillation: DistillationConfig | None = field(default_factory=DistillationConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    refresh: RefreshConfig | None = None
    sampling: SamplingConfig | None = None
    reconstruction: ReconstructionConfig | None = None

    def __post_init__(self) -> None:
        require(self.preset in PRESETS, "preset", self.preset, f"use one of {', '.join(PRESETS)}")
        require(self.max_steps >= 0, "max_steps", self.max_steps, "use an integer >= 0")
        parse_pattern(self.pattern)
        check_method(self)
        schedule = self.resolved_schedule
        check_length(self, schedule)
        require(
            self.importance != "hutchinson" or not self.curvature.per_token or self.curvature.factored is not False,
            "curvature.factored",
            self.curvature.factored,
            'hutchinson with "per_token": true measures row and column sums only; use true, or "per_token": false',
        )
        require(
            not self.curvature.factored or self.factored,
            "curvature.factored",
            self.curvature.factored,
            f'importance "{self.importance}" has no curvature to take row and column sums of; leave it out, or use '
            'importance "fisher"',
        )
        require(
            self.curvature.source != "training" or self.can_listen,
            "curvature.source",
            self.curvature.source,
            "only sparseforge with a soft mask, importance fisher, per_token and row and column sums listens to the "
            'training step; leave it out, or use "probe"',
        )
        if self.permute is not None and not isinstance(self.parsed_pattern, NM):
            raise ValueError(
                f"sparseforge.permute: channels share groups in n:m patterns only, not in {self.pattern}; set permute "
                "to null"
            )
        if self.low_rank is not None and self.shifts:
            pattern = self.parsed_pattern
            require(
                isinstance(pattern, NM) and self.low_rank.k % pattern.members == 0,
                "low_rank.k",
                self.low_rank.k,
                f"shifted runs are whole groups of the pattern, here {pattern}; use a multiple of the m of an n:m "
                'pattern, or "shift": false',
            )
        soft = self.method == "sparseforge" and schedule.freeze_step
        if self.low_rank is not None and self.low_rank.start is not None and soft:
            require(
                self.branch_step >= min(schedule.update_every, schedule.hardening[0] + 1),
                "low_rank.start",
                self.low_rank.start,
                f"at step {self.branch_step} of {self.max_steps} no mask has removed anything yet; use null, a later "
                "start, or more steps",
            )
        untouched = [
            key
            for key in PRESETS[self.preset]
            if getattr(self, key) == default_of(type(self), key) != PRESETS[self.preset][key]
        ]
        if self.preset != "default" and len(untouched) == len(PRESETS[self.preset]):
            raise ValueError(
                f"SparseForgeConfig(preset={self.preset!r}) names a preset without applying it: "
                f'write SparseForgeConfig.from_dict({{"preset": "{self.preset}"}})'
            )

    @property
    def factored(self) -> bool:
        """Whether scores are made of row and column sums of the curvature."""
        chosen = self.curvature.per_token if self.curvature.factored is None else self.curvature.factored
        return self.keeps_curvature and self.importance != "wanda" and chosen

    @property
    def shifts(self) -> bool:
        """Whether SLoRB's branches take up a shift of the weights before the first step."""
        if self.low_rank is None:
            return False
        if self.low_rank.shift is None:
            return self.low_rank.start is None and self.method in ("sparseforge", "naive_retrain", "oneshot")
        return self.low_rank.shift

    @property
    def keeps_curvature(self) -> bool:
        """Whether scores need a curvature."""
        return self.importance not in ("magnitude", "sparsegpt")

    @property
    def keeps_sums(self) -> bool:
        """Whether what is measured and kept of the curvature are its row and column sums."""
        return self.keeps_curvature and self.factored and self.curvature.per_token

    @property
    def keeps_elements(self) -> bool:
        """Whether every weight has a curvature of its own beside it."""
        return self.keeps_curvature and not self.keeps_sums

    @property
    def listens(self) -> bool:
        """Whether the curvature is measured in the training step itself, without passes of its own."""
        if self.curvature.source is not None:
            return self.curvature.source == "training"
        silent = self.distillation is not None and self.distillation.task_weight == 0
        return self.can_listen and self.curvature.sequences is None and not silent

    @property
    def can_listen(self) -> bool:
        """Whether the training step says what masks are to be formed by."""
        soft = self.method == "sparseforge" and self.resolved_schedule.freeze_step > 0
        return soft and self.importance == "fisher" and self.keeps_sums

    def hears(self, step: int) -> bool:
        """Whether the curvature is measured in optimizer step `step` itself: one of those just before a mask update."""
        schedule = self.resolved_schedule
        update = -(-step // schedule.update_every) * schedule.update_every
        steps = self.curvature.first_probes if update == schedule.update_every else self.curvature.probes
        return self.listens and schedule.is_update(update) and update - step < steps

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Optimizer states, one fp32 number per prunable element each, beside `dense` and `mask`."""
        keys: tuple[str, ...] = ("curvature",) if self.keeps_elements else ()
        if self.method == "maskllm":
            assert isinstance(self.parsed_pattern, NM)
            keys += logit_keys(self.parsed_pattern.n, self.parsed_pattern.m)
        return keys

    @property
    def mask_storage(self) -> Literal["uint16", "bool", "float32"]:
        """How masks are kept while they move: in fixed point where they are soft, in 32 bits where they are sampled."""
        if self.method == "maskllm":
            return "float32"
        return "uint16" if self.method == "sparseforge" and self.resolved_schedule.freeze_step else "bool"

    @property
    def release_step(self) -> int:
        """The optimizer step at whose end masks are frozen for good, and one bit a weight is all that is kept."""
        return max(self.resolved_schedule.freeze_step, self.branch_step, 0)

    @property
    def resolved_schedule(self) -> Schedule:
        """The schedule in optimizer steps, see `schedule_of`."""
        return schedule_of(self)

    @property
    def branch_step(self) -> int:
        """The optimizer step at whose end SLoRB's branches are switched on; -1 without them."""
        if self.low_rank is None:
            return -1
        if self.shifts:
            return 0
        if self.low_rank.start is None:
            return self.resolved_schedule.freeze_step if self.method == "sparseforge" else 0
        return round(self.low_rank.start * self.max_steps)

    @property
    def parsed_pattern(self) -> Pattern:
        """The pattern as an object."""
        return parse_pattern(self.pattern)

    @classmethod
    def from_dict(cls, block: dict[str, Any]) -> SparseForgeConfig:
        """Build from a parsed `sparseforge` block: method first, then preset, then given keys."""
        method = block.get("method", "sparseforge")
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"sparseforge.method: unknown method {method!r}, use one of {', '.join(METHODS)}")
        preset = block.get("preset", "default")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"sparseforge.preset: unknown preset {preset!r}, use one of {', '.join(PRESETS)}")
        return typing.cast(
            SparseForgeConfig, build(cls, merge(merge(METHODS[method], PRESETS[preset]), block), "sparseforge")
        )

    @classmethod
    def from_json(cls, path: str | Path, **overrides: Any) -> SparseForgeConfig:
        """Read the `sparseforge` block of a DeepSpeed JSON.

        Args:
            path: the file that is also given to `deepspeed.initialize`, or the name of a shipped one, like `zero3`.
            **overrides: top-level keys that win over the file, for example `max_steps=1000`.

        Raises:
            ValueError: the file is missing, is not JSON, has no `sparseforge` block, or the block is wrong.
        """
        content = read_json(configuration_file(path), str(path))
        if not isinstance(content, dict) or not isinstance(content.get("sparseforge"), dict):
            raise ValueError(f'{path}: no "sparseforge" block; add "sparseforge": {{}} for the defaults')
        return cls.from_dict(merge(content["sparseforge"], overrides))

    def allowing_dense(self, globs: Sequence[str]) -> SparseForgeConfig:
        """The same with more of `allow_dense`."""
        return dataclasses.replace(self, allow_dense=tuple(dict.fromkeys((*self.allow_dense, *globs))))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every value resolved; `from_dict` of it gives an equal config."""
        return typing.cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(self))))

    def comparable(self) -> dict[str, Any]:
        """Of `to_dict`, what a resumed run must have as before: nothing monitored, and equal where the effect is."""
        config = self.to_dict()
        del config["monitor"]
        config["curvature"]["factored"] = self.factored
        config["curvature"]["source"] = "training" if self.listens else "probe"
        if self.low_rank is not None:
            config["low_rank"]["shift"] = self.shifts
        schedule = self.resolved_schedule
        config["schedule"]["straight_through"] &= schedule.freeze_step > 0
        config["schedule"]["update_every"] = schedule.update_every if schedule.freeze_step else None
        return config
