"""Methods by name: the keys of each, the keys of the block that it starts from, and its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from typing_extensions import override

from sparseforge_ds.config.method_config import (
    REPORT_EVERY,
    MethodConfig,
    Ramp,
    require_key,
    require_ramp,
    require_updates,
)
from sparseforge_ds.config.soft_mask_config import SoftMaskConfig
from sparseforge_ds.mask.anneal import MaskSchedule

if TYPE_CHECKING:
    from sparseforge_ds.mask.pattern import Pattern

_CHOSEN: dict[str, Any] = {"importance": "magnitude", "curvature": {"first_probes": 16}}
"""Keys of the block that methods start from if they choose a mask before the first step."""
_CHOICE = ("importance", "curvature")
"""Keys of the block that such methods read."""


@dataclass(frozen=True)
class NaiveRetrainConfig(MethodConfig):
    """Plain retraining under the fixed mask of a one-shot rule, which `importance` names.

    Rules are magnitude, Wanda (arXiv 2306.11695), SparseGPT (arXiv 2301.00774) and curvatures. It has no other keys.
    """

    name: Literal["naive_retrain"] = "naive_retrain"
    starts_from: ClassVar[dict[str, Any]] = _CHOSEN
    reads: ClassVar[tuple[str, ...]] = (*_CHOICE, "start", "distillation", "low_rank")


@dataclass(frozen=True)
class RefreshedMaskConfig(MethodConfig):
    """Mask of the N largest |W| of every group, chosen anew while the weights are trained."""

    every: int = 10
    """Optimizer steps between two choices of the mask."""
    decay: float = 0.0
    """Strength lambda of the term lambda (1 - m) W, which is added to the gradient and draws masked weights to 0."""
    ramp: Ramp = (0.0, 0.0)
    """Fractions of max_steps between which the decay rises linearly from 0; [0, 0]: it is full from the
    start."""
    frozen: float = 0.0
    """Last fraction of the run in which the mask no longer changes."""
    starts_from: ClassVar[dict[str, Any]] = _CHOSEN
    reads: ClassVar[tuple[str, ...]] = (*_CHOICE, "distillation", "low_rank")

    def __post_init__(self) -> None:
        require_key(self, "every", self.every >= 1, "use an integer >= 1")
        require_key(self, "decay", self.decay >= 0, "use a value >= 0")
        require_ramp(self, "ramp")
        require_key(self, "frozen", 0 <= self.frozen < 1, "use 0 <= frozen < 1")

    @override
    def schedule(self, max_steps: int) -> MaskSchedule:
        """Return a schedule that measures masks every 10 steps or more, always when they have just been chosen."""
        return MaskSchedule(-(-REPORT_EVERY // self.every) * self.every, _frozen_from(self.frozen, max_steps))

    @override
    def check_length(self, max_steps: int) -> None:
        if max_steps:
            fixed = 'or use "method": "naive_retrain" for a fixed mask'
            schedule = self.schedule(max_steps)
            require_updates(max_steps, schedule, "every", self.every, self.every, 1 - self.frozen, fixed)


@dataclass(frozen=True)
class SrSteConfig(RefreshedMaskConfig):
    """SR-STE as published (arXiv 2102.04010, equation 9): lambda_W = 2e-4 from the first step to the last."""

    name: Literal["sr_ste"] = "sr_ste"
    every: int = 1
    decay: float = 2e-4
    starts_from: ClassVar[dict[str, Any]] = {**_CHOSEN, "distillation": None}


@dataclass(frozen=True)
class AstConfig(RefreshedMaskConfig):
    """AST as published for LLaMA-2-7B (arXiv 2407.20584, section 5 and its code); times are fractions of the run."""

    name: Literal["ast"] = "ast"
    decay: float = 6e-5
    ramp: Ramp = (0.0, 0.25)


@dataclass(frozen=True)
class CastConfig(RefreshedMaskConfig):
    """CAST (arXiv 2509.25996): `every`, `ramp` and `frozen` are as published, `decay` was not published."""

    name: Literal["cast"] = "cast"
    decay: float = 1e-4
    """Strength lambda of the L1 decay lambda (1 - m) sign(W) / (sqrt(v) + eps), which is multiplied by the learning
    rate."""
    ramp: Ramp = (0.0, 0.5)
    frozen: float = 0.1
    scaling: bool = True
    """Train one factor per output of every pruned layer, which is folded into the weights when the mask freezes."""
    reads: ClassVar[tuple[str, ...]] = (*_CHOICE, "distillation")

    @override
    def dense_until(self, max_steps: int) -> int:
        return self.schedule(max_steps).freeze_step


@dataclass(frozen=True)
class ElsaConfig(RefreshedMaskConfig):
    """ELSA (arXiv 2510.01650): ADMM on the loss of the whole model, with `every` and `decay` as its authors run it.

    The network sees dense weights until masks freeze. A sparse copy and a dual variable pull them to the pattern.
    """

    name: Literal["elsa"] = "elsa"
    every: int = 32
    """Optimizer steps between two projections, each of which makes the sparse copy and the dual variable anew."""
    decay: float = 0.01
    """Penalty lambda, the strength of the term lambda (W - z + u), which is added to the gradient."""
    starts_from: ClassVar[dict[str, Any]] = {**_CHOSEN, "distillation": None}
    reads: ClassVar[tuple[str, ...]] = (*_CHOICE, "distillation")

    def __post_init__(self) -> None:
        super().__post_init__()
        # The dual variable is scaled by lambda, so that it would mean something else at every step of a ramp.
        require_key(self, "ramp", self.ramp == (0.0, 0.0), "leave it out: lambda of ADMM is constant")

    @override
    def state_keys(self, pattern: Pattern) -> tuple[str, ...]:
        return ("split",)

    @override
    def dense_until(self, max_steps: int) -> int:
        return self.schedule(max_steps).freeze_step


@dataclass(frozen=True)
class PatConfig(RefreshedMaskConfig):
    """PAT with its N:M constraint (torchao, pytorch/ao#4381): every step cuts all but the N largest off what is seen.

    Beside the dense steps at first, it is SR-STE without the term that draws masked weights to 0.
    """

    name: Literal["pat"] = "pat"
    every: int = 1
    warmup: float = 0.0
    """First fraction of the run in which the network sees dense weights; the first step always does."""
    starts_from: ClassVar[dict[str, Any]] = {**_CHOSEN, "distillation": None}
    reads: ClassVar[tuple[str, ...]] = (*_CHOICE, "distillation")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_key(self, "warmup", 0 <= self.warmup < 1 - self.frozen, "use 0 <= warmup < 1 - frozen")

    @override
    def dense_until(self, max_steps: int) -> int:
        return min(round(self.warmup * max_steps) + 1, self.schedule(max_steps).freeze_step)


@dataclass(frozen=True)
class MaskLLMConfig(MethodConfig):
    """MaskLLM (arXiv 2409.17481, section 4.1): masks learned by Gumbel-softmax samples, with fixed weights.

    Each group has a categorical distribution over its patterns. Learning rate, betas and epsilon are those of the run's
    optimizer, which trains nothing else. The pattern is n:m with at most 1,000 choices a group: 4:8 has 70, 8:16 has
    12,870.
    """

    name: Literal["maskllm"] = "maskllm"
    scale: tuple[float, float] = (100.0, 500.0)
    """kappa, the factor of the logits before noise is added; linear from the first to the second value."""
    temperature: tuple[float, float] = (4.0, 0.05)
    """tau, the temperature of the softmax; linear from the first to the second value."""
    spread: float = 0.01
    """Standard deviation of the initial logits."""
    prior: float = 3.0
    """alpha, the bonus of a pattern per member that it shares with the starting mask, in standard deviations."""
    reward: float = 1e-5
    """Strength lambda of the regularizer -lambda sum (m W)^2, which falls linearly to 0."""
    frozen: float = 0.0
    """Last fraction of the run, in which every group has its likeliest pattern and nothing is trained."""
    starts_from: ClassVar[dict[str, Any]] = {**_CHOSEN, "distillation": None}
    reads: ClassVar[tuple[str, ...]] = (*_CHOICE, "distillation")

    def __post_init__(self) -> None:
        for key in ("scale", "temperature"):
            require_key(self, key, min(getattr(self, key)) > 0, "use values > 0")
        for key in ("spread", "prior", "reward"):
            require_key(self, key, getattr(self, key) >= 0, "use a value >= 0")
        require_key(self, "frozen", 0 <= self.frozen < 1, "use 0 <= frozen < 1")

    @override
    def schedule(self, max_steps: int) -> MaskSchedule:
        """Return a schedule that measures masks every 10 steps; they move in every step."""
        return MaskSchedule(REPORT_EVERY, _frozen_from(self.frozen, max_steps))

    @override
    def state_keys(self, pattern: Pattern) -> tuple[str, ...]:
        from sparseforge_ds.mask.pattern import NM

        assert isinstance(pattern, NM)
        return logit_keys(pattern.n, pattern.m)


Method = (
    SoftMaskConfig | NaiveRetrainConfig | SrSteConfig | AstConfig | CastConfig | ElsaConfig | PatConfig | MaskLLMConfig
)
METHODS: dict[str, type[MethodConfig]] = {kind.name: kind for kind in get_args(Method)}
"""Settings class of each method by its name; the first is the default."""


MOST_CHOICES = 1000
"""Most patterns of a group under maskllm: 2:4 has 6, 4:8 has 70. 6:12 has 924, whose states take a kilobyte a weight;
8:16 would take ten times as much, 16:32 more than any machine has."""


def logit_keys(n: int, m: int) -> tuple[str, ...]:
    """Return the names of maskllm's optimizer states: logits of a group's patterns, and their moments of Adam.

    Logits are laid out in planes over the members of a group: plane p holds the logit of pattern p m + j at member j.
    So logits are sharded as weights are.
    """
    planes = range(math.ceil(math.comb(m, n) / m))
    return tuple(f"{kind}_{plane}" for kind in ("logit", "logit_avg", "logit_sq") for plane in planes)


def _frozen_from(part: float, max_steps: int) -> int:
    """Return the step from which the last fraction `part` of a run is left; at least 1, unless the run is empty."""
    return min(max(round((1 - part) * max_steps), 1), max_steps)
