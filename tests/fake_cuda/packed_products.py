"""The packed product on fake CUDA tensors: what it returns, which kernel it would launch, what the host waits for."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.fake_cuda.counting import Counter
from benchmarks.fake_cuda.engine import CUDA
from sparseforge_ds.extras.packed24 import alignment, triton_kernel, triton_programs
from sparseforge_ds.extras.packed24.packed_linear import Packed24Linear
from sparseforge_ds.packed_format.packed_values import GRIDS, SCALE_DTYPES, values_per_element

OUTPUTS, INPUTS = 200, 328
"""No multiple of any tile."""
ROWS = (1, 4, 5, 16, 17, 64, 65, 300)


class Launches:
    """Takes the place of a Triton kernel, which cannot be compiled for tensors without memory."""

    def __init__(self, name: str, log: list[dict[str, Any]]) -> None:
        self.name = name
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            tensors = [tensor for tensor in arguments if isinstance(tensor, Tensor)]
            assert all(tensor.device == CUDA and tensor.is_contiguous() for tensor in tensors)
            self.log.append({"kernel": self.name, "grid": grid, "sizes": arguments[len(tensors) :], **constants})

        return launch


def packed(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight of OUTPUTS x INPUTS."""
    values = torch.empty(OUTPUTS, INPUTS // 2 // values_per_element(dtype), dtype=dtype, device=CUDA)
    return values, torch.empty(OUTPUTS, -(-INPUTS // 8), dtype=torch.uint8, device=CUDA)


def products() -> dict[str, Any]:
    """Inside a FakeTensorMode. Each product with its result, the launch, and what the host waited for."""
    records: dict[str, Any] = {"shape": [OUTPUTS, INPUTS], "launches": [], "experts": [], "traced": None, "error": None}
    try:
        for dtype, grid in (
            (torch.float16, None),
            (torch.bfloat16, None),
            (torch.float32, None),
            (torch.bfloat16, "int8"),
            (torch.bfloat16, "int4"),
        ):
            for rows in ROWS:
                records["launches"].append(_launch(dtype, rows, grid))
        records["experts"] = [_launch_of_experts(rows) for rows in (triton_kernel.FEW_ROWS_OF_EXPERTS, 300)]
        records["traced"] = _traced()
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        records["error"] = traceback.format_exc()[-4000:]  # told by the test, while the worker goes on
    return records


def _launch(dtype: torch.dtype, rows: int, grid: str | None) -> dict[str, Any]:
    x = torch.empty(INPUTS, rows, dtype=dtype, device=CUDA).t()[None]  # not contiguous, three axes
    bias = torch.empty(OUTPUTS, dtype=dtype, device=CUDA)
    values, positions = packed(dtype if grid is None else GRIDS[grid])
    scale = None if grid is None else torch.empty(OUTPUTS, 1, dtype=SCALE_DTYPES[values.dtype], device=CUDA)
    product = partial(triton_kernel.triton24, x, values, positions, bias, scale)
    return {"rows": rows, "dtype": str(dtype), **_seen_in(product)}


def _launch_of_experts(rows: int) -> dict[str, Any]:
    values, positions = packed(torch.bfloat16)
    experts = 6
    of_all = [tensor.expand(experts, -1, -1).contiguous() for tensor in (values, positions)]
    x = torch.empty(rows, INPUTS, dtype=values.dtype, device=CUDA)
    ends = torch.empty(experts, dtype=int, device=CUDA)
    result = _seen_in(lambda: triton_kernel.triton_experts24(x, *of_all, ends))
    return {"rows": rows, "experts": experts, **result}


def _seen_in(product: Callable[[], Tensor]) -> dict[str, Any]:
    """Return a product's result, its one launch that reads the weight, and what the host waited for."""
    log: list[dict[str, Any]] = []
    with (
        mock.patch.object(triton_programs, "few_rows", Launches("few", log)),
        mock.patch.object(triton_programs, "many_rows", Launches("many", log)),
        mock.patch.object(triton_programs, "unpack", Launches("unpack", log)),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),  # a build without CUDA has no device
        mock.patch.object(alignment, "begins_at", lambda tensor, unit: True),  # nothing is in memory
        Counter() as counter,
        counter.phase() as cost,
    ):
        y = product()
    (launch,) = log
    return {
        "result": [str(y.dtype), list(y.shape), str(y.device), y.is_contiguous()],
        "waits": dict(cost.syncs + cost.uploads),
        "faults": cost.faults,
        **launch,
    }


def _traced() -> dict[str, Any]:
    """Return a layer and its gradient as torch.compile traces them, and in eager mode."""
    values, positions = packed(torch.bfloat16)
    layer = Packed24Linear(values, positions, torch.nn.Parameter(torch.empty(OUTPUTS, dtype=values.dtype, device=CUDA)))
    x = torch.empty(2, 3, INPUTS, dtype=values.dtype, device=CUDA, requires_grad=True)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        return y, torch.autograd.grad(y.sum(), x)[0]

    graph = make_fx(both)(x).graph
    with Counter() as counter, counter.phase() as cost:
        y, gradient = both(x)
        with torch.autocast("cuda", torch.float16):
            torch.set_autocast_enabled("cuda", True)  # which `autocast` leaves off in a build without CUDA
            cast = layer(x)
    return {
        "calls": [str(node.target) for node in graph.nodes if "sparseforge" in str(node.target)],
        "results": [[str(t.dtype), list(t.shape), str(t.device)] for t in (y, gradient, cast)],
        "waits": dict(cost.syncs + cost.uploads),
        "faults": cost.faults,
    }
