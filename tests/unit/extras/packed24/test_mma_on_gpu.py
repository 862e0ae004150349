"""The kernel for sparse tensor cores on a GPU that has them."""

from __future__ import annotations

import copy
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from sparseforge_ds.extras.packed24 import mma_kernel
from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.extras.packed24.mma_kernel import MOST_ROWS, ProductPlan, Tiling, mma24, ranked
from sparseforge_ds.extras.packed24.packed_linear import Packed24Linear
from sparseforge_ds.extras.packed24.staged_tiling import StagedTiling
from sparseforge_ds.packed_format.packed_values import GRIDS
from sparseforge_ds.packed_format.packing import pack24
from tests.tiny_models import tiny_llama, token_batch
from tests.unit.extras.packed24.test_cpu_kernel import packed, within_bound
from tests.unit.extras.packed24.test_linear24 import rounded

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def capable() -> None:
    if torch.version.hip or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs an NVIDIA GPU of compute capability 8.0")


def on_gpu(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, values, positions and a bias."""
    values, positions = packed(outputs, inputs, dtype)
    x = torch.randn(rows, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    return x.cuda(), values.cuda(), positions.cuda(), bias.cuda()


def right(y: Tensor, operands: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> bool:
    x, values, positions, bias = operands
    return within_bound(y.cpu(), x.cpu(), values.cpu(), positions.cpu(), None if bias is None else bias.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(130, 448), (67, 1088), (1, 64), (4096, 4096), (512, 14336), (33, 28672)], ids=str)
def test_numbers_are_those_of_the_dense_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Behind `MOST_ROWS` Triton's kernel goes on."""
    for rows in (1, 2, 5, 8, 9, 16, 17, 25, 64):
        x, values, positions, bias = on_gpu(rows, *shape, dtype)
        assert (mma24(x, values, positions, bias) is not None) == (rows <= MOST_ROWS)
        for added in (bias, None):
            product = linear24(x, values, positions, added)
            assert right(product, (x, values, positions, added)), (rows, added is None)
            assert product.equal(linear24(x, values, positions, added))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("grid", "group"), [*((grid, None) for grid in GRIDS), ("int4", 32), ("int4", 64)])
def test_products_of_rounded_values_are_within_their_bound(grid: str, group: int | None, dtype: torch.dtype) -> None:
    for outputs, inputs in ((130, 448), (68, 1088), (4096, 4096)):
        values, positions, scale = (tensor.cuda() for tensor in rounded(outputs, inputs, grid, group))
        for rows in (1, 2, 5, 8, 9, 17, 25):
            x = torch.randn(rows, inputs).to(dtype).cuda()
            bias = torch.randn(outputs).to(dtype).cuda()
            y = mma24(x, values, positions, bias, scale)
            assert y is not None
            assert within_bound(*(tensor.cpu() for tensor in (y, x, values, positions, bias, scale))), (rows, inputs)


KINDS = [(None, None), *((grid, None) for grid in GRIDS), ("int4", 64)]
"""Grids of rounded values, and their groups."""
STAGED_SIZES = [
    pytest.param(((130, 448),), (33,), id="small"),
    pytest.param(((130, 448), (4096, 4096)), (33, 129, 256), id="all"),
]
"""Outputs and inputs, and rows."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("grid", "group"), KINDS)
@pytest.mark.parametrize(("shapes", "all_rows"), STAGED_SIZES)
def test_staged_products_are_within_their_bound(
    shapes: tuple[tuple[int, int], ...],
    all_rows: tuple[int, ...],
    grid: str | None,
    group: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARSEFORGE_STAGED", "1")
    for outputs, inputs in shapes:
        made = packed(outputs, inputs, dtype) if grid is None else rounded(outputs, inputs, grid, group)
        values, positions, *scales = (tensor.cuda() for tensor in made)
        scale = scales[0] if scales else None
        for rows in all_rows:
            x = torch.randn(rows, inputs).to(dtype).cuda()
            for bias in (torch.randn(outputs).to(dtype).cuda(), None):
                y = mma24(x, values, positions, bias, scale)
                assert y is not None and y.equal(linear24(x, values, positions, bias, scale))
                on_cpu = (tensor if tensor is None else tensor.cpu() for tensor in (values, positions, bias, scale))
                assert within_bound(y.cpu(), x.cpu(), *on_cpu), (rows, inputs)


def test_every_kind_of_staged_tiling_is_right() -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    memory = mma_kernel.shared_memory_limit(0)
    for rows, outputs, inputs in ((60, 999, 4160), (120, 1000, 4096), (250, 264, 2048)):
        x, values, positions, bias = operands = on_gpu(rows, outputs, inputs, torch.bfloat16)
        kinds: dict[tuple[int, int], StagedTiling] = {}
        for tiling in ranked(rows, outputs, inputs, processors, memory):
            assert isinstance(tiling, StagedTiling)
            kinds.setdefault((tiling.WM, tiling.WR), tiling)
        for tiling in kinds.values():
            y = x.new_full((rows, outputs), torch.nan)
            ProductPlan(tiling, rows, outputs, inputs, x.dtype, 0)(x, values, positions, bias, y)
            assert right(y, operands), tiling


def test_every_kind_of_tiling_is_right() -> None:
    """Try the tilings that the rule knows, beside those that it takes here."""
    properties = torch.cuda.get_device_properties(0)
    memory = mma_kernel.shared_memory_limit(0)
    sizes = ((2, 999, 4160), (3, 1000, 4096), (8, 1000, 4096), (16, 1000, 4160), (24, 1000, 4160), (32, 264, 2048))
    for rows, outputs, inputs in sizes:
        x, values, positions, bias = operands = on_gpu(rows, outputs, inputs, torch.bfloat16)
        kinds: dict[tuple[bool, int], Tiling] = {}
        for tiling in ranked(rows, outputs, inputs, properties.multi_processor_count, memory):
            assert isinstance(tiling, Tiling)
            kinds.setdefault((tiling.parts > 1, tiling.WO), tiling)
        for tiling in kinds.values():
            y = x.new_full((rows, outputs), torch.nan)
            ProductPlan(tiling, rows, outputs, inputs, x.dtype, 0)(x, values, positions, bias, y)
            assert right(y, operands), tiling


def test_products_of_the_same_kernel_take_memory_of_their_own() -> None:
    tiling = Tiling(1, 8, 1, 1, 4, 4, 1)
    plans = []
    for inputs in (4096, 1024):
        plans.append((ProductPlan(tiling, 2, 64, inputs, torch.bfloat16, 0), on_gpu(2, 64, inputs, torch.bfloat16)))
    for plan, operands in (*plans, *plans):
        y = operands[0].new_empty(2, 64)
        plan(*operands, y)
        assert right(y, operands)


@pytest.mark.parametrize("inputs", [4096, 14336])
def test_first_call_and_all_others_may_be_in_a_graph(inputs: int) -> None:
    mma_kernel.plan_product.cache_clear()
    mma_kernel.load_module.cache_clear()
    x, values, positions, bias = on_gpu(3, 256, inputs, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear24(x, values, positions, bias)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert right(y, (x, values, positions, bias))


def test_a_product_runs_on_the_current_stream_of_a_new_thread() -> None:
    operands = on_gpu(2, 300, 4096, torch.float16)
    products = []
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            operands[0].mul_(2)
            products.append(linear24(*operands))
            torch.cuda.current_stream().synchronize()

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert right(products[0], operands)


def test_views_may_begin_anywhere() -> None:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)

    x, values, positions, bias = on_gpu(4, 48, 192, torch.bfloat16)
    expected = linear24(x, values, positions, bias)
    assert linear24(moved(x), moved(values), moved(positions), moved(bias)).equal(expected)
    assert linear24(x.t().contiguous().t(), values, positions, bias).equal(expected)
    assert linear24(x.view(2, 1, 2, 192), values, positions, bias).equal(expected.view(2, 1, 2, 48))


@torch.no_grad()
def test_logits_of_a_packed_llama_are_as_exact_as_dense_ones() -> None:
    model = tiny_llama(hidden_size=256, intermediate_size=448).eval()
    for layer in model.model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.view(layer.out_features, -1, 4)[..., 1:3] = 0
    exact = copy.deepcopy(model).double()
    dense = copy.deepcopy(model).bfloat16().cuda()
    for name, layer in list(model.bfloat16().model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.model.set_submodule(name, Packed24Linear(*pack24(layer.weight, -1), layer.bias))
    tokens = token_batch(batch=1, length=8)["input_ids"]
    expected = exact(tokens).logits
    errors = [
        float((network(tokens.cuda()).logits.cpu().double() - expected).norm() / expected.norm())
        for network in (model.cuda(), dense)
    ]
    assert errors[0] <= 1.5 * errors[1] <= 0.1, errors
