"""Where a tensor begins: kernels read 16 bytes at once, and a view can begin anywhere."""

from __future__ import annotations

from torch import Tensor


def begins_at(tensor: Tensor, unit: int) -> bool:
    """Whether its first byte is at a multiple of `unit`."""
    return tensor.data_ptr() % unit == 0


def whole_words(tensor: Tensor) -> Tensor:
    """The same, contiguous, where 16 bytes may be read at once."""
    tensor = tensor.contiguous()
    return tensor if begins_at(tensor, 16) else tensor.clone()
