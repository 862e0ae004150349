"""One bit an element: truth values of flat tensors packed 8 to a byte, the first element in the lowest bit."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.fusing import fused

_GATHER = sum(1 << (56 - 7 * byte) for byte in range(8))
"""Multiplier that gathers eight bytes of 0 or 1, read as one integer: byte i lands on bit 56 + i, without carries."""


def octets(chunk: slice) -> slice:
    """Return the bytes that hold the bits of a chunk."""
    return slice(chunk.start // 8, -(-chunk.stop // 8))


def pack(bit: Tensor) -> Tensor:
    """Pack (n,) bool into (ceil(n / 8),) uint8; the rest of the last byte is 0."""
    words = F.pad(bit, (0, -bit.numel() % 8)).view(torch.int64)  # a copy, aligned whatever `bit` is a view of
    packed = torch.empty(len(words), dtype=torch.uint8, device=bit.device)
    for chunk in chunks(words):
        packed[chunk] = (words[chunk] * _GATHER) >> 56
    return packed


def unpack(packed: Tensor, count: int) -> Tensor:
    """Unpack (ceil(count / 8),) uint8 into (count,) bool, the inverse of `pack`."""
    bit = torch.empty(count, dtype=torch.bool, device=packed.device)
    for chunk in chunks(bit):
        bit[chunk] = bits_of(packed[octets(chunk)], chunk.stop - chunk.start)
    return bit


def values_of_bits(packed: Tensor, count: int) -> Tensor:
    """Return `bits_of` as fp32 0 and 1."""
    if torch.compiler.is_compiling() or packed.device.type != "cpu":
        return bits_of(packed, count).float()
    return F.embedding(packed.int(), _bits_of_byte(torch.float32)).view(-1)[:count]


@fused(writes=("values",))
def keep_in_place(values: Tensor, packed: Tensor) -> None:
    """Write +0.0 where the bit is not set.

    Args:
        values: (n,) of 16 or 32 bits each.
        packed: (ceil(n / 8),) bits.
    """
    if torch.compiler.is_compiling() or packed.device.type != "cpu":
        values.copy_(torch.where(bits_of(packed, values.numel()), values, 0.0))
        return
    integers = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    integers &= _bits_of_byte(integers.dtype)[packed.int()].view(-1)[: len(integers)]


@cache
def _bits_of_byte(dtype: torch.dtype) -> Tensor:
    """Return (256, 8) the bits of every byte: 1.0 or, of integers, all ones where they are set, else 0."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return bits.to(dtype) if dtype.is_floating_point else -bits.to(dtype)


def bits_of(packed: Tensor, count: int) -> Tensor:
    """Return `unpack` without chunks, for use inside fused functions."""
    shift = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shift) & 1).view(-1)[:count] > 0


def set_bits(packed: Tensor) -> Tensor:
    """Count the bits that are set in each byte: (...) uint8 -> (...) uint8, 0 to 8."""
    # Pairs, nibbles and bytes of bits are added inside their byte.
    pairs = packed - ((packed >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F
