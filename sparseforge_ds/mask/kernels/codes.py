"""Soft masks as 16-bit fixed point: m in [0, 1] as round(65535 m), in half the memory of fp32.

0 and 1 are exact, and so is reading a code and writing it again. The arithmetic is one multiplication each way,
since a division by a constant is another operation on a GPU than on a CPU. So equal masks have equal codes on every
device. The m of an update may differ in its last bit between kinds of devices (`kernels.fusing`), and its code by 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODE = torch.uint16
"""The dtype of codes: 0 is m = 0, so the padding of a partition needs no code of its own."""
STEPS = 65535
"""The code of m = 1."""


def encode(mask: Tensor) -> Tensor:
    """Turn (...) fp32 m in [0, 1] into (...) codes of the nearest value, half to even."""
    return (mask * STEPS).round().to(CODE)


def decode(code: Tensor) -> Tensor:
    """Turn (...) codes into (...) fp32 m."""
    return code.float() * (1.0 / STEPS)


def values_of(mask: Tensor) -> Tensor:
    """Return (...) m as fp32, of a mask that is stored as codes, as bool or as fp32 itself."""
    return decode(mask) if mask.dtype == CODE else mask.float()


def stored_as(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (...) m, fp32 or bool, as a mask of `dtype` is stored; inverse of `values_of`."""
    return encode(mask.float()) if dtype == CODE else mask.to(dtype)
