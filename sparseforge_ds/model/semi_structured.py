"""torch's semi-structured sparse tensors, where torch has a kernel for a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def semi_structured(weight: Tensor, layer: object) -> Tensor | None:
    """A dense 2:4 weight as torch's semi-structured tensor, or None where torch has no kernel for it."""
    if not isinstance(layer, nn.Linear) or weight.device.type != "cuda" or weight.ndim != 2:
        return None
    from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUSPARSELT
    from torch.sparse import SparseSemiStructuredTensorCUTLASS as Cutlass

    capability = torch.cuda.get_device_capability(weight.device)
    cutlass = SparseSemiStructuredTensor._FORCE_CUTLASS or not torch.backends.cusparselt.is_available()
    if capability < (8, 0) or (cutlass and capability >= (9, 0)):  # its CUTLASS kernels are for 8.x
        return None
    kind = Cutlass if cutlass else SparseSemiStructuredTensorCUSPARSELT
    limits = kind._DTYPE_SHAPE_CONSTRAINTS.get(weight.dtype)
    if weight.dtype not in (torch.float16, torch.bfloat16) or limits is None:
        return None
    if weight.shape[0] % limits.sparse_min_rows or weight.shape[1] % limits.sparse_min_cols:
        return None
    sparse: Tensor = kind.from_dense(weight)
    return sparse
