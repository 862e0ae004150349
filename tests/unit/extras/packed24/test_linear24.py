"""The operator by its reference: what torch asks of an operator, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from sparseforge_ds.extras.packed24.linear24 import linear24, linear24_on_gpu, note_exact_inputs
from sparseforge_ds.packed_format.packed_values import DTYPE_NAMES, GRIDS, Grid, round_values
from sparseforge_ds.packed_format.packing import pack24, unpack24


def packed(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    weight = torch.randn(outputs, inputs)
    weight.view(outputs, -1, 4).scatter_(-1, torch.rand(outputs, inputs // 4, 4).argsort(-1)[..., :2], 0.0)
    return pack24(weight.to(dtype), -1)


def rounded(outputs: int, inputs: int, grid: str, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return rounded values, their positions and scales, of rows of many sizes; `group` is for int4, where it fits."""
    values, positions = packed(outputs, inputs)
    group = group if grid == "int4" and group is not None and inputs // 2 % group == 0 else None
    codes, scale = round_values(values * torch.logspace(-3, 2, outputs)[:, None], -1, Grid(grid, group))
    return codes, positions, scale


def test_torch_accepts_the_operator() -> None:
    x = torch.randn(3, 20, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    codes, positions, scale = rounded(6, 20, "int8")
    pairs, pair_positions, scales = rounded(6, 20, "int4")
    for arguments in (
        (x, *packed(6, 20), bias),
        (x, *packed(6, 20)),
        (x, codes, positions, bias, scale),
        (x, pairs, pair_positions, bias, scales),
    ):
        torch.library.opcheck(linear24, arguments)


@pytest.mark.parametrize("grid", [None, *GRIDS])
@pytest.mark.parametrize("rows", [(2, 3), (3,), ()])
def test_gradients_are_those_of_the_dense_layer(rows: tuple[int, ...], grid: str | None) -> None:
    values, positions, scale = (*packed(6, 20), None) if grid is None else rounded(6, 20, grid)
    x = torch.randn(*rows, 20, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    product = linear24(x, values, positions, bias, scale)
    expected = torch.nn.functional.linear(x, unpack24(values, positions, scale), bias)
    torch.testing.assert_close(product, expected)
    gradient = torch.randn(*rows, 6)
    for actual, other in zip(
        torch.autograd.grad(product, (x, bias), gradient),
        torch.autograd.grad(expected, (x, bias), gradient),
        strict=True,
    ):
        torch.testing.assert_close(actual, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_a_dense_layer(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20)
    bias = torch.randn(6)
    for values, positions, *scale in (packed(6, 20), rounded(6, 20, "int8"), rounded(6, 20, "int4")):
        with torch.autocast("cpu", dtype):
            product = linear24(x, values, positions, bias, *scale)
            expected = torch.nn.functional.linear(x, unpack24(values, positions, *scale), bias)
        assert product.dtype == expected.dtype == dtype
        assert (product - expected).float().norm() <= 0.01 * expected.float().norm()  # scales are not rounded to dtype


def test_autocast_leaves_float64_alone_as_torch_does() -> None:
    x = torch.randn(3, 20, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    values, positions = packed(6, 20)
    values = values.double()
    dense = unpack24(values, positions)
    with torch.autocast("cpu", torch.bfloat16):
        product = linear24(x, values, positions, bias)
        expected = torch.nn.functional.linear(x, dense, bias)
        # Other operands are cast, and do not fit.
        for operands in ((x.float(), values, bias), (x, values.float(), bias), (x.float(), values.float(), bias)):
            with pytest.raises(RuntimeError):
                torch.nn.functional.linear(operands[0], unpack24(operands[1], positions), operands[2])
            with pytest.raises((ValueError, RuntimeError)):
                linear24(operands[0], operands[1], positions, operands[2])
    assert product.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(product, expected)


def test_a_product_compiles_to_one_graph_with_its_gradient() -> None:
    values, positions = packed(6, 20)
    x = torch.randn(3, 20, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return 2 * linear24(x, values, positions)

    (compiled,) = torch.autograd.grad(torch.compile(twice, fullgraph=True, backend="aot_eager")(x).sum(), x)
    torch.testing.assert_close(compiled, torch.autograd.grad(twice(x).sum(), x)[0])


def test_a_packed_weight_is_not_trained() -> None:
    values, positions = packed(6, 20)
    with pytest.raises(ValueError, match="packed 2:4 weight cannot be trained"):
        linear24(torch.randn(3, 20), values.requires_grad_(), positions)
    codes, positions, scale = rounded(6, 20, "int8")
    with pytest.raises(ValueError, match="packed 2:4 weight cannot be trained"):
        linear24(torch.randn(3, 20), codes, positions, None, scale.requires_grad_())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(3, 16)}, "x of shape .3, 16. does not end in the weight's 20 inputs"),
        ({"x": torch.randn(3, 20).bfloat16()}, "dtypes differ: x .*[bB][fF]loat16, values .*[fF]loat"),
        ({"x": torch.randn(3, 20, device="meta")}, "devices differ: x meta, values cpu"),
        ({"values": torch.randn(6, 14)}, "no weight that is packed along its last axis"),
        (
            {"positions": torch.zeros(6, 3, dtype=torch.int8)},
            "positions are uint8|.Char. are no weight",
        ),
        ({"bias": torch.randn(5)}, "bias of shape .5,?. does not fit 6 outputs"),
    ],
)
def test_what_does_not_belong_together_is_named(change: dict[str, Tensor], message: str) -> None:
    values, positions = packed(6, 20)
    operands = {"x": torch.randn(3, 20), "values": values, "positions": positions, "bias": None} | change
    with pytest.raises(ValueError, match=message):
        linear24(*operands.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.ones(6)}, r"scales of shape .6,. do not fit values of shape .6, 10., one a row is .6, 1."),
        ({"scale": torch.ones(5, 1)}, r"scales of shape .5, 1. do not fit"),
        ({"scale": torch.ones(6, 1).double()}, re.escape(f"values are {DTYPE_NAMES}; these are ") + ".*8, .*64"),
        ({"values": torch.randn(6, 10)}, re.escape(f"values are {DTYPE_NAMES}; these are")),
        ({"values": torch.ones(6, 10, dtype=torch.uint8)}, re.escape(f"values are {DTYPE_NAMES}; these are")),
        ({"values": torch.ones(6, 10).to(torch.float8_e5m2)}, re.escape(f"values are {DTYPE_NAMES}; these are")),
        ({"scale": None}, "values is torch.int8; packed weights and what they multiply are float64"),
        ({"scale": torch.ones(6, 1, device="meta")}, "devices differ: .*scale meta"),
        ({"scale": torch.ones(6, 1).to_sparse()}, "operands are dense tensors, here: scale torch.sparse_coo"),
        ({"bias": torch.randn(6).bfloat16()}, "dtypes differ: x torch.float32, bias torch.bfloat16"),
        ({"x": torch.ones(3, 20, dtype=torch.int8)}, "x is torch.int8; packed weights and what they multiply are"),
    ],
)
def test_scales_that_do_not_fit_are_named(change: dict[str, Tensor | None], message: str) -> None:
    codes, positions, scale = rounded(6, 20, "int8")
    operands = {"x": torch.randn(3, 20), "values": codes, "positions": positions, "bias": None, "scale": scale} | change
    with pytest.raises(ValueError, match=message):
        linear24(*operands.values())


@pytest.mark.parametrize("shape", [(6,), (1, 64), (6, 3), (6, 8), (5, 2), (6, 0), (6, 64), (6, 128)])
def test_groups_of_int4_that_do_not_divide_a_row_are_named(shape: tuple[int, ...]) -> None:
    """Give other numbers of scales than 1, 2 and 4, which fit a row of 64 values."""
    values, positions, scale = rounded(6, 128, "int4", 16)
    x = torch.randn(3, 128)
    assert scale.shape == (6, 4) and linear24(x, values, positions, None, scale).shape == (3, 6)
    with pytest.raises(ValueError, match="scales of shape .* do not fit values of .*, one (a row|for 32) is"):
        linear24(x, values, positions, None, torch.ones(shape, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="no weight that is packed along its last axis"):
        linear24(x, values[:, :-2], positions, None, scale)


def test_a_product_that_does_not_round_inputs_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPARSEFORGE_CPU_ACTIVATIONS", "int8")
    note_exact_inputs.cache_clear()
    values = torch.ones(3, 4, dtype=torch.float64)  # which no GPU kernel takes
    positions = torch.full((3, 1), 0b01000100, dtype=torch.uint8)
    for _ in range(2):
        linear24_on_gpu(torch.ones(5, 8, dtype=torch.float64), values, positions)
    note_exact_inputs.cache_clear()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "SPARSEFORGE_CPU_ACTIVATIONS=int8: only the kernel for CPUs rounds inputs" in message
