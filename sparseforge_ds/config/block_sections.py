"""Objects of the `sparseforge` block beside `method`, like `curvature` and `distillation`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sparseforge_ds.config.strict import LARGEST, MOST, require

BlockStartMask = Literal["sparsegpt", "wanda", "magnitude"]
Importance = Literal["hutchinson", "fisher", "magnitude", "wanda", "sparsegpt"]

_SHARE_OF_RUN = 0.05
"""Share of a run's tokens that a block is trained on where `start.tokens` is not given."""
_FEWEST_TOKENS = 131_072
_MOST_TOKENS = 2_000_000
"""Bounds of that share. A run with fewer tokens gives all of them. Without a run it is the lower bound."""
_STEPS = 512
"""Adam steps of a block over all epochs, where `start.batch` is not given and its tokens suffice."""
_STEP_TOKENS = 16384
"""Most tokens of such a step."""


@dataclass(frozen=True)
class CurvatureConfig:
    """Estimate of the Hessian's diagonal, the curvature H of the score (eq. 2 and 3).

    docs/concepts/curvature.md compares the estimates.
    """

    decay: float = 0.9
    """Decay of the running mean per measurement, 0 <= decay < 1; the mean is bias-corrected as Adam's moments are."""
    source: Literal["training", "probe"] | None = None
    """Passes in which the curvature is measured. `training`: the passes of the last steps before a mask update, with
    the training loss and without extra cost; it needs method `sparseforge` with a soft mask, and `fisher` by row and
    column sums. `probe`: extra passes with the task loss. null: `training` where that is possible and the loss has a
    task part, since the KL of a student that still equals its teacher has no gradient; else `probe`."""
    sequences: int | None = None
    """Sequences of a probe batch over all ranks, a multiple of ranks times micro-batch; null: as many as in a step. If
    it is given, `source` null means `probe`, and `training` is refused."""
    probes: int = 1
    """Probe batches that are averaged in one measurement. With source `training`: steps before a mask update that are
    measured, each of them a measurement."""
    first_probes: int = 4
    """The same before the first mask update, which has no earlier measurement to average with."""
    damping: float = 1e-4
    """eps of the score (eq. 3), relative to the mean curvature of the matrix."""
    per_token: bool = True
    """Measure per token in linear layers, with far less noise. `hutchinson`: true draws one random sign for every
    token and output, false one for every weight, as the paper does. `fisher` squares the gradient of every token, and
    takes no false."""
    factored: bool | None = None
    """Replace each matrix's curvature in the score by the product of its row and column sums, in which noise averages
    away. null: as `per_token`. Wanda's always is that product, and takes no false."""
    radius: float | None = None
    """`hutchinson`: step of the gradient difference. With `per_token` it is relative to the RMS of a token's outputs,
    and null is 0.1. Without, it is relative to the RMS of the matrix, and null is 1e-3 in fp32, 1e-2 in fp16, 1e-1 in
    bf16."""

    def __post_init__(self) -> None:
        require(0 <= self.decay < 1, "curvature.decay", self.decay, "use 0 <= decay < 1")
        require(
            self.sequences is None or 1 <= self.sequences <= MOST,
            "curvature.sequences",
            self.sequences,
            f"use null or an integer >= 1, at most {MOST:,}",
        )
        require(self.probes >= 1, "curvature.probes", self.probes, "use an integer >= 1")
        require(self.first_probes >= 1, "curvature.first_probes", self.first_probes, "use an integer >= 1")
        require(self.damping >= 0, "curvature.damping", self.damping, "use a value >= 0")
        require(self.radius is None or self.radius > 0, "curvature.radius", self.radius, "use null or a value > 0")


@dataclass(frozen=True)
class LowRankConfig:
    """Low-rank branch beside every pruned layer, SLoRB: y = x (w^T + P^T B^T) (eq. 13).

    B is learned. P is a fixed sum over runs of `k` inputs, so that the rank is in/k, rounded up; or P is learned too.
    docs/concepts/low-rank.md has the details.
    """

    k: int = 16
    """Weights of the layer per number of the branch. With a fixed P it is the number of inputs that share a column of
    B; the last run is shorter where k does not divide the inputs, and the only one where k is more than all of them."""
    learned: bool = False
    """Train P too, which makes the branch a LoRA adapter. B and P together have as many numbers as B has with a fixed
    P: their rank is out * in / (k * (out + in)), rounded. `shift` is true then: before the first step, the low-rank
    part of the weights that leaves the pattern the least to remove is moved into the branch."""
    shift: bool | None = None
    """true: before the first step, one number of every run of k weights is moved into B, the one that leaves the
    pattern the least to remove, and the mask acts on the rest. The network computes the same as before, and the branch
    is on from the start. With a fixed P, k must be a multiple of the pattern's M. false: as published, B starts from
    the weights that the mask removes. null: true with `learned`, and for `sparseforge` and `naive_retrain`
    without `low_rank.start`; else false."""
    start: float | None = None
    """Moment at which a branch without `shift` is switched on, as a fraction of max_steps. B starts from the weights
    that the mask removes at that moment. null: when the mask freezes (`sparseforge`), or before the first step (other
    methods)."""

    def __post_init__(self) -> None:
        require(self.k >= 2, "low_rank.k", self.k, "use an integer >= 2")
        require(self.start is None or 0 <= self.start <= 1, "low_rank.start", self.start, "use null or 0 <= start <= 1")
        require(
            self.learned or not self.shift or self.start is None,
            "low_rank.start",
            self.start,
            'with "shift": true the branch is there from the first step; set it to null, or use "shift": false',
        )
        require(
            not self.learned or self.shift is not False,
            "low_rank.shift",
            self.shift,
            'a learned P starts from a part of the weights; set it to null, or use "learned": false',
        )
        require(
            not self.learned or self.start is None,
            "low_rank.start",
            self.start,
            'with "learned": true the branch is there from the first step; set it to null, or use "learned": false',
        )


@dataclass(frozen=True)
class HiddenConfig:
    """Distillation of hidden states, in addition to logits.

    The loss is the squared distance between the outputs of a student's and a teacher's layer, over the squared length
    of the teacher's, averaged over tokens and layers. docs/guides/closer.md says what it brings.
    """

    weight: float = 1.0
    """Weight of this loss in the sum."""
    every: int | None = 1
    """Distance between compared layers, counted from the last: 1 compares all, k every k-th, null the last alone. The
    teacher's states at these layers stay in memory until the backward pass of a micro-batch."""
    until: float | None = None
    """Fraction of max_steps at which the weight reaches 0, falling linearly, so that logits alone decide at the end;
    null: the weight stays."""

    def __post_init__(self) -> None:
        require(
            0 < self.weight <= LARGEST,
            "distillation.hidden.weight",
            self.weight,
            f'use a value > 0, at most {LARGEST:g}, or "hidden": null',
        )
        until = self.until
        require(until is None or 0 < until <= 1, "distillation.hidden.until", until, "use null or 0 < until <= 1")
        every = self.every
        require(every is None or every >= 1, "distillation.hidden.every", every, "use null or an integer >= 1")


@dataclass(frozen=True)
class DistillationConfig:
    """Distillation from the frozen dense teacher by forward KL (eq. 12).

    The defaults are the loss of AST (arXiv 2407.20584) and CAST (arXiv 2509.25996).
    """

    weight: float = 2 / 3
    """Weight of the KL divergence, l_KL."""
    task_weight: float = 1 / 3
    """Weight of the cross-entropy, l_task. Short runs want a smaller weight if the model was trained to saturation on
    the text, and a larger one if not (studies/notes.md)."""
    temperature: float = 2.0
    """Divisor of both logits; the KL is multiplied by its square."""
    hold: Literal["zero3", "replicated"] = "zero3"
    """Place of the teacher's weights: `zero3` partitions them over the ranks, `replicated` keeps all on every rank."""
    hidden: HiddenConfig | None = None
    """Distil hidden states too; null: logits alone. The teacher must have the student's width and depth."""

    def __post_init__(self) -> None:
        for name in ("weight", "task_weight"):
            value = getattr(self, name)
            require(0 <= value <= LARGEST, f"distillation.{name}", value, f"use a value >= 0, at most {LARGEST:g}")
        require(
            self.weight + self.task_weight > 0, "distillation.weight", self.weight, "one of the weights must be > 0"
        )
        lowest = 1 / LARGEST
        require(
            lowest <= self.temperature <= LARGEST,
            "distillation.temperature",
            self.temperature,
            f"use a value from {lowest:g} to {LARGEST:g}",
        )

    def at(self, progress: float) -> DistillationConfig:
        """Return the loss at the fraction `progress` of a run's steps, with weights that no longer change."""
        if self.hidden is None or self.hidden.until is None:
            return self
        weight = self.hidden.weight * max(0.0, 1 - progress / self.hidden.until)
        return replace(self, hidden=replace(self.hidden, weight=weight, until=None) if weight else None)


@dataclass(frozen=True)
class QuantizeConfig:
    """Quantization of the weights under a mask in training (eq. 14): the network sees Q(m_eff W).

    W itself stays in full precision and is trained by the gradient at Q(m_eff W), straight through. The grid is
    symmetric, so that pruned weights stay 0. docs/guides/quantization.md says what it costs.
    """

    bits: int = 4
    """Bits of a weight's code, 2 to 8."""
    group_size: int | None = 64
    """Kept weights of an output that share a scale of 16 bits: with 64, 128 inputs at 2:4. It must divide the kept
    inputs of every weight. null: one scale for all inputs of an output."""
    from_: Literal["freeze"] | float = "freeze"
    """Moment from which on the network sees quantized weights: `freeze`, when masks freeze, or a fraction of
    max_steps."""

    def __post_init__(self) -> None:
        require(2 <= self.bits <= 8, "quantize.bits", self.bits, "use 2 to 8")
        require(
            self.group_size is None or self.group_size >= 1,
            "quantize.group_size",
            self.group_size,
            "use null or an integer >= 1",
        )
        begin = self.from_
        is_share = not isinstance(begin, str) and 0 <= begin <= 1
        require(begin == "freeze" or is_share, "quantize.from", begin, 'use "freeze", or a fraction from 0 to 1')


@dataclass(frozen=True)
class BlockStartConfig:
    """Block-wise start, before the first step.

    Each decoder block gets its first masks, and its weights are trained to give the dense block's outputs, before the
    next block follows. In the first part of that training the masks are soft and move. docs/concepts/schedule.md
    describes it, and docs/guides/closer.md says what it brings.
    """

    mask: BlockStartMask | None = None
    """Rule that chooses a block's first masks. `sparsegpt`: SparseGPT on the inputs that the pruned model gives the
    block. `wanda` and `magnitude`. null: `sparsegpt`, but `wanda` for a model with fused experts and for patterns that
    are not n:m."""
    soft: float = 0.4
    """Share of a block's Adam steps in which its masks are soft: from the first masks on they follow the block's own
    error, and then freeze. 0, or a share of fewer than two steps, keeps the first masks."""
    tokens: int | None = None
    """Tokens that every block is trained on, the first of the run; null: 5% of the run's, but at least 131,072 (or all)
    and at most 2 million."""
    epochs: int = 4
    """Passes of every block over these tokens; 0 trains nothing, and keeps the first mask and SparseGPT's weights.
    Where a step is larger than `batch`, because all ranks read equally many sequences, `sparseforge train` and trainers
    make as many more passes as give no fewer steps."""
    rate: float = 0.02
    """Adam's learning rate, relative to the RMS of each matrix; it falls to 0 as a cosine. Norms, and biases of pruned
    layers, are trained too, at that of their block's matrices on average, and small gains at less."""
    batch: int | None = None
    """Sequences of an Adam step; null: as many as give 512 to 1,023 steps over all epochs, of at most 16,384 tokens."""
    damping: float = 0.01
    """`sparsegpt`: number added to the diagonal of X^T X, relative to its mean."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"start.{name}", value, "use null or an integer >= 1")
        require(self.epochs >= 0, "start.epochs", self.epochs, "use an integer >= 0")
        require(0 <= self.soft <= 1, "start.soft", self.soft, "use a fraction from 0 to 1")
        require(0 < self.rate < float("inf"), "start.rate", self.rate, "use a finite value > 0")
        require(self.damping > 0, "start.damping", self.damping, "use a value > 0")
        # Settings that nothing would read.
        for name in ("soft", "rate") if self.epochs == 0 else ():
            value = getattr(self, name)
            is_idle = value == getattr(type(self), name) or (name == "soft" and value == 0)
            require(is_idle, f"start.{name}", value, '"epochs": 0 trains nothing; leave one of the two out')
        reads_damping = self.mask in (None, "sparsegpt") or self.damping == type(self).damping
        require(reads_damping, "start.damping", self.damping, f'mask "{self.mask}" does not use it; leave it out')

    def tokens_of(self, run_tokens: int) -> int:
        """Return the tokens that a block is trained on, in a run of `run_tokens`; 0 means no run."""
        if self.tokens is not None:
            return self.tokens
        share = min(max(round(_SHARE_OF_RUN * run_tokens), _FEWEST_TOKENS), _MOST_TOKENS)
        return min(share, run_tokens) if run_tokens else _FEWEST_TOKENS

    def soft_steps(self, steps: int) -> int:
        """Return how many of a block's Adam steps have soft masks; 0, or at least the 2 that an update needs."""
        count = round(self.soft * steps)
        return count if count > 1 else 0

    def sequences_of_step(self, tokens: int, length: int) -> int:
        """Return the sequences of an Adam step.

        Args:
            tokens: tokens that a block is trained on.
            length: tokens of a sequence.
        """
        # No step has more sequences than there are.
        if self.batch is not None:
            return min(self.batch, max(1, -(-tokens // length)))
        # For the same tokens, more steps leave a block less error than larger ones.
        return max(1, min(tokens * max(1, self.epochs) // _STEPS, _STEP_TOKENS, tokens) // length)

    def passes(self, tokens: int, length: int, ranks: int) -> int:
        """Return the passes of every block over the tokens: `epochs`, or as many more as give one rank's steps.

        Every rank reads equally many sequences in a step. So a step of many ranks may be larger, and a pass has fewer.

        Args:
            tokens: tokens that a block is trained on.
            length: tokens of a sequence.
            ranks: ranks, or groups of ranks that share sequences.
        """
        sequences = -(-tokens // length)
        of_step = self.sequences_of_step(tokens, length)
        # Steps of one pass, on one rank and on `ranks`.
        steps_on_one_rank = -(-sequences // of_step)
        of_shared_step = -(-of_step // ranks) * ranks
        steps_on_ranks = max(1, -(-sequences // of_shared_step))
        return max(self.epochs, -(-self.epochs * steps_on_one_rank // steps_on_ranks))

    def micro_batches(self, tokens: int, length: int, ranks: int, largest: int) -> tuple[int, int]:
        """Return the sequences of a rank's micro-batch, and its micro-batches in an Adam step.

        All ranks together read the sequences of a step, rounded up where ranks or micro-batches do not divide them.

        Args:
            tokens: tokens that a block is trained on.
            length: tokens of a sequence.
            ranks: ranks, or groups of ranks that share sequences.
            largest: most sequences of a micro-batch.
        """
        of_rank = -(-self.sequences_of_step(tokens, length) // ranks)
        count = -(-of_rank // largest)
        return -(-of_rank // count), count


@dataclass(frozen=True)
class MonitorConfig:
    """Measurements for the log beyond the loss, each every so many optimizer steps; 0: never.

    docs/guides/watching.md shows them.
    """

    histograms_every: int = 0
    """Steps between histograms of mask and curvature, one per matrix; 0: none."""
    gap_every: int = 0
    """Steps between measurements of the soft-to-hard gap, the loss with the mask hardened now minus the loss as it is;
    0: none."""

    def __post_init__(self) -> None:
        for name in ("histograms_every", "gap_every"):
            require(getattr(self, name) >= 0, f"monitor.{name}", getattr(self, name), "use an integer >= 0")
