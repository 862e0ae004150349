"""Counter-based random numbers: each depends on (seed, step, probe, weight, element) alone.

A probe is the same on any number of ranks and at any ZeRO stage, and need never be stored.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.nn import functional as F

# Odd constants of the splitmix64 finalizer (Steele et al., 2014), as signed 64-bit integers.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def counter_key(seed: int, step: int, probe: int, name: str) -> int:
    """Return a 63-bit key for one weight's random numbers in one probe."""
    text = f"{seed}/{step}/{probe}/{name}".encode()
    return (zlib.crc32(text) << 31) ^ zlib.adler32(text)


def counter_hash(key: int, index: Tensor) -> Tensor:
    """Return well mixed int64 for every counter value: splitmix64 of `key + index * golden`.

    Args:
        key: from `counter_key`.
        index: (n,) int64 counters.
    """
    z = index * _GOLDEN + key
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right with zeros coming in; torch's own shift copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def rademacher(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Draw (stop - start,) fp32 of +-1 for the elements start..stop of a weight."""
    index = torch.arange(start, stop, device=device, dtype=torch.int64)
    return ((counter_hash(key, index) & 1) * 2 - 1).float()


def rademacher_rows(key: int, first: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """Draw (rows, columns) of +-1, for row numbers from `first` on, in the dtype and on the device of `like`.

    One hash gives 64 signs, which a table reads from its bytes. The signs displace a matmul's output, and a hash for
    each of them would cost more than the matmul.
    """
    words = -(-columns // 64)
    index = torch.arange(first * words, (first + rows) * words, device=like.device, dtype=torch.int64)
    byte_RB = counter_hash(key, index).view(torch.uint8).view(rows, words * 8)
    shift_8 = torch.arange(8, device=like.device)
    sign_of_bit = ((torch.arange(256, device=like.device)[:, None] >> shift_8 & 1) * 2 - 1).to(like.dtype)
    return F.embedding(byte_RB.int(), sign_of_bit).view(rows, words * 64)[:, :columns]


def uniform(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Draw (stop - start,) fp32 in [0, 1) for the counters start..stop."""
    index = torch.arange(start, stop, device=device, dtype=torch.int64)
    return _shift(counter_hash(key, index), 40).float() * 2.0**-24
