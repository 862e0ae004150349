"""Symmetric quantization of published weights: its grid, its zeros, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.mask.pattern import NM, Block
from sparseforge_ds.mask.quantization import quantize, quantized, scale_group


def literal(values: list[float], bits: int) -> list[float]:
    """Q of one group, one element at a time."""
    largest = 2 ** (bits - 1) - 1
    scale = torch.tensor(max(abs(value) for value in values) / largest).bfloat16().item() or 1.0
    return [max(-largest, min(largest, round(value / scale))) * scale for value in values]


@given(st.lists(st.floats(-4, 4, width=16), min_size=2, max_size=12), st.integers(2, 8))
def test_a_group_is_rounded_as_by_hand(values: list[float], bits: int) -> None:
    group = torch.tensor([values])
    assert quantized(group, bits)[0].tolist() == pytest.approx(literal(values, bits), abs=1e-6)


def test_codes_are_on_the_grid_and_bf16_holds_the_scales() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.0]).repeat(64)
    for bits in range(2, 9):
        code, scale = quantize(weight, bits)
        largest = 2 ** (bits - 1) - 1
        assert code.abs().amax(dim=1).tolist() == [largest] * 64
        assert torch.equal(code, code.round()) and torch.equal(scale.bfloat16().float(), scale)
        assert torch.equal(quantized(weight, bits), code * scale)
        assert (code * scale - weight).abs().max() <= 0.51 * scale.max()
        # A second rounding changes nothing.
        if bits == 4:
            assert torch.equal(quantized(code * scale, bits), code * scale)


def test_every_zero_is_positive() -> None:
    rounded = quantized(torch.tensor([[7.0, 0.1, -0.1, 0.0, -0.0], [0.0, 0.0, -0.0, 0.0, 0.0]]), 4)
    assert rounded.tolist() == [[7.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5]
    assert not rounded.signbit().any()


def test_scales_have_groups_of_kept_values() -> None:
    assert scale_group(NM(2, 4), 64, 256) == NM(128, 128)
    assert scale_group(NM(1, 4), 16, 64) == NM(64, 64)
    assert scale_group(Block(16), 8, 32) == NM(16, 16)
    assert scale_group(NM(2, 4), None, 172) == NM(172, 172)
    with pytest.raises(ValueError, match="3 kept values are no whole number of groups of 2:4; use a multiple"):
        scale_group(NM(2, 4), 3, 64)
    with pytest.raises(ValueError, match="4 kept values are no whole number of groups of block4:0.1875"):
        scale_group(Block(4, 0.1875), 4, 84)
    with pytest.raises(ValueError, match="64 kept values lie in 128 inputs at 2:4, which do not divide its 172 inputs"):
        scale_group(NM(2, 4), 64, 172)
