"""Hooks that zero gradients of frozen pruned weights before DeepSpeed takes the norm that it clips by, and logs.

DeepSpeed takes that norm before it calls the inner optimizer, where masking would be too late. Under ZeRO each rank
then holds its averaged gradients, laid out like its master partitions, and they are masked once a step. With offload
the norm is added up during backward, and at stage 0 every rank holds full gradients: there a hook on each weight zeroes
its gradient as it arises. The published weight shows the mask: +0.0 is pruned (`mask.effective_mask.is_kept`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from sparseforge_ds.mask.kernels.publication import gradient_of_kept
from sparseforge_ds.zero.state import ShardState


def mask_before_norm(state: ShardState, names: Iterable[str]) -> bool:
    """Attach hooks to the engine, for as long as it lives, and return whether gradients reach the optimizer masked.

    Nothing is attached without clipping, if DeepSpeed leaves no moment between averaging and the norm. The optimizer's
    pre hook masks gradients then, and the logged norm counts those of pruned weights too. With hooks on weights, a kept
    weight that is published as +0.0 (in fp16 one below 3e-8) gets no gradient in that pass.

    Args:
        state: state of the prunable weights; until it is frozen, gradients stay as they are.
        names: names of the prunable weights.
    """
    layout = state.layout
    flats = set(state.flats)

    def mask(index: int, offset: int, gradient: Tensor) -> None:
        if state.frozen and index in flats:
            state.zero_pruned(index, gradient, offset)

    # A moment between averaging and the norm is best: a step of a rank masks each gradient once.
    if layout.before_norm(mask):
        return True
    if not layout.engine.gradient_clipping():
        return False
    # Else gradients are masked as they arise, in every micro-batch.
    for name in names:
        weight: Any = layout.low_precision[name]

        def keep(gradient: Tensor, weight: Any = weight, name: str = name) -> Tensor | None:
            if not state.frozen:
                return None
            assert weight.shape == gradient.shape, f"{name}: its gradient arose when the weight was not gathered"
            return gradient_of_kept(gradient, weight.detach())

        if weight.requires_grad:
            weight.register_hook(keep)
    return True
