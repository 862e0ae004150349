"""The `sparseforge` block of a DeepSpeed JSON, as frozen dataclasses.

Everything that changes *which weights survive* is here. DeepSpeed's own keys belong to DeepSpeed, and run flags (model,
data, output) to `launch/train.py`. Parsing is strict: an unknown key, a wrong type or an impossible value is a
ValueError that names the key, the value and the cure.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparseforge_ds.config.block_sections import (
    BlockStartConfig,
    CurvatureConfig,
    DistillationConfig,
    Importance,
    LowRankConfig,
    MonitorConfig,
    QuantizeConfig,
)
from sparseforge_ds.config.combinations import (
    check_branch_start,
    check_combinations,
    check_method,
    check_quantization_start,
    check_removes,
)
from sparseforge_ds.config.json_file import keys_of_autos, parse_json_file
from sparseforge_ds.config.method_config import MethodConfig
from sparseforge_ds.config.methods import METHODS, Method
from sparseforge_ds.config.presets import PRESETS
from sparseforge_ds.config.shipped import configuration_file
from sparseforge_ds.config.soft_mask_config import SoftMaskConfig
from sparseforge_ds.config.strict import MOST, build, key_of, merge, require
from sparseforge_ds.mask.anneal import MaskSchedule
from sparseforge_ds.mask.pattern import Pattern, parse_pattern

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SparseForgeConfig:
    """Settings that decide which weights survive: the `sparseforge` block of the DeepSpeed JSON."""

    method: Method = field(default_factory=SoftMaskConfig)
    """Rule that forms the mask, ours or one that ours is compared with: a name, or an object with `name` and the
    method's own keys. Without a name it is `sparseforge`."""
    max_steps: int = 400
    """Optimizer steps of the whole run, the unit of every fraction below. The launcher's `--max_steps` replaces it."""
    pattern: str = "2:4"
    """Pattern of the kept weights. n:m keeps n of every m consecutive inputs. `n:m pairs` keeps them in pairs of
    neighbours, as `4:8 pairs`. block<size>[:density] keeps a share of every square tile: `block16` keeps half the
    entries of 16 x 16."""
    importance: Importance = "fisher"
    """Curvature in the score of a weight (eq. 3). For other methods than `sparseforge` it is the rule that chooses
    their starting mask, which may also be `sparsegpt`."""
    include: tuple[str, ...] = ()
    """Patterns of weight names (fnmatch) that may be pruned; empty: all that the model's family lists."""
    exclude: tuple[str, ...] = ()
    """Patterns of weight names that stay dense; they win over `include`."""
    allow_dense: tuple[str, ...] = ()
    """Patterns of names of linear weights that the family table does not know and that may stay dense. The launcher's
    `--allow_dense` adds to them. Unlike `exclude` they never take a weight out of the pattern
    (docs/guides/families.md)."""
    seed: int = 0
    """Seed of probes, of samples of a mask, and of the order of a start's steps."""
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    """Estimate of the curvature H of the score (eqs. 2 and 3)."""
    low_rank: LowRankConfig | None = None
    """Low-rank branch beside every pruned layer (eq. 13); null: none."""
    distillation: DistillationConfig | None = field(default_factory=DistillationConfig)
    """Loss against the dense teacher (eq. 12); null: the task loss alone."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Measurements for the log beyond the loss."""
    quantize: QuantizeConfig | None = None
    """Quantization of the weights in training (eq. 14); null: none."""
    start: BlockStartConfig | None = None
    """Choose masks block by block before the first step, and train masks and weights of each block; null: do not.
    `naive_retrain` keeps these masks. In `sparseforge` what they prune begins at 0 and can come back while
    masks move; with `method.hardening` [0, 0] it keeps them, too. `start.mask` chooses the first ones."""

    def __post_init__(self) -> None:
        require(0 <= self.max_steps <= MOST, "max_steps", self.max_steps, f"use an integer >= 0, at most {MOST:,}")
        require(0 <= self.seed < 2**32, "seed", self.seed, "use 0 <= seed < 2^32")
        if not isinstance(self.method, MethodConfig):
            raise ValueError(
                f"SparseForgeConfig(method={self.method!r}) names a method without its settings: write "
                f'SparseForgeConfig.from_dict({{"method": "{self.method}"}})'
            )
        check_method(self)
        check_combinations(self)

    def check_length(self) -> None:
        """Check that a run of `max_steps` prunes, and is long enough.

        This is not checked when a block is read: a run may learn its length later, from epochs, and a model is verified
        by the pattern alone.

        Raises:
            ValueError: the pattern keeps everything, masks would be frozen before they move, branches come before
                masks have removed anything, or no step would train quantized weights.
        """
        check_removes(self)
        self.method.check_length(self.max_steps)
        check_branch_start(self)
        check_quantization_start(self)

    @property
    def soft(self) -> SoftMaskConfig | None:
        """Return the method if its masks are soft at first: `sparseforge`, unless they freeze before the first step."""
        return self.method if self.method.name == "sparseforge" and self.resolved_schedule.freeze_step else None

    @property
    def factored(self) -> bool:
        """Return True if scores use the product of the curvature's row and column sums."""
        chosen = self.curvature.per_token if self.curvature.factored is None else self.curvature.factored
        return self.keeps_curvature and (self.importance == "wanda" or chosen)

    @property
    def moves_weights_into_branches(self) -> bool:
        """Return True if a part of the weights is moved into low-rank branches before the first step."""
        low_rank = self.low_rank
        if low_rank is None or low_rank.shift is not None or low_rank.learned:
            return low_rank is not None and low_rank.shift is not False
        return low_rank.start is None and self.method.name in ("sparseforge", "naive_retrain")

    @property
    def added_to_layers(self) -> str | None:
        """Return what a run adds to pruned layers and transformers would leave out, in words; None for nothing."""
        return describe_additions(self.low_rank is not None, self.method.name == "cast" and self.method.scaling)

    @property
    def keeps_curvature(self) -> bool:
        """Return True if scores need a curvature."""
        chosen_by_start = self.start is not None and self.soft is None
        return not chosen_by_start and self.importance not in ("magnitude", "sparsegpt")

    @property
    def starts_by_block(self) -> bool:
        """Return True if the starting mask is chosen one decoder block after another, on calibration text."""
        return self.start is not None or self.importance == "sparsegpt"

    @property
    def keeps_sums(self) -> bool:
        """Return True if row and column sums of the curvature are measured and kept, and no elements."""
        return self.factored and (self.importance == "wanda" or self.curvature.per_token)

    @property
    def keeps_elements(self) -> bool:
        """Return True if every weight has a curvature of its own in the optimizer's state."""
        return self.keeps_curvature and not self.keeps_sums

    @property
    def from_training_step(self) -> bool:
        """Return True if the curvature is measured in training steps, without passes of its own."""
        if self.curvature.source is not None:
            return self.curvature.source == "training"
        has_task_loss = self.distillation is None or self.distillation.task_weight != 0
        return self.can_use_training_step and self.curvature.sequences is None and has_task_loss

    @property
    def can_use_training_step(self) -> bool:
        """Return True if the curvature can be measured in training steps."""
        return self.soft is not None and self.importance == "fisher" and self.keeps_sums

    def measures_in_step(self, step: int) -> bool:
        """Return True if the curvature is measured in training step `step`, one of the last before a mask update."""
        schedule = self.resolved_schedule
        update = -(-step // schedule.update_every) * schedule.update_every
        steps = self.curvature.first_probes if update == schedule.update_every else self.curvature.probes
        return self.from_training_step and schedule.is_update(update) and update - step < steps

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Return the names of further optimizer states beside `dense` and `mask`, each one fp32 number per element."""
        keys: tuple[str, ...] = ("curvature",) if self.keeps_elements else ()
        return keys + self.method.state_keys(self.parsed_pattern)

    @property
    def block_start(self) -> BlockStartConfig | None:
        """Return the settings of a block-wise start; None where there is none.

        SparseGPT's mask alone is a start whose blocks are not trained.
        """
        if self.start is None and self.importance == "sparsegpt":
            return BlockStartConfig(mask="sparsegpt", epochs=0)
        return self.start

    @property
    def mask_storage(self) -> Literal["uint16", "bool", "float32"]:
        """Return the dtype of masks while they move: fixed point if they are soft, 32 bits if they are sampled."""
        if self.method.name == "maskllm":
            return "float32"
        return "bool" if self.soft is None else "uint16"

    @property
    def release_step(self) -> int:
        """Return the step of the release: masks are frozen, and branches have started from what masks remove."""
        return max(self.resolved_schedule.freeze_step, self.branch_step, 0)

    @property
    def quantize_step(self) -> int:
        """Return the step from which on published weights are quantized, if they are at all."""
        assert self.quantize is not None
        begin = self.quantize.from_
        return self.resolved_schedule.freeze_step if begin == "freeze" else round(begin * self.max_steps)

    def is_exact(self, step: int) -> bool:
        """Return True if the network that is trained after step `step` computes what an export of it does.

        It does not while it sees dense weights, a soft mask, or weights that its export quantizes and it does not.
        """
        is_masked = self.mask_storage == "bool" and step >= self.method.dense_until(self.max_steps)
        is_final = step >= self.release_step or is_masked
        return is_final and self.is_quantized(step) == self.is_quantized(step, hard=True)

    def is_comparable(self, step: int) -> bool:
        """Return True if a score after step `step` can be compared with that of the finished model."""
        return self.is_exact(step) and (self.quantize is None or self.is_quantized(step))

    def is_quantized(self, step: int, hard: bool = False) -> bool:
        """Return True if weights published after step `step` are quantized; `hard` is as if masks froze then."""
        if self.quantize is None:
            return False
        return step >= self.quantize_step or (hard and self.quantize.from_ == "freeze")

    @property
    def resolved_schedule(self) -> MaskSchedule:
        """Return the steps at which masks move and freeze; for `sparseforge` a `Schedule` with all annealed numbers."""
        return self.method.schedule(self.max_steps)

    @property
    def branch_step(self) -> int:
        """Return the step after which low-rank branches are switched on; -1 without branches."""
        if self.low_rank is None:
            return -1
        if self.moves_weights_into_branches:
            return 0
        if self.low_rank.start is None:
            return self.resolved_schedule.freeze_step if self.method.name == "sparseforge" else 0
        return round(self.low_rank.start * self.max_steps)

    @property
    def parsed_pattern(self) -> Pattern:
        """Return the pattern as an object."""
        return parse_pattern(self.pattern)

    @classmethod
    def from_dict(cls, block: dict[str, Any]) -> SparseForgeConfig:
        """Build from a parsed `sparseforge` block.

        The method has keys that it starts from. The preset overrides them, and the block overrides both.

        Raises:
            ValueError: a key, type, value or combination is wrong.
        """
        preset = block.get("preset", "default")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"sparseforge.preset: unknown preset {preset!r}, use one of {', '.join(PRESETS)}")
        preset_keys = PRESETS[preset]
        name = method_name(block if "method" in block else preset_keys)
        if name != method_name(preset_keys) and "method" in preset_keys:
            raise ValueError(
                f'sparseforge.preset = "{preset}" sets keys of method "{method_name(preset_keys)}", not of "{name}"; '
                "leave one of the two out"
            )
        own_keys = {key: value for key, value in block.items() if key != "preset"}
        if isinstance(own_keys.get("method"), str):
            own_keys["method"] = {"name": name}
        kind = METHODS.get(name, SoftMaskConfig)  # `build` refuses an unknown name
        merged = merge(merge(kind.starts_from, preset_keys), own_keys)
        return typing.cast(SparseForgeConfig, build(cls, merged, "sparseforge"))

    @classmethod
    def from_json(cls, path: str | Path, **overrides: Any) -> SparseForgeConfig:
        """Read the `sparseforge` block of a DeepSpeed JSON; warn of "auto", which `deepspeed.initialize` cannot read.

        Args:
            path: the file that is also given to `deepspeed.initialize`, or the name of a shipped one, like `zero3`.
            **overrides: top-level keys that win over the file, for example `max_steps=1000`.

        Raises:
            ValueError: the file is missing, is not JSON, has no `sparseforge` block, or the block is wrong.
        """
        content = parse_json_file(configuration_file(path), str(path))
        if not isinstance(content, dict) or not isinstance(content.get("sparseforge"), dict):
            raise ValueError(f'{path}: no "sparseforge" block; add "sparseforge": {{}} for the defaults')
        autos = keys_of_autos({key: value for key, value in content.items() if key != "sparseforge"})
        if autos and os.environ.get("RANK", "0") == "0":
            _LOG.warning(
                '%s: "auto" in %s; the launcher, Trainer and accelerate fill it in, deepspeed.initialize does not: '
                "write numbers for a loop of your own",
                path,
                ", ".join(autos),
            )
        return cls.from_dict(merge(content["sparseforge"], overrides))

    def allowing_dense(self, globs: Sequence[str]) -> SparseForgeConfig:
        """Return a config with more patterns in `allow_dense`."""
        return dataclasses.replace(self, allow_dense=tuple(dict.fromkeys((*self.allow_dense, *globs))))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types with every value resolved; `from_dict` gives an equal config."""
        fields = dataclasses.asdict(self, dict_factory=lambda items: {key_of(name): value for name, value in items})
        return typing.cast(dict[str, Any], json.loads(json.dumps(fields)))

    def comparable(self) -> dict[str, Any]:
        """Return the part of `to_dict` that a resumed run must not change; values of equal effect are written alike."""
        config = self.to_dict()
        del config["monitor"], config["allow_dense"]
        if self.distillation is not None:
            del config["distillation"]["hold"]
        config["curvature"]["factored"] = self.factored
        config["curvature"]["source"] = "training" if self.from_training_step else "probe"
        if self.low_rank is not None:
            config["low_rank"]["shift"] = self.moves_weights_into_branches
        if self.method.name == "sparseforge":
            config["method"]["straight_through"] &= self.soft is not None
            config["method"]["update_every"] = None if self.soft is None else self.resolved_schedule.update_every
        return config


def describe_additions(has_branches: bool, has_factors: bool) -> str | None:
    """Return the names of the parts that a layer has beside its weight, for messages; None for no such part."""
    branches = ["low-rank branches (sparseforge.low_rank)"] if has_branches else []
    factors = ["factors of outputs (sparseforge.method.scaling)"] if has_factors else []
    return " and ".join(branches + factors) or None


def method_name(block: dict[str, Any]) -> str:
    """Return the name of the method of a parsed `sparseforge` block."""
    method = block.get("method", {})
    return str(method.get("name", "sparseforge") if isinstance(method, dict) else getattr(method, "name", method))
