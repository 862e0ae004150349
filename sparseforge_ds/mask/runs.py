"""Element-wise work in runs that stay in a processor's caches: a chain of temporaries is then several times faster."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ELEMENTS_PER_THREAD = 1 << 15
ALIGNMENT = 64
"""Rows that a run is a multiple of: its elements then fall into the same vector lanes as without runs, bit for bit."""


def runs(tensor: Tensor) -> Iterator[slice]:
    """Consecutive slices that cover the first axis of `tensor`; a single one on an accelerator.

    Args:
        tensor: (n, ...) that is worked on together with a few temporaries of its size.
    """
    length = tensor.shape[0]
    step = max(length, 1)
    if tensor.device.type == "cpu" and tensor.numel():
        rows = ELEMENTS_PER_THREAD * torch.get_num_threads() * length // tensor.numel()
        step = max(ALIGNMENT, rows - rows % ALIGNMENT)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
