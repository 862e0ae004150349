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
    shift = torch.arange(8, dtype=torch.uint8, device=packed.device)
    octet = torch.empty(len(packed), 8, dtype=torch.bool, device=packed.device)
    for run in runs(octet):
        torch.ne((packed[run, None] >> shift) & 1, 0, out=octet[run])
    return octet.view(-1)[:count]


def count_bits(packed: Tensor) -> Tensor:
    """() fp64: bits that are set."""
    total = torch.zeros((), dtype=torch.float64, device=packed.device)
    for run in runs(packed):  # pairs, nibbles and bytes of bits are added inside their byte
        pairs = packed[run] - ((packed[run] >> 1) & 0x55)
        nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
        total += ((nibbles + (nibbles >> 4)) & 0x0F).sum(dtype=torch.float64)
    return total
