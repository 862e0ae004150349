from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseforge_ds.mask.packing import CHUNK, MaskCode, pack24, packed24_axis, packed24_shapes, unpack24
from sparseforge_ds.mask.pattern import NM, Block, top_n

CODES = [(4, 2), (2, 1), (4, 1), (4, 3), (8, 4), (8, 2), (16, 8), (32, 16), (5, 2), (61, 30), (80, 40), (256, 128)]


def random_mask(groups: int, members: int, kept: int) -> torch.Tensor:
    return top_n(torch.randn(groups, members), kept)


@pytest.mark.parametrize(("members", "kept"), CODES)
@pytest.mark.parametrize("groups", [0, 1, 4, 5, 7, 40, 41, 1000])
def test_masks_come_back(members: int, kept: int, groups: int) -> None:
    code, mask_GM = MaskCode(members, kept), random_mask(groups, members, kept)
    packed = code.pack(mask_GM)
    assert packed.dtype == torch.uint8 and packed.shape == (code.nbytes(groups),)
    assert torch.equal(code.unpack(packed, groups), mask_GM)


def test_masks_of_several_chunks_are_one_stream() -> None:
    code, groups = MaskCode(4, 2), 5 * CHUNK * 2 + 13
    mask_GM = random_mask(groups, 4, 2)
    packed = code.pack(mask_GM)
    assert len(packed) == code.nbytes(groups)
    assert torch.equal(code.unpack(packed, groups), mask_GM)
    assert torch.equal(code.pack(mask_GM[-13:]), packed[5 * CHUNK * 2 // 40 * 13 :])


def test_2_4_takes_13_bits_for_5_groups() -> None:
    code = MaskCode(4, 2)
    assert code.word == (5, 13) and code.nbytes(40) == 13
    assert 8 * code.nbytes(10**6) / (4 * 10**6) == 0.65


def test_no_code_is_longer_than_the_mask_or_shorter_than_possible() -> None:
    for members in range(2, 65):
        for kept in range(1, members):
            code = MaskCode(members, kept)
            groups, bits = code.word
            assert math.log2(code.patterns) - 1e-9 <= bits / groups <= members
            assert code.patterns**groups <= 2**bits and bits <= 64


def test_the_bits_of_2_4_by_hand() -> None:
    """Index of {a < b}: C(a, 1) + C(b, 2)."""
    pairs = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    for index, (a, b) in enumerate(pairs):
        mask_GM = torch.zeros(5, 4, dtype=torch.bool)
        mask_GM[0, [0, 1]] = True  # index 0
        mask_GM[1, [a, b]] = True
        mask_GM[2:, :2] = True
        assert MaskCode(4, 2).pack(mask_GM).tolist() == list((6 * index).to_bytes(2, "little"))


def test_one_bit_a_weight_for_tiles() -> None:
    pattern = Block(16)
    code = MaskCode(pattern.members, pattern.kept)
    assert not code.by_index and code.nbytes(3) == 3 * 256 // 8
    mask_GM = random_mask(3, 256, 128)
    assert code.pack(mask_GM)[0].item() == sum(2**i for i in range(8) if mask_GM[0, i])


def test_a_mask_that_is_not_of_the_pattern_is_refused() -> None:
    mask_GM = random_mask(6, 4, 2)
    mask_GM[3] = torch.tensor([True, True, True, False])
    with pytest.raises(ValueError, match="1 groups of a mask do not keep 2 of 4"):
        MaskCode(4, 2).pack(mask_GM)


@pytest.mark.parametrize(("members", "kept"), [(4, 2), (8, 4), (256, 128)])
def test_damaged_masks_are_refused_or_other_masks(members: int, kept: int) -> None:
    """Every single flipped bit: never the same mask again, never one that is out of the pattern."""
    code, mask_GM = MaskCode(members, kept), random_mask(7, members, kept)
    packed = code.pack(mask_GM)
    refused = 0
    for byte, bit in itertools.product(range(len(packed)), range(8)):
        spoiled = packed.clone()
        spoiled[byte] ^= 1 << bit
        try:
            read_GM = code.unpack(spoiled, 7)
        except ValueError:
            refused += 1
            continue
        assert not torch.equal(read_GM, mask_GM) and bool((read_GM.sum(1) == kept).all())
    assert refused
    with pytest.raises(ValueError, match="bytes; these are"):
        code.unpack(packed[:-1], 7)
    with pytest.raises(ValueError, match="bytes; these are"):
        code.unpack(packed.float(), 7)


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


def test_groups_with_fewer_non_zeros_and_minus_zero() -> None:
    rows = [[0, 0, 0, 0], [0, 0, 0, 5], [-0.0, 0, 0, 3], [0, 2, 0, 0], [1, 0, 0, 1], [0, float("nan"), -0.0, 0]]
    weight = torch.tensor(rows)
    values, positions = pack24(weight, -1)
    assert positions.tolist() == [[0 | 1 << 2], [0 | 3 << 2], [0 | 3 << 2], [0 | 1 << 2], [0 | 3 << 2], [1 | 2 << 2]]
    assert same_bits(unpack24(values, positions), weight)


def test_a_byte_by_hand() -> None:
    weight = torch.tensor([[0.0, 1, 2, 0, 3, 0, 0, 4]], dtype=torch.bfloat16)
    values, positions = pack24(weight, -1)
    assert values.tolist() == [[1, 2, 3, 4]]
    assert positions.tolist() == [[1 | 2 << 2 | (0 | 3 << 2) << 4]]


def test_three_of_four_are_refused() -> None:
    with pytest.raises(ValueError, match="1 groups of four have more than two non-zeros"):
        pack24(torch.tensor([[1.0, 1, 0, 1, 0, 0, 0, 0]]), -1)


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
