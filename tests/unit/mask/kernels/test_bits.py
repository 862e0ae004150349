"""Packed bits against one bit at a time."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.mask.kernels.bits import pack, set_bits, unpack


@pytest.mark.parametrize("count", [0, 1, 8, 13, 300_001])
def test_bits_are_packed_counted_and_unpacked(count: int) -> None:
    bits = torch.rand(count, generator=torch.Generator().manual_seed(count)) > 0.4
    packed = pack(bits)
    assert packed.dtype == torch.uint8 and packed.numel() == -(-count // 8)
    one_by_one = [int(packed[i // 8]) >> i % 8 & 1 for i in range(min(count, 1000))]
    assert one_by_one == bits[:1000].int().tolist()
    assert torch.equal(unpack(packed, count), bits)
    assert set_bits(packed).sum().item() == bits.sum().item()


def test_the_rest_of_the_last_byte_is_empty() -> None:
    assert pack(torch.ones(11, dtype=torch.bool)).tolist() == [255, 7]
