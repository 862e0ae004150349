"""The methods: the keys of each, what the block around it starts from, and when its masks move and freeze."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from typing_extensions import override

from sparseforge_ds.config.strict import require
from sparseforge_ds.mask.anneal import MaskSchedule, Schedule, StepWindow

Window = tuple[float, float]
REPORT_EVERY = 10
"""Steps between two looks at masks that move in every step: a look waits for the device."""
_CHOSEN: dict[str, Any] = {"importance": "magnitude", "curvature": {"first_probes": 16}}
"""A mask is chosen before the first step."""
UPDATES = 15
"""Mask updates until the freeze by default, about: rates act once an update, so masks take the same course in runs of
any length."""


@dataclass(frozen=True)
class MethodConfig:
    """What all methods have."""

    name: str
    """Which rule forms the mask."""
    starts_from: ClassVar[dict[str, Any]] = {}
    """The block around the method, as published where it was; a preset and given keys override it."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Keys of the block that the method does not use: objects, and switches."""

    def schedule(self, max_steps: int) -> MaskSchedule:
        """When masks move and freeze: here never, and before the first step."""
        return MaskSchedule(REPORT_EVERY, 0)

    def check_length(self, max_steps: int) -> None:
        """Raise a ValueError where masks would be frozen before they move: the mask would be fixed all the time."""


@dataclass(frozen=True)
class SoftMaskConfig(MethodConfig):
    """SparseForge: soft masks by curvature, annealed until they are binary, projected and frozen.

    Times are fractions of `max_steps`, so that a preset fits every run length.
    """

    name: Literal["sparseforge"] = "sparseforge"
    threshold: Literal["midpoint", "nth"] = "midpoint"
    """tau of the soft gate: between the N-th and (N+1)-th score, or at the N-th as the paper writes it."""
    update_every: int | None = None
    """Optimizer steps between two mask updates (T_update); null: as many as give about 15 updates until masks freeze,
    in a run of any length, since `mask_rate` and `curvature.decay` act once an update."""
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
    hardening: Window = (0.0, 0.2)
    """x falls from 1 to 0 over this window (eq. 10); at its end the mask is projected and frozen (eq. 11).
    (0, 0) fixes the mask before the first step: the trainer is then a plain fixed-mask retrain."""
    straight_through: bool = False
    """While masks are soft, W moves by the optimizer's whole step, as the paper writes; false: by m_eff times it, so
    that weights on their way out do not wander off by gradients that change nothing."""
    hard: bool = False
    """For comparison: x = 0 from the first update on, so that the network only ever sees hard(m)."""

    def __post_init__(self) -> None:
        _require(
            self, "update_every", self.update_every is None or self.update_every >= 1, "use null or an integer >= 1"
        )
        _require(self, "temperature_min", self.temperature_min > 0, "use a value > 0")
        floor = self.temperature_min
        _require(self, "temperature", self.temperature >= floor, f"use at least temperature_min = {floor}")
        decay = self.temperature_decay
        _require(self, "temperature_decay", decay is None or 0 < decay <= 1, "use null or 0 < gamma <= 1")
        for key in ("blend", "mid_penalty_ramp", "hardening"):
            _require_window(self, key)
        for key in ("mid_penalty", "penalty_rate"):
            _require(self, key, getattr(self, key) >= 0, "use a value >= 0")
        _require(self, "mask_rate", 0 < self.mask_rate <= 1, "use 0 < alpha <= 1")

    @override
    def schedule(self, max_steps: int) -> Schedule:
        """Every fraction times `max_steps`, rounded; masks are frozen at step 2 at the earliest, so that short runs do
        what long ones do."""
        start, stop = _steps(self.hardening, max_steps)
        if self.hardening[1] > 0:  # A window that a short run rounds away still has room for one update.
            stop = min(max(stop, 2), max_steps)
        return Schedule(
            update_every=max(1, stop // UPDATES) if self.update_every is None else self.update_every,
            freeze_step=stop,
            temperature=self.temperature,
            temperature_min=self.temperature_min,
            temperature_decay=self.temperature_decay,
            blend=_steps(self.blend, max_steps),
            mid_penalty=self.mid_penalty,
            mid_penalty_ramp=_steps(self.mid_penalty_ramp, max_steps),
            penalty_rate=self.penalty_rate,
            mask_rate=self.mask_rate,
            hardening_start=min(start, stop),
            hard=self.hard,
        )

    @override
    def check_length(self, max_steps: int) -> None:
        schedule = self.schedule(max_steps)
        if schedule.freeze_step:
            every, fixed = schedule.update_every, "or use hardening [0, 0] for a fixed mask"
            _check_length(max_steps, schedule, "update_every", every, every + 1, self.hardening[1], fixed)


@dataclass(frozen=True)
class OneShotConfig(MethodConfig):
    """Magnitude, Wanda (arXiv 2306.11695) or SparseGPT (arXiv 2301.00774), without training. It has no other keys."""

    name: Literal["oneshot"] = "oneshot"
    starts_from: ClassVar[dict[str, Any]] = {**_CHOSEN, "max_steps": 0, "distillation": None}
    unused: ClassVar[tuple[str, ...]] = ("distillation",)

    @override
    def check_length(self, max_steps: int) -> None:
        require(max_steps == 0, "max_steps", max_steps, 'method "oneshot" trains nothing: set it to 0')


@dataclass(frozen=True)
class NaiveRetrainConfig(MethodConfig):
    """Plain retraining under the fixed mask of a one-shot method. It has no other keys."""

    name: Literal["naive_retrain"] = "naive_retrain"
    starts_from: ClassVar[dict[str, Any]] = _CHOSEN


@dataclass(frozen=True)
class RefreshedMaskConfig(MethodConfig):
    """The mask is the N largest |W| of every group, chosen anew while training."""

    every: int = 10
    """Optimizer steps between two choices of the mask."""
    decay: float = 0.0
    """What draws masked weights to 0: lambda of lambda (1 - m) W, added to the gradient."""
    ramp: Window = (0.0, 0.0)
    """The decay rises linearly from 0 over this window, in fractions of `max_steps`; (0, 0): whole from the start."""
    frozen: float = 0.0
    """Last part of the run, as a fraction, in which the mask stays."""

    def __post_init__(self) -> None:
        _require(self, "every", self.every >= 1, "use an integer >= 1")
        _require(self, "decay", self.decay >= 0, "use a value >= 0")
        _require_window(self, "ramp")
        _require(self, "frozen", 0 <= self.frozen < 1, "use 0 <= frozen < 1")

    @override
    def schedule(self, max_steps: int) -> MaskSchedule:
        """A look at the masks every 10 steps or more, at a choice of them."""
        return MaskSchedule(-(-REPORT_EVERY // self.every) * self.every, _frozen_from(self.frozen, max_steps))

    @override
    def check_length(self, max_steps: int) -> None:
        if max_steps:
            fixed = 'or use "method": "naive_retrain" for a fixed mask'
            schedule = self.schedule(max_steps)
            _check_length(max_steps, schedule, "every", self.every, self.every, 1 - self.frozen, fixed)


@dataclass(frozen=True)
class SrSteConfig(RefreshedMaskConfig):
    """SR-STE (arXiv 2102.04010, eq. 9 and section 4): lambda_W = 2e-4 from the first step to the last."""

    name: Literal["sr_ste"] = "sr_ste"
    every: int = 1
    decay: float = 2e-4
    starts_from: ClassVar[dict[str, Any]] = {**_CHOSEN, "distillation": None}


@dataclass(frozen=True)
class AstConfig(RefreshedMaskConfig):
    """AST: the published recipe for LLaMA-2-7B (arXiv 2407.20584, section 5 and its code), as fractions of the run."""

    name: Literal["ast"] = "ast"
    decay: float = 6e-5
    ramp: Window = (0.0, 0.25)
    starts_from: ClassVar[dict[str, Any]] = _CHOSEN
    unused: ClassVar[tuple[str, ...]] = ("cautious",)
    """It makes the steps of pruned weights itself."""


@dataclass(frozen=True)
class CastConfig(RefreshedMaskConfig):
    """CAST (arXiv 2509.25996): T1 = 10 and its parts are published, the size of the decay is not."""

    name: Literal["cast"] = "cast"
    decay: float = 1e-4
    """lambda of the L1 decay lambda (1 - m) sign(W) / (sqrt(v) + eps), in units of the gradient, times the learning
    rate."""
    ramp: Window = (0.0, 0.5)
    frozen: float = 0.1
    scaling: bool = True
    """Train one factor per output of every pruned layer; it is folded into the weights when the mask freezes."""
    starts_from: ClassVar[dict[str, Any]] = _CHOSEN
    unused: ClassVar[tuple[str, ...]] = ("low_rank",)


@dataclass(frozen=True)
class MaskLLMConfig(MethodConfig):
    """MaskLLM (arXiv 2409.17481, section 4.1): a categorical over the patterns of every group, learned through
    Gumbel-softmax samples.

    Learning rate, betas and epsilon are those of the run's optimizer, which has nothing else to do. n:m with at most
    1,000 patterns of a group: 4:8 has 70, 8:16 has 12,870.
    """

    name: Literal["maskllm"] = "maskllm"
    scale: Window = (100.0, 500.0)
    """kappa, by which logits are multiplied before the noise is added: linear from the first to the second value."""
    temperature: Window = (4.0, 0.05)
    """tau of the softmax: linear from the first to the second value."""
    spread: float = 0.01
    """Standard deviation of the first logits."""
    prior: float = 3.0
    """alpha: how many of these deviations a pattern gains per member that it shares with the starting mask."""
    reward: float = 1e-5
    """lambda of the regularizer -lambda sum (m W)^2, which falls linearly to 0."""
    frozen: float = 0.0
    """Last part of the run, as a fraction, in which the mask is the likeliest pattern and nothing is trained."""
    starts_from: ClassVar[dict[str, Any]] = {**_CHOSEN, "distillation": None}
    unused: ClassVar[tuple[str, ...]] = ("low_rank", "cautious")

    def __post_init__(self) -> None:
        for key in ("scale", "temperature"):
            _require(self, key, min(getattr(self, key)) > 0, "use values > 0")
        for key in ("spread", "prior", "reward"):
            _require(self, key, getattr(self, key) >= 0, "use a value >= 0")
        _require(self, "frozen", 0 <= self.frozen < 1, "use 0 <= frozen < 1")

    @override
    def schedule(self, max_steps: int) -> MaskSchedule:
        """The masks are looked at now and then."""
        return MaskSchedule(REPORT_EVERY, _frozen_from(self.frozen, max_steps))


Method = SoftMaskConfig | OneShotConfig | NaiveRetrainConfig | SrSteConfig | AstConfig | CastConfig | MaskLLMConfig
METHODS: dict[str, type[MethodConfig]] = {kind.name: kind for kind in get_args(Method)}
"""By name; the first is the default."""


MOST_CHOICES = 1000
"""Of a group under maskllm: 2:4 has 6, 4:8 has 70, 6:12 has 924, for which states take a kilobyte a weight; 8:16 would
take ten times as much, 16:32 more than any machine has."""


def logit_keys(n: int, m: int) -> tuple[str, ...]:
    """Names of maskllm's states: logits of a group's patterns, laid out over its members, and Adam's moments of
    them. Plane p holds at member j the logit of pattern p m + j, so that whatever divides members divides logits."""
    planes = range(math.ceil(math.comb(m, n) / m))
    return tuple(f"{kind}_{plane}" for kind in ("logit", "logit_avg", "logit_sq") for plane in planes)


def _steps(window: Window, max_steps: int) -> StepWindow:
    return round(window[0] * max_steps), round(window[1] * max_steps)


def _frozen_from(part: float, max_steps: int) -> int:
    """The step from which the last part of a run is left; at least 1."""
    return min(max(round((1 - part) * max_steps), 1), max_steps)


def _require(part: MethodConfig, key: str, condition: bool, cure: str) -> None:
    require(condition, f"method.{key}", getattr(part, key), cure)


def _require_window(part: MethodConfig, key: str) -> None:
    start, stop = getattr(part, key)
    _require(part, key, 0 <= start <= stop <= 1, "use fractions 0 <= start <= stop <= 1")


def _check_length(
    max_steps: int, schedule: MaskSchedule, key: str, every: int, needed: int, end: float, fixed: str
) -> None:
    """Raise where a window that ends at the fraction `end` ends before step `needed`."""
    if schedule.freeze_step >= needed:
        return
    fewest = needed if needed <= 2 else max(needed, int((needed - 1) / end))
    while needed > 2 and round(end * fewest) < needed:
        fewest += 1
    when = f"masks are frozen at step {schedule.freeze_step} of {max_steps}, before their first update"
    cure = f"use at least {fewest} steps, {fixed}"
    if every == 1:
        require(False, "max_steps", max_steps, f"{when}; {cure}")
    require(False, f"method.{key}", every, f"{when}; lower it, {cure}")
