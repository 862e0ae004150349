"""The objects inside the `sparseforge` block that belong to methods, and which method uses which."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sparseforge_ds.config.parts import Window
from sparseforge_ds.config.strict import require

Method = Literal["sparseforge", "oneshot", "naive_retrain", "sr_ste", "ast", "cast", "maskllm"]

USES: dict[str, set[str]] = {
    "sparseforge": {"schedule", "threshold", "low_rank", "distillation"},
    "oneshot": {"low_rank", "reconstruction"},
    "naive_retrain": {"low_rank", "distillation", "reconstruction"},
    "sr_ste": {"refresh", "low_rank", "distillation", "reconstruction"},
    "ast": {"refresh", "low_rank", "distillation", "reconstruction"},
    "cast": {"refresh", "distillation", "reconstruction"},
    "maskllm": {"sampling", "distillation", "reconstruction"},
}
"""Keys of the block that not every method has a use for, by method."""
REPORT_EVERY = 10
"""Steps between two looks at masks that move in every step: a look waits for the device."""


@dataclass(frozen=True)
class RefreshConfig:
    """sr_ste, ast, cast: the mask is the N largest |W| of every group, chosen anew while training."""

    every: int = 10
    """Optimizer steps between two choices of the mask."""
    decay: float = 6e-5
    """What draws masked weights to 0. sr_ste and ast: lambda of lambda (1 - m) W, added to the gradient; cast: lambda
    of the L1 decay lambda (1 - m) sign(W) / (sqrt(v) + eps), in units of the gradient, times the learning rate."""
    ramp: Window = (0.0, 0.0)
    """The decay rises linearly from 0 over this window, in fractions of `max_steps`; (0, 0): whole from the start."""
    frozen: float = 0.0
    """Last part of the run, as a fraction, in which the mask stays."""
    scaling: bool = False
    """cast: train one factor per output of every pruned layer; it is folded into the weights when the mask freezes."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "refresh.every", self.every, "use an integer >= 1")
        require(self.decay >= 0, "refresh.decay", self.decay, "use a value >= 0")
        start, stop = self.ramp
        require(0 <= start <= stop <= 1, "refresh.ramp", [start, stop], "use fractions 0 <= start <= stop <= 1")
        require(0 <= self.frozen < 1, "refresh.frozen", self.frozen, "use 0 <= frozen < 1")


@dataclass(frozen=True)
class SamplingConfig:
    """maskllm: a categorical over the patterns of every group, learned through Gumbel-softmax samples.

    Learning rate, betas and epsilon are those of the run's optimizer, which has nothing else to do.
    """

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

    def __post_init__(self) -> None:
        for name in ("scale", "temperature"):
            ends = getattr(self, name)
            require(min(ends) > 0, f"sampling.{name}", list(ends), "use values > 0")
        for name in ("spread", "prior", "reward"):
            require(getattr(self, name) >= 0, f"sampling.{name}", getattr(self, name), "use a value >= 0")
        require(0 <= self.frozen < 1, "sampling.frozen", self.frozen, "use 0 <= frozen < 1")


@dataclass(frozen=True)
class ReconstructionConfig:
    """importance "sparsegpt": how the weights of a layer are chosen and updated (arXiv 2301.00774)."""

    damping: float = 0.01
    """Added to the diagonal of X^T X, relative to its mean."""
    block: int = 128
    """Columns whose errors are passed on at a time."""
    update_weights: bool = True
    """Whether kept weights make up for the pruned ones; false takes the mask alone."""

    def __post_init__(self) -> None:
        require(self.damping > 0, "reconstruction.damping", self.damping, "use a value > 0")
        require(self.block >= 1, "reconstruction.block", self.block, "use an integer >= 1")


def logit_keys(n: int, m: int) -> tuple[str, ...]:
    """Names of maskllm's states: logits of a group's patterns, laid out over its members, and Adam's moments of them.

    Plane p holds at member j the logit of pattern p m + j, so that whatever divides members divides logits.
    """
    planes = range(math.ceil(math.comb(m, n) / m))
    return tuple(f"{kind}_{plane}" for kind in ("logit", "logit_avg", "logit_sq") for plane in planes)
