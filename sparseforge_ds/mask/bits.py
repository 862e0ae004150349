"""One bit an element: truth values of flat tensors packed 8 to a byte, the first element in the lowest bit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.mask.runs import runs


def pack(bit: Tensor) -> Tensor:
    """(n,) bool -> (ceil(n / 8),) uint8; what is left of the last byte is 0."""
    ones = bit.view(torch.uint8)
    octet = (F.pad(ones, (0, -ones.numel() % 8)) if ones.numel() % 8 else ones).view(-1, 8)
    shift = torch.arange(8, dtype=torch.uint8, device=bit.device)
    packed = octet.new_empty(len(octet))
    for run in runs(octet):
        torch.sum(octet[run] << shift, dim=1, dtype=torch.uint8, out=packed[run])
    return packed


def unpack(packed: Tensor, count: int) -> Tensor:
    """(ceil(count / 8),) uint8 -> (count,) bool, inverse of `pack`."""
    found = torch.empty(count, dtype=torch.bool, device=packed.device)
    for run in runs(found):
        found[run] = bits_of(packed[run.start // 8 : -(-run.stop // 8)], run.stop - run.start)
    return found


def bits_of(packed: Tensor, count: int) -> Tensor:
    """`unpack` of all at once, as a part of a fused function."""
    shift = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shift) & 1).view(-1)[:count] > 0


def count_bits(packed: Tensor) -> Tensor:
    """() fp64: bits that are set."""
    total = torch.zeros((), dtype=torch.float64, device=packed.device)
    for run in runs(packed):
        total += set_bits(packed[run]).sum(dtype=torch.float64)
    return total


def set_bits(packed: Tensor) -> Tensor:
    """(...) uint8 -> (...) uint8: bits that are set in each byte, 0 to 8."""
    # Pairs, nibbles and bytes of bits are added inside their byte.
    pairs = packed - ((packed >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F
