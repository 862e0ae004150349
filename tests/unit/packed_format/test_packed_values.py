"""Rounded values: exactly the nearest of their grid, by their scale, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseforge_ds.mask.quantization import quantized
from sparseforge_ds.model.peak_memory import PeakMemoryCounter
from sparseforge_ds.packed_format.packed_values import (
    DTYPE_NAMES,
    GRIDS,
    LARGEST,
    PAIRS,
    Grid,
    bits_a_weight,
    require_grid,
    round_values,
    scaled,
    unpaired,
)
from sparseforge_ds.packed_format.packing import check24, pack24, packed24_axis, packed24_shapes, unpack24
from tests.unit.packed_format.test_packing import sparse_weight

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def grid_of(dtype: torch.dtype) -> Tensor:
    """Return every value of a grid, in fp64."""
    values = ALL_CODES.view(dtype).double()
    return values[values.isfinite() & (values.abs() <= LARGEST[dtype])].unique()


def test_by_hand_ties_go_to_even() -> None:
    values = torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.4, 126.6], [0, 0, 0, 0, 0, 0], [-254, 1, 3, 2, 5, 0]])
    codes, scale = round_values(values, -1, Grid("int8"))
    assert codes.tolist() == [[127, 0, 2, -2, 0, 127], [0] * 6, [-127, 0, 2, 1, 2, 0]]
    assert scale.tolist() == [[1.0], [1.0], [2.0]]
    codes, scale = round_values(torch.tensor([[448.0, 17, 19, -0.0005, 2.0**-9, 3 * 2.0**-10]]), -1, Grid("fp8_e4m3"))
    assert codes.float().tolist() == [[448, 16, 20, 0, 2.0**-9, 2.0**-8]] and scale.tolist() == [[1.0]]
    assert not (codes.view(torch.uint8) == 0x80).any()  # -0.0
    codes, scale = round_values(torch.tensor([[7.0, 0.5, 1.5, -2.5, -7, -0.4], [0] * 6]), -1, Grid("int4"))
    assert codes.tolist() == [[0x07, 0xE2, 0x09], [0, 0, 0]] and scale.tolist() == [[1.0], [1.0]]
    assert unpaired(codes, -1).tolist() == [[7, 0, 2, -2, -7, 0], [0] * 6]


@pytest.mark.parametrize("group", [None, 16, 32, 48])
@pytest.mark.parametrize(
    ("shape", "input_axis"), [((6, 192), -1), ((192, 5), -2), ((3, 6, 192), -1), ((2, 192, 9), -2)]
)
def test_int4_is_what_training_publishes(shape: tuple[int, ...], input_axis: int, group: int | None) -> None:
    """Bit for bit: a group has as many kept values, and twice as many inputs."""
    weight = sparse_weight(shape, input_axis, torch.float32)
    values, positions = pack24(weight, input_axis)
    codes, scale = round_values(values, input_axis, Grid("int4", group))
    shapes = (tuple(codes.shape), tuple(positions.shape))
    assert shapes == packed24_shapes(shape, input_axis, PAIRS) and packed24_axis(*shapes, PAIRS) == input_axis
    assert codes.dtype == torch.uint8 and scale.dtype == torch.bfloat16
    assert scale.shape[input_axis] == (1 if group is None else 96 // group)
    bits = 8 * (codes.nbytes + positions.nbytes + scale.nbytes) / weight.numel()
    assert bits == 3 + 8 / (group or 96) and bits_a_weight(Grid("int4", group)) == 3 + (8 / group if group else 0)
    rows = weight.transpose(-1, input_axis)
    trained = quantized(rows.reshape(-1, 2 * (group or 96)), bits=4).view(rows.shape).transpose(-1, input_axis)
    dense = unpack24(codes, positions, scale, torch.float32)
    assert torch.equal(dense, trained) and bool((dense[weight == 0].view(torch.int32) == 0).all())
    for count in (0, 5, 8):
        odd = torch.ones([count if n == scale.shape[input_axis] and n != 1 else n for n in scale.shape])
        if odd.shape != scale.shape:
            with pytest.raises(ValueError, match="scales of shape .* do not fit values of shape"):
                check24(codes, positions, odd.bfloat16())


@pytest.mark.parametrize("input_axis", [-1, -2])
def test_scales_are_not_copied_to_the_size_of_the_weight(input_axis: int) -> None:
    values, _ = pack24(
        sparse_weight((64, 192) if input_axis == -1 else (192, 64), input_axis, torch.float32), input_axis
    )
    codes, scale = round_values(values, input_axis, Grid("int4", 16))
    repeated = scale.float().repeat_interleave(16, input_axis)
    with PeakMemoryCounter([codes, scale]) as counter:
        product = scaled(codes, scale, torch.float32, input_axis)
    assert torch.equal(product, unpaired(codes, input_axis).float() * repeated)
    # The result in fp32, the codes in a byte each, and scales for 16.
    assert counter.peak <= product.nbytes + 2 * product.numel()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@given(
    exponents=st.lists(st.integers(-149, 127), min_size=1, max_size=5),
    kept_count=st.integers(1, 9),
    input_axis=st.sampled_from([-1, -2]),
    source=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_every_value_is_the_nearest(
    dtype: torch.dtype, exponents: list[int], kept_count: int, input_axis: int, source: torch.dtype, seed: int
) -> None:
    """Rows have any size, also one too small for a scale in fp32; no row uses more of the grid than there is."""
    torch.manual_seed(seed)
    sizes = 2.0 ** torch.tensor(exponents, dtype=torch.float64)[:, None]
    rows = torch.randn(len(exponents), 2 * kept_count, dtype=torch.float64) * sizes
    values = rows.clamp(-torch.finfo(source).max, torch.finfo(source).max).to(source)
    values = values if input_axis == -1 else values.t().contiguous()
    name = next(name for name, stored in GRIDS.items() if stored == dtype)
    codes, scale = round_values(values, input_axis, Grid(name))
    assert codes.dtype == dtype and scale.dtype == torch.float32
    assert bool((scale > 0).all() and scale.isfinite().all())

    # What is rounded is a quotient in fp32.
    result = codes.float().double()
    target = (values.float() / scale).double()
    nearest = (target[..., None] - grid_of(dtype)).abs().amin(-1)
    assert bool(((target - result).abs() == nearest).all())

    largest = values.double().abs().amax(input_axis, keepdim=True)
    full = largest > LARGEST[dtype] * 2.0**-126
    assert bool((result.abs().amax(input_axis, keepdim=True) == LARGEST[dtype])[full].all())
    assert bool(((result * scale.double() - values.double()).abs() <= largest / 16 + 2.0**-126).all())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("shape", "input_axis"), [((6, 16), -1), ((12, 5), -2), ((3, 6, 20), -1), ((3, 12, 6), -2)])
def test_unpacked_it_is_near_and_pruned_entries_are_exactly_zero(
    grid: str, shape: tuple[int, ...], input_axis: int
) -> None:
    weight = sparse_weight(shape, input_axis, torch.bfloat16)
    values, positions = pack24(weight, input_axis)
    codes, scale = round_values(values, input_axis, Grid(grid))
    assert scale.shape == torch.Size([1 if axis == len(shape) + input_axis else n for axis, n in enumerate(shape)])
    stored = codes.nbytes + positions.nbytes + scale.nbytes
    padding = positions.nbytes - weight.numel() / 8  # half a byte a row
    without_scales = 8 * (stored - padding - scale.nbytes) / weight.numel()
    assert without_scales == pytest.approx(bits_a_weight(Grid(grid)))
    dense = unpack24(codes, positions, scale, torch.bfloat16)
    assert dense.dtype == torch.bfloat16
    assert bool((dense[weight == 0].view(torch.int16) == 0).all())
    relative = (dense - weight).float().norm() / weight.float().norm()
    assert relative < {"int8": 0.01, "fp8_e4m3": 0.04, "int4": 0.15}[grid]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(grid: str, odd: float) -> None:
    values = torch.ones(3, 4)
    values[1, 2] = odd
    with pytest.raises(ValueError, match="not finite, and no scale fits its row"):
        round_values(values, -1, Grid(grid))


@pytest.mark.parametrize("size", [0, -16, 24, 128])
def test_groups_that_divide_no_row_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {size} values do not divide the 64 kept inputs of a row, or are"):
        round_values(torch.ones(3, 64), -1, Grid("int4", size))


@pytest.mark.parametrize("grid", GRIDS)
def test_damaged_values_and_scales_are_refused(grid: str) -> None:
    values, positions = pack24(sparse_weight((3, 12), -1, torch.float32), -1)
    codes, scale = round_values(values, -1, Grid(grid))
    # Scales that no rounding gives.
    for odd in (0.0, -1.0, float("nan"), float("inf")):
        spoiled = scale.clone()
        spoiled[1] = odd
        with pytest.raises(ValueError, match="scales are positive and finite, and 1 are not, first "):
            unpack24(codes, positions, spoiled)
    # Codes off the grid.
    spoiled = codes.view(torch.uint8).clone()
    spoiled[2, 1], damage = {"int8": (0x80, "-128"), "fp8_e4m3": (0xFF, "NaN"), "int4": (0x83, "-8")}[grid]
    with pytest.raises(ValueError, match=f"1 values are damaged: {damage}"):
        check24(spoiled.view(codes.dtype), positions, scale)
    # Scales of another shape.
    for shape in ((3,), (1, 3), (3, 2), (2, 1)):
        with pytest.raises(ValueError, match=r"scales of shape .* do not fit values of shape \(3, \d\), one a row is"):
            unpack24(codes, positions, torch.ones(shape, dtype=scale.dtype))
    # Dtypes that are not stored, and rounded values without scales.
    for odd_values, odd_scale in (
        (codes, scale.double()),
        (codes, scale.half()),
        (values, scale),
        (codes.view(torch.float8_e5m2), scale),
    ):
        with pytest.raises(ValueError, match=re.escape(f"values are {DTYPE_NAMES}; these are")):
            unpack24(odd_values, positions, odd_scale)
    without = "values of a packed weight are float64, float32, bfloat16 or float16, these"
    with pytest.raises(ValueError, match=without):
        unpack24(codes, positions)


def test_bits_a_weight_that_pages_name() -> None:
    assert bits_a_weight() == 9 and bits_a_weight(Grid("int8")) == bits_a_weight(Grid("fp8_e4m3")) == 5
    assert [bits_a_weight(Grid("int4", group)) for group in (None, 64, 32, 16)] == [3, 3.125, 3.25, 3.5]


@pytest.mark.parametrize("values", ["int3", 8, ["int8"], {}, ""])
def test_a_grid_that_is_not_known_is_refused(values: object) -> None:
    assert require_grid(None) is None and require_grid("int8") == Grid("int8")
    with pytest.raises(ValueError, match=f"values {values!r} is damaged or newer".replace("[", r"\[")):
        require_grid(values)


@pytest.mark.parametrize(("values", "group"), [("int4", 8), ("int4", 0), ("int4", "16"), ("int4", True), ("int8", 16)])
def test_a_group_that_no_kernel_takes_is_refused(values: str, group: object) -> None:
    assert require_grid("int4", 48) == Grid("int4", 48)
    with pytest.raises(ValueError, match=f"group_size {group!r} is damaged: with values int4 it is a multiple of 16"):
        require_grid(values, group)
