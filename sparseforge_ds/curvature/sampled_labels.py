"""Labels drawn from the model itself, for the Gauss-Newton estimate (Sophia's estimator, arXiv 2305.14342)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparseforge_ds.curvature.context import EstimatorContext
from sparseforge_ds.mask.curvature import sample_labels
from sparseforge_ds.mask.random_numbers import counter_key
from sparseforge_ds.zero.layer_hooks import captured_logits
from sparseforge_ds.zero.probe import Closure, ProbeBatches, divisor_of, predicted_of

_CHUNK = 1024
"""Rows whose fp32 logits and probabilities exist at a time."""


class SampledLabels:
    """Turns passes into passes whose loss is the cross-entropy of labels that the model draws.

    The logits are those that the model returns: behind a softcap or a scale that follows its head.
    """

    def __init__(self, context: EstimatorContext, seed: int) -> None:
        self.context = context
        self.seed = seed

    def drawn(self, batches: ProbeBatches, step: int, probe: int) -> list[Closure]:
        """The passes of a probe, with the draw of that step and probe, for the tokens that are trained on."""
        key, divisor = counter_key(self.seed, step, probe, "labels"), divisor_of(batches, probe)
        each = zip(batches.passes(probe), predicted_of(batches, probe), strict=True)
        return [self._drawn(closure, key, number, own, divisor) for number, (closure, own) in enumerate(each)]

    def _drawn(
        self, closure: Closure, key: int, number: int, predicted: Tensor | None, divisor: float | None
    ) -> Closure:
        def sampled() -> Tensor:
            with captured_logits(self.context.layout.engine.module) as returned:
                closure()
            logits = returned[-1].flatten(0, -2)
            # By the place in the batch, so that the draw does not depend on how a batch is divided.
            tokens = self.context.tokens_of(number, logits.shape[0])
            runs = zip(logits.split([len(run) for run in tokens]), tokens, strict=True)
            labels = torch.cat([sample_labels(logits_NV, key, run.start, _CHUNK) for logits_NV, run in runs])
            if predicted is not None:
                labels = torch.where(predicted < 0, predicted, labels)  # -100 stays
            sums = [
                checkpoint(_cross_entropy, *chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in zip(logits.split(_CHUNK), labels.split(_CHUNK), strict=True)
            ]
            return torch.stack(sums).sum() / (divisor or logits.shape[0])

        return sampled


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over the rows; its fp32 logits are formed again in the backward pass."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")
