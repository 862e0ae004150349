"""Element-wise work in chunks: temporaries are small, and stay in a processor's caches (several times faster)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparseforge_ds.mask.kernels.fusing import is_compiled

ELEMENTS_PER_THREAD = 1 << 15
"""Elements of a chunk on a processor, for each of its threads."""
CHUNK = 1 << 24
"""Elements of a chunk on an accelerator or in compiled code, and of what is scored, gated and published at a time."""
IN_PLACE = 1 << 30
"""Elements of a chunk that a compiled function changes in place, without temporaries: 32-bit indices reach all."""
ALIGNMENT = 64
"""Rows of a chunk are a multiple of this, so that elements use the same vector lanes as without chunks."""


def chunks(tensor: Tensor, in_place: bool = False) -> Iterator[slice]:
    """Yield consecutive slices that cover the first axis of `tensor`.

    Args:
        tensor: (n, ...) that is worked on together with a few temporaries of its size.
        in_place: True if the work needs no temporaries once it is compiled.
    """
    length = tensor.shape[0]
    stepwise = tensor.device.type == "cpu" and not is_compiled(tensor.device)
    limit = IN_PLACE if in_place else CHUNK
    if stepwise:
        limit = ELEMENTS_PER_THREAD * torch.get_num_threads()
    rows = limit * length // max(tensor.numel(), 1)
    step = max(ALIGNMENT, rows - rows % ALIGNMENT)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
