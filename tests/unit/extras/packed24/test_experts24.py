"""The operator of a mixture's experts: what torch asks of an operator, dense experts' numbers, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from sparseforge_ds.extras.packed24.experts24 import add_choices, experts24, sort_by_expert
from sparseforge_ds.packed_format.packed_values import DTYPE_NAMES, GRIDS
from sparseforge_ds.packed_format.packing import unpack24
from tests.unit.extras.packed24.test_linear24 import packed, rounded

ENDS = torch.tensor([2, 2, 5])
"""Expert 0 has two rows, 1 has none, 2 has three; of 7 rows, two belong to nobody."""


def experts(inputs: int = 20, grid: str | None = None, group: int | None = None) -> list[Tensor]:
    """Return (values, positions) of all experts; with a grid also their scales."""
    made = [packed(6, inputs) if grid is None else rounded(6, inputs, grid, group) for _ in ENDS]
    return [torch.stack(parts) for parts in zip(*made, strict=True)]


def dense(x: Tensor, values: Tensor, positions: Tensor, *scale: Tensor) -> Tensor:
    weight = unpack24(values, positions, *scale)
    return torch.cat((x[:2] @ weight[0].T, x[2:5] @ weight[2].T, x.new_zeros(2, 6)))


def multiply(x: Tensor, parts: list[Tensor], ends: Tensor = ENDS) -> Tensor:
    values, positions, *scale = parts
    y: Tensor = experts24(x, values, positions, ends, *scale)
    return y


def test_torch_accepts_the_operator() -> None:
    x = torch.randn(7, 20, requires_grad=True)
    codes, positions, scale = experts(grid="int8")
    for arguments in ((x, *experts(), ENDS), (x, codes, positions, ENDS, scale)):
        torch.library.opcheck(experts24, arguments)


@pytest.mark.parametrize(
    ("inputs", "grid", "group"), [*((20, grid, None) for grid in (None, *GRIDS)), (192, "int4", 16), (192, "int4", 48)]
)
def test_numbers_and_gradients_are_those_of_dense_experts(inputs: int, grid: str | None, group: int | None) -> None:
    x = torch.randn(7, inputs, requires_grad=True)
    parts = experts(inputs, grid, group)
    assert group is None or parts[2].shape == (3, 6, 96 // group)
    product = multiply(x, parts)
    expected = dense(x, *parts)
    torch.testing.assert_close(product, expected)
    gradient = torch.randn(7, 6)
    ours, of_dense = (torch.autograd.grad(y, x, gradient) for y in (product, expected))
    torch.testing.assert_close(ours, of_dense)
    assert multiply(x[:0], parts, torch.zeros(3, dtype=torch.long)).shape == (0, 6)


def test_experts_without_rows_are_not_read() -> None:
    values, positions = experts()
    values[1] = torch.nan
    assert experts24(torch.randn(7, 20), values, positions, ENDS).isfinite().all()


def test_experts_compile_to_one_graph_with_its_gradient() -> None:
    x = torch.randn(7, 20, requires_grad=True)
    operands = experts()

    def twice(x: Tensor) -> Tensor:
        return 2 * experts24(x, *operands, ENDS)

    graph = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch._dynamo.mark_dynamic(x, 0)  # refused where the operator binds a graph to 7 rows
    (compiled,) = torch.autograd.grad(graph(x).sum(), x)
    torch.testing.assert_close(compiled, torch.autograd.grad(twice(x).sum(), x)[0])


def test_choices_are_sorted_and_added_up() -> None:
    """Whoever is not among the experts is nobody, whose rows come last and are none's."""
    chosen = torch.tensor([[2, 0], [-1, 2], [0, 7], [1, 2]])
    of_rows, order, ends = sort_by_expert(chosen, 4)
    assert of_rows.tolist() == [0, 0, 1, 2, 2, 2, 4, 4] and ends.tolist() == [2, 3, 6, 6]
    assert chosen.reshape(-1)[order][:6].tolist() == of_rows[:6].tolist()
    shares = torch.rand(4, 2)
    told = torch.where(of_rows < 4, of_rows + 1.0, 0)[:, None]  # an expert says its number and one
    expected = (shares * torch.tensor([[3, 1], [0, 3], [1, 0], [2, 3]])).sum(1, keepdim=True)
    torch.testing.assert_close(add_choices(told, order, shares), expected)


def test_packed_experts_are_not_trained() -> None:
    values, positions = experts()
    with pytest.raises(ValueError, match="packed 2:4 experts cannot be trained; make the model dense"):
        experts24(torch.randn(7, 20), values.requires_grad_(), positions, ENDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.ones(3, 6, 1)}, re.escape(f"values are {DTYPE_NAMES}; these are")),
        ({"scale": torch.ones(3, 6)}, re.escape(f"values are {DTYPE_NAMES}; these are")),
        ({"x": torch.randn(7, 16)}, "x of shape .7, 16. does not end in the weight's 20 inputs"),
        ({"x": torch.randn(7, 20).bfloat16()}, "dtypes differ: x torch.bfloat16, values torch.float32"),
        ({"x": torch.randn(1, 7, 20)}, "are not rows and the packed weights of as many experts"),
        ({"ends": ENDS[:2]}, "ends .2,. are not rows and the packed weights of as many experts"),
        ({"values": torch.randn(3, 6, 14)}, "no weight that is packed along its last axis"),
    ],
)
def test_what_does_not_belong_together_is_named(change: dict[str, Tensor], message: str) -> None:
    values, positions = experts()
    operands = {"x": torch.randn(7, 20), "values": values, "positions": positions, "ends": ENDS} | change
    with pytest.raises(ValueError, match=message):
        experts24(*operands.values())
