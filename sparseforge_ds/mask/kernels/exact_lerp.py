"""Forms of `mask.interpolation.lerp` for use inside fused functions, and removal of the sign of zeros."""

from __future__ import annotations

import torch
from torch import Tensor


def split_lerp(share: float) -> list[float]:
    """Split a share in [0, 1] into its nearer end, 0 or 1, and the offset from there: what `exact_lerp` takes."""
    return [1.0, share - 1] if share >= 0.5 else [0.0, share]


def exact_lerp(start: Tensor, end: Tensor, nearer: float, offset: float) -> Tensor:
    """Return `lerp(start, end, share)` for a share that `split_lerp` has split.

    Args:
        start: (...) fp32.
        end: (...) fp32.
        nearer: 0.0 or 1.0; a float, since a bool would compile two graphs.
        offset: share - nearer.
    """
    gap = end - start
    if torch.compiler.is_compiling():
        return torch.where(nearer > 0.5, end, start) + gap * offset  # type: ignore[call-overload,no-any-return]  # both are tensors here
    return (end if nearer > 0.5 else start) + gap * offset


def exact_lerp_elementwise(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    """Return `lerp(start, end, share)` with one share for each element: (...) fp32."""
    gap = end - start
    is_late = share >= 0.5
    near_end = end - gap * (1 - share)
    near_start = start + gap * share
    if torch.compiler.is_compiling() or start.device.type != "cpu":
        return torch.where(is_late, near_end, near_start)
    # A choice by bits is several times faster, step by step.
    end_bits = near_end.view(torch.int32)
    start_bits = near_start.view(torch.int32)
    return (((end_bits ^ start_bits) & is_late.to(torch.int32).neg_()) ^ start_bits).view(torch.float32)


def without_sign(values: Tensor) -> Tensor:
    """Return (...) values with +0.0 for -0.0."""
    # Step by step an addition is many times faster than a choice; the compiler would leave + 0.0 out.
    return torch.where(values == 0, 0.0, values) if torch.compiler.is_compiling() else values + 0.0
