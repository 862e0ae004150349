"""Gradients of frozen pruned weights are zeroed as they arise, before DeepSpeed reduces them and takes their norm.

DeepSpeed computes the norm that it clips by, and logs, before it calls the inner optimizer, where a mask would be too
late; between backward and that moment it has no public hook, and with offload it adds the norm up during backward. A
hook on the weight's gradient is the one place before it at every ZeRO stage. There the weight is whole on every rank
and published: what is +0.0 is pruned (`mask.effective_mask.is_kept`), so that no mask is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from sparseforge_ds.mask.effective_mask import is_kept
from sparseforge_ds.zero.state import ShardState


def hook_gradients(state: ShardState, names: Iterable[str]) -> None:
    """Attach to the prunable weights, for as long as the engine lives.

    A kept weight that is published as +0.0, in fp16 one below 3e-8, goes without the gradient of that pass.

    Args:
        state: knows whether masks are frozen; before that, nothing is done.
        names: of the weights.
    """
    for name in names:
        weight: Any = state.layout.low_precision[name]

        def keep(gradient: Tensor, weight: Any = weight, name: str = name) -> Tensor | None:
            if not state.frozen:
                return None
            assert weight.shape == gradient.shape, f"{name}: its gradient arose when the weight was not gathered"
            return gradient.masked_fill(~is_kept(weight.detach()), 0.0)

        if weight.requires_grad:
            weight.register_hook(keep)
