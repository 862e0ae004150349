from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseforge_ds.mask.pattern import NM, top_n
from sparseforge_ds.packed_format.packing import pack24, packed24_axis, packed24_shapes, unpack24


def sparse_weight(shape: tuple[int, ...], input_axis: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(shape).to(dtype)
    group_GM = NM(2, 4).to_groups(weight.reshape(-1), shape, input_axis)
    kept_GM = torch.where(top_n(group_GM.abs(), 2), group_GM, torch.zeros_like(group_GM))
    return NM(2, 4).from_groups(kept_GM, shape, input_axis).view(shape).contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "input_axis"),
    [((6, 16), -1), ((3, 4), -1), ((5, 12), -1), ((16, 6), -2), ((12, 5), -2), ((4, 1), -2), ((3, 6, 20), -1)],
)
def test_weights_come_back_bit_by_bit(shape: tuple[int, ...], input_axis: int, dtype: torch.dtype) -> None:
    weight = sparse_weight(shape, input_axis, dtype)
    values, positions = pack24(weight, input_axis)
    assert (tuple(values.shape), tuple(positions.shape)) == packed24_shapes(shape, input_axis)
    assert packed24_axis(tuple(values.shape), tuple(positions.shape)) == input_axis
    assert same_bits(unpack24(values, positions), weight)
    if shape[input_axis] % 8 == 0 and dtype != torch.float32:
        assert (values.nbytes + positions.nbytes) / weight.nbytes == 0.5625


def test_groups_with_fewer_non_zeros_keep_minus_zero() -> None:
    rows = [[0, 0, 0, 0], [0, 0, 0, 5], [-0.0, 0, 0, 3], [0, 2, 0, 0], [1, 0, 0, 1], [0, float("nan"), -0.0, 0]]
    weight = torch.tensor(rows)
    values, positions = pack24(weight, -1)
    assert positions.tolist() == [[0 | 1 << 2], [0 | 3 << 2], [0 | 3 << 2], [0 | 1 << 2], [0 | 3 << 2], [1 | 2 << 2]]
    assert same_bits(unpack24(values, positions), weight)


def test_a_byte_is_that_by_hand() -> None:
    weight = torch.tensor([[0.0, 1, 2, 0, 3, 0, 0, 4]], dtype=torch.bfloat16)
    values, positions = pack24(weight, -1)
    assert values.tolist() == [[1, 2, 3, 4]]
    assert positions.tolist() == [[1 | 2 << 2 | (0 | 3 << 2) << 4]]


def test_three_of_four_are_refused() -> None:
    with pytest.raises(ValueError, match="1 groups of four have more than two non-zeros"):
        pack24(torch.tensor([[1.0, 1, 0, 1, 0, 0, 0, 0]]), -1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.complex64])
def test_weights_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"values of a packed weight are float64, .* these are {dtype}"):
        pack24(torch.zeros(2, 8, dtype=dtype), -1)


def test_damaged_positions_are_refused() -> None:
    values, positions = pack24(sparse_weight((3, 12), -1, torch.float16), -1)
    spoiled = positions.clone()
    spoiled[1, 0] = 0
    with pytest.raises(ValueError, match="does not name two elements in order"):
        unpack24(values, spoiled)
    spoiled = positions.clone()
    spoiled[1, 1] |= 1 << 6  # behind the last group of the row
    with pytest.raises(ValueError, match="does not name two elements in order"):
        unpack24(values, spoiled)
    with pytest.raises(ValueError, match="are no packed 2:4 weight"):
        unpack24(values, positions[:2])
    with pytest.raises(ValueError, match="are uint8"):
        unpack24(values, positions.to(torch.int32))


@given(
    outputs=st.integers(1, 9),
    groups=st.integers(1, 9),
    input_axis=st.sampled_from([-1, -2]),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_any_2_4_weight_comes_back(outputs: int, groups: int, input_axis: int, density: float, seed: int) -> None:
    torch.manual_seed(seed)
    shape = (outputs, 4 * groups) if input_axis == -1 else (4 * groups, outputs)
    weight = sparse_weight(shape, input_axis, torch.bfloat16) * (torch.rand(shape) < density)
    values, positions = pack24(weight, input_axis)
    assert packed24_axis(tuple(values.shape), tuple(positions.shape)) == input_axis
    assert same_bits(unpack24(values, positions), weight)
