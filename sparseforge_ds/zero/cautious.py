"""Cautious steps: a weight that an optimizer moves against its gradient stays (C-AdamW, arXiv 2411.16085, Algorithm 2).

Momentum carries some weights up the gradient of the batch at hand. The paper also divides the step by the share of
weights that may move, of each tensor. That share is left to the learning rate here: it would take a sum over all ranks
at every step, and it changes little from step to step.
"""

from __future__ import annotations

from torch import Tensor

from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.fusing import fused


def hold_back(weights: Tensor, before: Tensor, gradient: Tensor) -> None:
    """Undo a step in place wherever it did not go down the gradient.

    Args:
        weights: (...) after the step.
        before: (...) before it, of the same dtype.
        gradient: (...) that the step was made with, of any dtype.
    """
    flat, of_before, of_gradient = weights.view(-1), before.view(-1), gradient.view(-1)
    for chunk in chunks(flat, in_place=True):
        _hold_back(flat[chunk], of_before[chunk], of_gradient[chunk])


@fused(writes=("weights",))
def _hold_back(weights: Tensor, before: Tensor, gradient: Tensor) -> None:
    # Signs are compared, since the product of a small step and a small gradient rounds to 0.
    down = ((weights < before) & (gradient > 0)) | ((weights > before) & (gradient < 0))
    weights.copy_(weights.where(down, before))
