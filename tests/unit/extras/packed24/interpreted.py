"""The Triton kernel under Triton's interpreter: a process of its own, as TRITON_INTERPRET=1 holds for a whole one.

TRITON_INTERPRET=1 python -m tests.unit.extras.packed24.interpreted
"""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparseforge_ds.extras.packed24.triton_kernel import (
    FEW_ROWS_OF_EXPERTS,
    Tile,
    divide_rows,
    multiply,
    triton24,
    triton_experts24,
    unpack,
)
from sparseforge_ds.packed_format.packed_values import GRIDS
from sparseforge_ds.packed_format.packing import unpack24
from tests.unit.extras.packed24.test_linear24 import packed, rounded

UNIT = {torch.float32: 2**-24, torch.float16: 2**-11}
"""Relative size of a rounding. The interpreter's bf16 product is wrong, for a dense one too."""


@given(
    rows=st.integers(0, 17),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 90),
    dtype=st.sampled_from(list(UNIT)),
    bias=st.booleans(),
    strided=st.booleans(),
    grid=st.sampled_from([None, *GRIDS]),
    scale_group=st.sampled_from([None, 16, 32]),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@example(
    rows=70, outputs=130, groups=43, dtype=torch.float16, bias=True, strided=False, grid=None, scale_group=None, seed=0
)
@example(
    rows=17, outputs=65, groups=64, dtype=torch.float32, bias=False, strided=True, grid=None, scale_group=None, seed=0
)
@example(
    rows=70,
    outputs=130,
    groups=43,
    dtype=torch.float16,
    bias=True,
    strided=False,
    grid="int8",
    scale_group=None,
    seed=0,
)
@example(
    rows=17,
    outputs=65,
    groups=64,
    dtype=torch.float32,
    bias=False,
    strided=True,
    grid="fp8_e4m3",
    scale_group=None,
    seed=0,
)
@example(
    rows=70, outputs=130, groups=48, dtype=torch.float16, bias=True, strided=False, grid="int4", scale_group=32, seed=0
)
@example(
    rows=2, outputs=5, groups=64, dtype=torch.float32, bias=True, strided=False, grid="int4", scale_group=16, seed=0
)
def within_the_bound_of_fp32_sums(
    rows: int,
    outputs: int,
    groups: int,
    dtype: torch.dtype,
    bias: bool,
    strided: bool,
    grid: str | None,
    scale_group: int | None,
    seed: int,
) -> None:
    """Against fp64: n products summed in fp32, in any order, scaled there, and one rounding to `dtype`.

    For the tensor cores int4 with scales of groups is scaled first, and rounded to `dtype` too.
    """
    torch.manual_seed(seed)
    if grid == "int4" and scale_group is not None:
        groups = -(-groups // (scale_group // 2)) * (scale_group // 2)
    # Operands of the case, which may be strided.
    inputs = 4 * groups
    packed_weight = packed(outputs, inputs, dtype) if grid is None else rounded(outputs, inputs, grid, scale_group)
    values, positions, *scale = packed_weight
    x = torch.randn(inputs, rows).T.to(dtype) if strided else torch.randn(rows, inputs).to(dtype)
    b = torch.randn(outputs).to(dtype) if bias else None
    product = triton24(x, values, positions, b, *scale)
    # The product in fp64, and the sum of absolute products, which the bound is made of.
    weight = unpack24(values, positions, *scale).double()
    exact = x.double() @ weight.T
    size = x.double().abs() @ weight.abs().T
    if b is not None:
        exact = exact + b.double()
        size = size + b.double().abs()
    bound = (2 * groups + 3) * 2**-24 * size + UNIT[dtype] * exact.abs() + 1e-7
    if grid == "int4" and scale_group is not None:
        bound += UNIT[dtype] * size + 6e-8 * x.double().abs().sum(-1, keepdim=True)  # and fp16 has a smallest number
    assert product.shape == exact.shape and product.dtype == dtype
    assert bool(((product.double() - exact).abs() <= bound).all()), (product.double() - exact).abs().max()


def experts_are_those_of_linear24() -> None:
    """Multiply each row by its own expert; one expert has none, and the last rows are nobody's."""
    for dtype, outputs, groups, runs in (
        (torch.float32, 19, 43, ((0, 0, 1), (1, 1, 6), (3, 6, 9))),
        (torch.float16, 8, 64, ((0, 0, 1), (1, 1, 6), (3, 6, 9))),
        (torch.float32, 70, 43, ((0, 0, 17), (1, 17, 65), (3, 65, 66))),
        (torch.float16, 65, 9, ((1, 0, 16), (2, 16, 50), (3, 50, 70))),
    ):
        # The same four experts unrounded, rounded by rows, and rounded in groups.
        weights = [packed(outputs, 4 * groups, dtype) for _ in range(4)]
        rounded_weights = [rounded(outputs, 4 * groups, "int8") for _ in range(4)]
        in_groups = [rounded(outputs, 4 * groups, "int4", 16) for _ in range(4)]
        # Where the rows of each expert end; one without rows ends where the one before it does.
        last = runs[-1][2]
        end_of_expert = {expert: end for expert, _, end in runs}
        ends = torch.tensor(
            [max([end for other, end in end_of_expert.items() if other <= expert], default=0) for expert in range(4)]
        )
        x = torch.randn(last + 2, 4 * groups).to(dtype)
        assert (len(x) > FEW_ROWS_OF_EXPERTS) == (last > 9)  # both kernels
        # Each run of rows by its own dense expert, and zeros behind the last run.
        for experts in (weights, rounded_weights, in_groups):
            values, positions, *scale = (torch.stack(parts) for parts in zip(*experts, strict=True))
            product = triton_experts24(x, values, positions, ends, *scale)
            dense = [unpack24(*parts).to(dtype) for parts in experts]
            expected = torch.cat([torch.nn.functional.linear(x[a:b], dense[expert]) for expert, a, b in runs])
            size = expected.abs().amax(0) + 1e-3
            torch.testing.assert_close(
                product[:last] / size, expected / size, atol=2e-3 if dtype == torch.float16 else 1e-5, rtol=0
            )
            assert product[last:].eq(0).all() and len(product) == len(x)


def parts_of_sums_are_added_up() -> None:
    """Give each of several programs some of the inputs; the last has fewer, or none."""
    for dtype, groups, splits, has_bias in (
        (torch.float16, 43, 2, True),
        (torch.float32, 64, 4, False),
        (torch.float16, 20, 4, True),
    ):
        values, positions = packed(70, 4 * groups, dtype)
        codes, code_positions, scale = rounded(70, 4 * groups, "fp8_e4m3")
        x = torch.randn(19, 4 * groups).to(dtype)
        y = torch.empty(19, 70, dtype=dtype)
        bias = torch.randn(70).to(dtype) if has_bias else None
        multiply(x, values, positions, bias, y, Tile(16, 64, 8, 4, 1, splits))
        torch.testing.assert_close(y, torch.nn.functional.linear(x, unpack24(values, positions), bias))
        multiply(x, codes, code_positions, bias, y, Tile(16, 64, 8, 4, 1, splits), scale)
        exact = torch.nn.functional.linear(
            x.float(), unpack24(codes, code_positions, scale), None if bias is None else bias.float()
        )
        torch.testing.assert_close(y.float(), exact, rtol=2e-3 if dtype == torch.float16 else 1e-4, atol=1e-2)


def unpacked_it_is_the_same_bits() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for outputs, groups in ((3, 1104), (5, 7), (1, 1024)):
            values, positions = packed(outputs, 4 * groups, dtype)
            assert unpack(values, positions).equal(unpack24(values, positions))
            for grid, group in (*((grid, None) for grid in GRIDS), ("int4", 16)):
                codes, offsets, scale = rounded(outputs, 4 * groups, grid, group)
                dense = unpack(codes, offsets, scale=scale, dtype=dtype)
                # The interpreter does not round to bf16, it cuts off.
                expected = unpack24(codes, offsets, scale, torch.float32 if dtype == torch.bfloat16 else dtype)
                if dtype == torch.bfloat16:
                    expected = (expected.view(torch.int32) & -65536).view(torch.float32).bfloat16()
                assert dense.equal(expected), (dtype, grid)


def views_may_begin_anywhere() -> None:
    values, positions = packed(9, 64, torch.float16)
    moved = torch.empty(values.numel() + 1, dtype=values.dtype)[1:].view_as(values).copy_(values)
    offsets = torch.empty(positions.numel() + 1, dtype=torch.uint8)[1:].view_as(positions).copy_(positions)
    x = torch.randn(2 * 64 + 1).half()[1:].view(2, 64)
    product = triton24(x, moved, offsets, None)
    torch.testing.assert_close(product, torch.nn.functional.linear(x, unpack24(values, positions)))


def biases_and_scales_may_be_strided() -> None:
    codes, positions, scale = rounded(9, 64, "int8")
    scale = torch.stack((scale, 2 * scale), 1)[:, 0]
    bias = torch.randn(18)[::2]
    assert not scale.is_contiguous() and not bias.is_contiguous()
    dense = unpack24(codes, positions, scale)
    for tile in (Tile(2, 4, 16, 4, 1), Tile(16, 64, 8, 4, 1), Tile(16, 64, 8, 4, 1, 2)):
        x = torch.randn(2, 64)
        y = torch.empty(2, 9)
        multiply(x, codes, positions, bias, y, tile, scale)
        torch.testing.assert_close(y - bias, torch.nn.functional.linear(x, dense), rtol=1e-4, atol=1e-2)
    assert unpack(codes, positions, scale=scale, dtype=torch.float32).equal(dense)


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=9), behind=st.integers(0, 9), most=st.integers(1, 32))
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
def runs_cover_every_row_once(counts: list[int], behind: int, most: int) -> None:
    ends = torch.tensor(counts).cumsum(0)
    runs = divide_rows(ends, int(ends[-1]) + behind, most).tolist()
    covered = [(row, expert) for expert, first, end in runs for row in range(first, min(end, first + most))]
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert sorted(covered) == list(enumerate(owners))


def runs_of_damaged_ends_stay_inside() -> None:
    """Damage ends, at which the host of a GPU does not look: programs read and write from `first` to `end`."""
    for ends in ([-5, 9, 3], [2**40, -(2**40), 7], [7, 0, 2**31]):
        for _, first, end in divide_rows(torch.tensor(ends), 7, 4).tolist():
            assert first >= 0 and end <= 7


if __name__ == "__main__":
    within_the_bound_of_fp32_sums()
    experts_are_those_of_linear24()
    parts_of_sums_are_added_up()
    unpacked_it_is_the_same_bits()
    views_may_begin_anywhere()
    biases_and_scales_may_be_strided()
    runs_cover_every_row_once()
    runs_of_damaged_ends_stay_inside()
