"""Gradients of frozen pruned weights are zeroed before DeepSpeed takes the norm that it clips by, and logs.

DeepSpeed takes that norm before it calls the inner optimizer, where a mask would be too late. Under ZeRO each rank
holds its averaged gradients by then, laid out like its master partitions, and they are masked once a step. With offload
the norm is added up during backward, and at stage 0 gradients are whole: there a hook on each weight zeroes its
gradient as it arises. The weight is published, and what is +0.0 in it is pruned (`mask.effective_mask.is_kept`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from sparseforge_ds.mask.kernels.publication import gradient_of_kept
from sparseforge_ds.zero.state import ShardState


def mask_before_norm(state: ShardState, names: Iterable[str]) -> bool:
    """Attach to the engine, for as long as it lives, and return whether gradients reach the optimizer masked.

    Without clipping, and where DeepSpeed leaves no moment between averaging and the norm, nothing is attached: the
    optimizer's pre hook masks gradients then, and the logged norm counts those of pruned weights too. A kept weight
    that is published as +0.0, in fp16 one below 3e-8, goes without the gradient of a pass that a hook has seen.

    Args:
        state: knows whether masks are frozen; before that, nothing is done.
        names: of the weights.
    """
    layout, flats = state.layout, set(state.flats)

    def mask(index: int, offset: int, gradient: Tensor) -> None:
        if state.frozen and index in flats:
            state.zero_pruned(index, gradient, offset)

    if layout.before_norm(mask):
        return True
    if not layout.engine.gradient_clipping():
        return False
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
