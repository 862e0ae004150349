"""Element-wise chains as one kernel each: compiled on accelerators, on a CPU step by step (eager) by default.

A fused function is ordinary torch code, and that is what runs where it is not compiled. Both ways give the same bits on
a CPU, sums excepted, whose order differs. To that end a body uses only operations that vector and scalar code round
alike: `exact_lerp` is written out, because `torch.lerp` may or may not be a fused multiply-add, and an exponential is
taken in fp64 and rounded once. On an accelerator Triton is told to contract no multiply-add either; its divisions and
exponentials may still differ from a CPU's in their last bit. Devices of one kind agree.

A compiled function is a torch operator of its own, `sparseforge::<name>`: on fake tensors it gives shapes without being
compiled, and whoever counts operations sees the one kernel that it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

P = ParamSpec("P")
R = TypeVar("R")

VARIANTS = 64
"""Most graphs of one function: patterns, dtypes, with or without a curvature. Sizes and rates are not among them."""
_OPTIONS = {
    # Members of a group are stored where they belong, not selected again element by element.
    "max_complex_pointwise_cat_inputs": 0,
    "max_pointwise_cat_inputs": 0,
    "max_fusion_size": 512,
    "cpp.max_horizontal_fusion_size": 512,
    # Triton contracts a * b + c to one rounding otherwise, which neither a CPU nor the step-by-step code does.
    "emulate_precision_casts": True,
}
ROW = 4096
"""Elements that compiled code sums first: a power of 2, of which a chunk has no more than a few thousand."""
KERNELS: dict[str, int] = {}
"""Kernels that the compiler makes of each fused function, by name."""
READS: dict[str, int] = {}
"""Times that the kernels of each fused function read its operands, by name."""
TRITON_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of a Triton kernel of ours: a * b + c is not contracted to one rounding, as on a CPU and in eager code."""
UNREAD: dict[str, tuple[str, ...]] = {}
"""Arguments that an operator of the package writes and does not read, by its name."""
_wanted: bool | None = None


@contextmanager
def compiled(on: bool | None) -> Iterator[None]:
    """Compile everywhere (True), nowhere (False), or on accelerators only (None, the default).

    False also leaves out Triton kernels of our own, so that one switch tells whether a kernel is at fault.
    """
    global _wanted
    before = _wanted
    _wanted = on
    try:
        yield
    finally:
        _wanted = before


def is_compiled(device: torch.device) -> bool:
    """Return True if fused functions are compiled for tensors on `device`."""
    return device.type not in ("cpu", "meta") if _wanted is None else _wanted


def has_triton(device: torch.device) -> bool:
    """Return True if Triton kernels of our own run on a device: on a GPU or in Triton's interpreter, see `compiled`."""
    return _wanted is not False and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def launches(*, writes: tuple[str, ...], unread: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Any]:
    """Make a function that launches one Triton kernel an operator, `sparseforge::<name>`.

    Args:
        writes: arguments that it changes.
        unread: those of them that it does not read.
    """

    def decorate(function: Callable[..., None]) -> Any:
        name = function.__name__.strip("_")
        operator = torch.library.custom_op(f"sparseforge::{name}", function, mutates_args=writes)
        operator.register_fake(lambda *args: None)
        UNREAD[name] = unread
        return operator

    return decorate


def fused(
    *, writes: tuple[str, ...] = (), kernels: int = 1, reads: int = 1
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a function whose first argument is a tensor into a few kernels where that is on.

    Sizes, integers and floats may differ from call to call without compiling anew; flags, None and dtypes make another
    graph. A failure to compile is the compiler's own error and never a slower run.

    Args:
        writes: names of the arguments that it changes in place. It returns no argument and no view of one.
        kernels: that the compiler makes of it, which a test counts.
        reads: times that these kernels read the large operands.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @cache  # the compiler is imported when it is first needed
        def one_kernel() -> Callable[..., R]:
            import torch._inductor

            known = torch._inductor.list_options()
            options: Any = {name: value for name, value in _OPTIONS.items() if name in known}
            return torch.compile(function, dynamic=True, fullgraph=True, options=options)

        def run(*args: Any, **kwargs: Any) -> Any:
            device = args[0].device
            operands = [_with_tensors(value, device, str(number)) for number, value in enumerate(args)]
            named = {key: _with_tensors(value, device, key) for key, value in kwargs.items()}
            recompile_limit, duck_shapes = compiler_settings()
            # Compile even inside hooks, where `zero.layer_hooks.uncompiled` makes the model run in eager mode.
            with recompile_limit, duck_shapes, torch.compiler.set_stance("default"):
                return one_kernel()(*operands, **named)

        # An operator of its own is what graphs of a caller and fake tensors can see.
        schema = torch.library.infer_schema(function, mutates_args=writes)
        KERNELS[function.__name__.strip("_")] = kernels
        READS[function.__name__.strip("_")] = reads
        name = f"sparseforge::{function.__name__.strip('_')}"
        operator = torch.library.custom_op(name, run, mutates_args=writes, schema=schema)
        operator.register_fake(function)

        @wraps(function)
        def either(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0]
            assert isinstance(first, Tensor)
            called: Callable[..., R] = operator if is_compiled(first.device) else function
            return called(*args, **kwargs)

        return either

    return decorate


@cache  # each that is made leaves something behind in torch for good
def compiler_settings() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the compiler's settings for our functions: a limit of graphs, and no graph for equal sizes."""
    import torch._dynamo
    import torch.fx.experimental._config

    # A square matrix has equal sizes by chance, and would get a graph of its own. (mypy does not see what torch adds to
    # this module at import.)
    duck_shapes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    return torch._dynamo.config.patch(recompile_limit=VARIANTS), duck_shapes


def _with_tensors(value: Any, device: torch.device, argument: str) -> Any:
    """Replace the floats of an argument by tensors."""
    if isinstance(value, list):
        return [_with_tensors(item, device, f"{argument}[{number}]") for number, item in enumerate(value)]
    return _scalar(value, device, argument) if isinstance(value, float) else value


@lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device, argument: str) -> Tensor:
    """Return a rate as a () fp64 tensor, so that a new value needs no new graph.

    torch before 2.13 compiles a graph for every value of a float, in seconds each, and ends the run after `VARIANTS` of
    them. Two arguments of equal value get two tensors, because a graph depends on which arguments are the same tensor.
    Use it with fp32 or fp64 operands: a sum with bf16 would round it.
    """
    return torch.full((), value, dtype=torch.float64, device=device)


def row_sums(values: Sequence[Tensor]) -> Tensor:
    """Return (k, rows) sums of k tensors of (n,), to be summed once more outside; a part of a fused function.

    The compiler decides by the first size that it meets how many multiprocessors share a sum. It then uses that graph
    for all sizes, in later processes too: after a small matrix, one multiprocessor would sum up a large one. Rows of a
    fixed length divide the work at any size. Uncompiled, there is one row.
    """
    if not torch.compiler.is_compiling():
        return torch.stack([value.sum() for value in values])[:, None]
    return torch.stack([in_rows(value, ROW).sum(dim=1) for value in values])


def in_rows(values: Tensor, length: int) -> Tensor:
    """Fold (n, ...) into (rows, length, ...), padded with zeros at the end; a part of a fused function."""
    # One row more than there must be: a single row would be a graph of its own.
    padding = length + -values.shape[0] % length
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, padding)).view(-1, length, *values.shape[1:])
