"""The operator by its reference: what torch asks of an operator, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.mask.packing import pack24, unpack24


def packed(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    weight = torch.randn(outputs, inputs)
    weight.view(outputs, -1, 4).scatter_(-1, torch.rand(outputs, inputs // 4, 4).argsort(-1)[..., :2], 0.0)
    return pack24(weight.to(dtype), -1)


def test_torch_accepts_the_operator() -> None:
    x = torch.randn(3, 20, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    for arguments in ((x, *packed(6, 20), bias), (x, *packed(6, 20))):
        torch.library.opcheck(linear24, arguments)


@pytest.mark.parametrize("rows", [(2, 3), (3,), ()])
def test_gradients_are_those_of_the_dense_layer(rows: tuple[int, ...]) -> None:
    values, positions = packed(6, 20)
    x, bias = torch.randn(*rows, 20, requires_grad=True), torch.randn(6, requires_grad=True)
    found = linear24(x, values, positions, bias)
    expected = torch.nn.functional.linear(x, unpack24(values, positions), bias)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn(*rows, 6)
    for one, other in zip(
        torch.autograd.grad(found, (x, bias), gradient), torch.autograd.grad(expected, (x, bias), gradient), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_a_dense_layer(dtype: torch.dtype) -> None:
    values, positions = packed(6, 20)
    x, bias = torch.randn(3, 20), torch.randn(6)
    with torch.autocast("cpu", dtype):
        found = linear24(x, values, positions, bias)
        expected = torch.nn.functional.linear(x, unpack24(values, positions), bias)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_compiled_whole_with_its_gradient() -> None:
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
    given = {"x": torch.randn(3, 20), "values": values, "positions": positions, "bias": None} | change
    with pytest.raises(ValueError, match=message):
        linear24(*given.values())
