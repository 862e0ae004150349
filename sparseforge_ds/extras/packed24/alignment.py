"""Alignment of tensors in memory: kernels read 16 bytes at once, and a view can begin anywhere."""

from __future__ import annotations

from torch import Tensor


def begins_at(tensor: Tensor, unit: int) -> bool:
    """Return True if the first byte of a tensor is at a multiple of `unit`."""
    return tensor.data_ptr() % unit == 0


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, contiguous and aligned to 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if begins_at(tensor, 16) else tensor.clone()
