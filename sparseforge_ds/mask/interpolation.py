"""Linear interpolation that is exact at its ends, so that a decided mask stays exactly 0 or 1."""

from __future__ import annotations

import torch
from torch import Tensor


def lerp(start: Tensor, end: Tensor, share: float | Tensor) -> Tensor:
    """Return start + share (end - start): exactly `start` at 0, `end` at 1, and either where they are equal.

    Args:
        start: (...) fp32.
        end: (...) fp32.
        share: in [0, 1]; one for all elements, or (...) fp32.
    """
    gap = end - start
    near_start = start + gap * share
    near_end = end - gap * (1 - share)
    if isinstance(share, Tensor):
        return torch.where(share >= 0.5, near_end, near_start)
    return near_end if share >= 0.5 else near_start
