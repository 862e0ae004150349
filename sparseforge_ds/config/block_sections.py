"""The objects inside the `sparseforge` block beside `method`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sparseforge_ds.config.strict import require

StartMask = Literal["sparsegpt", "annealed", "wanda", "magnitude"]
Importance = Literal["hutchinson", "gauss_newton", "fisher", "magnitude", "wanda", "sparsegpt"]

_SHARE_OF_RUN = 0.05
"""Share of a run's tokens that a block is trained on where `start.tokens` is not given."""
_FEWEST_TOKENS, _MOST_TOKENS = 131_072, 2_000_000
"""Bounds of that share. A run that has fewer tokens gives all of them, and without a run it is the fewest."""
_EPOCH_STEPS = 128
_STEP_TOKENS = (1024, 16384)
"""The least and the most tokens of an Adam step, where `start.batch` is not given."""
_LEAST_STEPS = 16


@dataclass(frozen=True)
class CurvatureConfig:
    """How the diagonal of the Hessian is estimated (design eq. 2)."""

    decay: float = 0.9
    """EMA decay per refresh, bias-corrected."""
    source: Literal["training", "probe"] | None = None
    """training: hooks measure the training loss in the passes of the last steps before a mask update, without extra
    passes (needs sparseforge with a soft mask, and fisher by row and column sums); probe: the task loss is measured in
    extra passes; null: training where that is possible and the loss has a task part, since the KL of a student that
    still equals its teacher has no gradient; else probe."""
    sequences: int | None = None
    """Sequences of a probe batch, over all ranks: a multiple of ranks times micro-batch; null: as many as in a step.
    Where it is given, source null is probe, and training is refused."""
    probes: int = 1
    """Probe batches averaged in one refresh; with source training: steps before a mask update that are measured, each
    of them a refresh."""
    first_probes: int = 4
    """The same before the first mask update, which has no earlier curvature to average with."""
    damping: float = 1e-4
    """eps of the score, relative to the mean curvature of the matrix (eq. 3)."""
    per_token: bool = True
    """fisher and gauss_newton: square gradients per token where the weight belongs to a linear layer (far less noise);
    false squares the gradient of the whole probe batch. hutchinson: one random sign for every token and output of a
    linear layer (far less noise); false draws one for every weight, as the paper does."""
    factored: bool | None = None
    """Score by the product of the row and column sums of each matrix's curvature, in which noise averages away,
    instead of by its elements; null: as `per_token`; true needs fisher, gauss_newton or hutchinson."""
    radius: float | None = None
    """hutchinson: step of the gradient difference; `per_token`: relative to the RMS of a token's outputs, null is 0.1;
    else relative to the RMS of the matrix, null picks by dtype (fp32 1e-3, fp16 1e-2, bf16 1e-1)."""

    def __post_init__(self) -> None:
        require(0 <= self.decay < 1, "curvature.decay", self.decay, "use 0 <= decay < 1")
        require(
            self.sequences is None or self.sequences >= 1,
            "curvature.sequences",
            self.sequences,
            "use null or an integer >= 1",
        )
        require(self.probes >= 1, "curvature.probes", self.probes, "use an integer >= 1")
        require(self.first_probes >= 1, "curvature.first_probes", self.first_probes, "use an integer >= 1")
        require(self.damping >= 0, "curvature.damping", self.damping, "use a value >= 0")
        require(self.radius is None or self.radius > 0, "curvature.radius", self.radius, "use null or a value > 0")


@dataclass(frozen=True)
class LowRankConfig:
    """SLoRB (design eq. 13): y = x (w^T + P^T B^T), P a fixed sum over runs of `k` inputs, B learned, rank
    in/k, rounded up; or P learned too."""

    k: int = 16
    """Weights for each number of the branch. With a fixed P that is the inputs that share one column of B; where it
    does not divide the inputs of a layer, the last ones are fewer."""
    learned: bool = False
    """Whether P is learned as B is, which makes the branch a LoRA adapter. B and P have as many numbers together as B
    has with a fixed P: their rank is out * in / (k * (out + in)), rounded. Before the first step the low-rank part of
    the weights that leaves the pattern the least to remove is moved into them (`shift`, which is true then)."""
    shift: bool | None = None
    """True: before the first step one number is moved from every run of k weights into its B, the one that leaves the
    pattern the least to remove, and the mask acts on the rest; the network computes the same as before, with the branch
    on from the start. Needs k to be a multiple of the pattern's M where P is fixed. False: as published, B starts from
    what the mask removes. Null: true for `sparseforge`, `naive_retrain` and `oneshot` without `start`, and with
    `learned`; else false."""
    start: float | None = None
    """Without `shift`: when the branch is switched on, with B made from what the mask removes at that moment, as a
    fraction of max_steps; null: when the mask is frozen (`sparseforge`), or before the first step (other methods)."""

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
    """Distillation of hidden states, beside that of logits: the squared distance between the outputs of a layer of the
    student and of the teacher, relative to the square of the teacher's, averaged over tokens and layers."""

    weight: float = 1.0
    """Weight of the mean distance in the loss."""
    every: int | None = 1
    """Layers that are compared: 1 is all of them, k every k-th, counted from the last; null is the last alone. The
    states of a micro-batch at these layers of the teacher are kept until its backward pass."""
    until: float | None = None
    """The weight falls in a straight line to 0 at this fraction of max_steps, so that hidden states show the way and
    logits have the last word; null: it stays as it is."""

    def __post_init__(self) -> None:
        require(self.weight > 0, "distillation.hidden.weight", self.weight, 'use a value > 0, or "hidden": null')
        until = self.until
        require(until is None or 0 < until <= 1, "distillation.hidden.until", until, "use null or 0 < until <= 1")
        every = self.every
        require(every is None or every >= 1, "distillation.hidden.every", every, "use null or an integer >= 1")


@dataclass(frozen=True)
class DistillationConfig:
    """Forward KL from the frozen dense teacher (design eq. 12). The defaults are the loss of AST (arXiv 2407.20584) and
    CAST (arXiv 2509.25996)."""

    weight: float = 2 / 3
    """l_KL."""
    task_weight: float = 1 / 3
    """l_task, the weight of the cross-entropy. A model that is trained to saturation on the text wants less of it in a
    short run, one that is not wants more (studies/notes.md)."""
    temperature: float = 2.0
    """Both logits are divided by it and the KL is multiplied by its square."""
    hold: Literal["zero3", "replicated"] = "zero3"
    """Where the teacher lives: partitioned over the ranks by ZeRO-3 inference, or whole on every rank."""
    hidden: HiddenConfig | None = None
    """Hidden states are distilled too; null: logits alone. Needs a teacher of the student's width and depth."""
    chunk_tokens: int = 1024
    """Tokens whose fp32 [tokens, vocabulary] log-probabilities exist at a time."""

    def __post_init__(self) -> None:
        require(self.weight >= 0, "distillation.weight", self.weight, "use a value >= 0")
        require(self.task_weight >= 0, "distillation.task_weight", self.task_weight, "use a value >= 0")
        require(
            self.weight + self.task_weight > 0, "distillation.weight", self.weight, "one of the weights must be > 0"
        )
        require(self.temperature > 0, "distillation.temperature", self.temperature, "use a value > 0")
        require(self.chunk_tokens >= 1, "distillation.chunk_tokens", self.chunk_tokens, "use an integer >= 1")

    def at(self, progress: float) -> DistillationConfig:
        """The loss when the fraction `progress` of a run's steps is made; no weight of it changes any more."""
        if self.hidden is None or self.hidden.until is None:
            return self
        weight = self.hidden.weight * max(0.0, 1 - progress / self.hidden.until)
        return replace(self, hidden=replace(self.hidden, weight=weight, until=None) if weight else None)


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


@dataclass(frozen=True)
class StartConfig:
    """A start that is trained block by block: a block gets its mask, and its kept weights are trained to give what the
    dense block gives, before the next block follows."""

    mask: StartMask | None = None
    """The source of a block's mask: SparseGPT on the inputs that the pruned model gives the block; soft masks
    annealed by the block's own error; Wanda; or magnitude. Null: sparsegpt, and annealed for fused experts, which
    sparsegpt cannot measure."""
    tokens: int | None = None
    """Tokens that every block is trained on, the first of the run's; null: 5% of the run's, at least 131,072 if it has
    so many, and at most 2 million."""
    epochs: int = 4
    """Times that a block is trained on these tokens; 0 leaves the first mask alone, with SparseGPT's weights."""
    rate: float = 0.02
    """Adam's rate, relative to the RMS of the block's pruned weights; it falls to 0 as a cosine."""
    batch: int | None = None
    """Sequences of an Adam step; null: as many as make 128 steps an epoch, within 1,024 to 16,384 tokens a step."""
    norms: bool = True
    """Train the norms of a block, and the biases of its pruned layers, too."""
    damping: float = 0.01
    """sparsegpt: added to the diagonal of X^T X, relative to its mean."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"start.{name}", value, "use null or an integer >= 1")
        require(self.epochs >= 0, "start.epochs", self.epochs, "use an integer >= 0")
        require(self.rate > 0, "start.rate", self.rate, "use a value > 0")
        require(self.damping > 0, "start.damping", self.damping, "use a value > 0")

    def tokens_of(self, run_tokens: int) -> int:
        """Return the tokens that a block is trained on, in a run of so many; 0 is no run."""
        if self.tokens is not None:
            return self.tokens
        share = min(max(round(_SHARE_OF_RUN * run_tokens), _FEWEST_TOKENS), _MOST_TOKENS)
        return min(share, run_tokens) if run_tokens else _FEWEST_TOKENS

    def sequences_of_step(self, tokens: int, length: int) -> int:
        """Return the sequences of an Adam step, of `length` tokens each, where a block is trained on `tokens`."""
        if self.batch is not None:
            return self.batch
        least, most = _STEP_TOKENS
        sequences = min(max(least, tokens // _EPOCH_STEPS), most) // length
        # A block makes some steps at least, however few its tokens are.
        return max(1, min(sequences, tokens * self.epochs // (_LEAST_STEPS * length) if self.epochs else sequences))


@dataclass(frozen=True)
class MonitorConfig:
    """What is logged beyond the loss, and how often (in optimizer steps; 0 switches it off)."""

    histograms_every: int = 0
    """Per-matrix histograms of mask and curvature."""
    gap_every: int = 0
    """Soft-to-hard gap: the loss with the mask hardened now, minus the loss with the soft mask."""

    def __post_init__(self) -> None:
        for name in ("histograms_every", "gap_every"):
            require(getattr(self, name) >= 0, f"monitor.{name}", getattr(self, name), "use an integer >= 0")
