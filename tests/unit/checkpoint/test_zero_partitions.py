"""Elements of a flat's states, among them those of a frozen mask, which is bits."""

from __future__ import annotations

import torch

from sparseforge_ds.checkpoint.zero_partitions import KEPT, element_states, read_bits
from sparseforge_ds.mask.kernels.bits import pack


def test_bits_are_read_from_any_element_on() -> None:
    kept = torch.rand(37) < 0.5
    for start, stop in ((0, 37), (0, 0), (3, 5), (7, 9), (8, 16), (11, 37), (37, 37), (50, 50)):
        assert torch.equal(read_bits(pack(kept), start, stop), kept[start:stop]), (start, stop)
    assert element_states({KEPT: pack(kept), "exp_avg": torch.zeros(37)}, 37) == {
        KEPT: torch.bool,
        "exp_avg": torch.float32,
    }
    assert element_states({KEPT: torch.zeros(4, dtype=torch.uint8)}, 37) == {}, "too few bytes"
    assert element_states({KEPT: torch.zeros(37)}, 37) == {}, "no bits"
