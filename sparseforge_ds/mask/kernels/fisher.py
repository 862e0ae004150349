"""Squared gradients per token of large layers and of mixtures of experts (`mask.curvature`), in bounded memory.

Legend of shape suffixes: T tokens, S rows sorted by expert, E experts, O outputs, I inputs, N either of them,
H matrices that are stacked in an expert's weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sparseforge_ds.mask.curvature import token_fisher
from sparseforge_ds.mask.kernels.fusing import TRITON_OPTIONS, fused, has_triton, in_rows, is_compiled, launches

EXPERT_BYTES = 1 << 28
"""Most bytes of sums of squares that exist at a time, where a weight holds many experts."""
TOKEN_BYTES = 1 << 26
"""Most bytes of squares of a layer's inputs and gradients that exist at a time."""
SQUARED_TOKENS = 4
"""Tokens whose squares a program of our own sums."""
SQUARED_FEATURES = 512
"""Features of those tokens that it reads at a time."""
SUMMED_FEATURES = 64
"""Features that a program of our own sums over all tokens."""
TOKENS_AT_ONCE = 64
"""Tokens of those features that it reads at a time."""
SUMMED_TOKENS = 128
"""Tokens whose squares compiled code sums first."""


class InputSquares:
    """|x_t|^2 of the newest input, which layers side by side share (q, k and v; gate and up)."""

    def __init__(self) -> None:
        self._storage: StorageWeakRef | None = None
        self._view: tuple[object, ...] = ()
        self._square_T: Tensor | None = None

    def get(self, input_TI: Tensor) -> Tensor | None:
        """Return (T,) fp32 of an input if it is the newest one, unchanged since; else None."""
        # The number of a storage that is held weakly is not given to another one.
        is_same = self._storage is not None and self._storage.cdata == input_TI.untyped_storage()._cdata
        return self._square_T if is_same and self._view == self._view_of(input_TI) else None

    def set(self, input_TI: Tensor, square_T: Tensor) -> None:
        """Remember the squares of an input, and not the input: its memory is free when its layers are done."""
        self._storage = StorageWeakRef(input_TI.untyped_storage())  # type: ignore[no-untyped-call]
        self._view = self._view_of(input_TI)
        self._square_T = square_T

    @staticmethod
    def _view_of(input_TI: Tensor) -> tuple[object, ...]:
        return input_TI.storage_offset(), input_TI.shape, input_TI.stride(), input_TI.dtype, input_TI._version


def add_fisher_sums(
    grad_TO: Tensor,
    input_TI: Tensor,
    factor: float,
    output_O: Tensor,
    input_I: Tensor,
    *,
    squares: InputSquares | None = None,
) -> None:
    """Add `curvature.fisher_sums` of a layer's tokens.

    Args:
        grad_TO: (T, out) dL/dy.
        input_TI: (T, in) x.
        factor: by which both are multiplied.
        output_O: (out,) fp64, added to.
        input_I: (in,) fp64, added to.
        squares: what layers before this one left for those with the same input.
    """
    if has_triton(grad_TO.device):
        _add_in_two_launches(grad_TO, input_TI, factor, output_O, input_I, squares or InputSquares())
        return
    # Compiled code stores no squares, and takes all tokens at once.
    all_tokens = is_compiled(grad_TO.device)
    for tokens in (slice(None),) if all_tokens else _token_chunks(grad_TO, input_TI):
        row_sums, column_sums = fisher_sums(grad_TO[tokens], input_TI[tokens])
        output_O.add_(row_sums, alpha=factor)
        input_I.add_(column_sums, alpha=factor)


def _add_in_two_launches(
    grad_TO: Tensor, input_TI: Tensor, factor: float, output_O: Tensor, input_I: Tensor, squares: InputSquares
) -> None:
    """Do `add_fisher_sums` in one launch for the squares of tokens, and one for the sums over tokens."""
    tokens = len(grad_TO)
    if not tokens:
        return
    # Programs read features side by side.
    grad_TO = grad_TO if grad_TO.stride(1) == 1 else grad_TO.contiguous()
    input_TI = input_TI if input_TI.stride(1) == 1 else input_TI.contiguous()
    # Layers side by side have one input, whose squares the first of them leaves.
    input_square_T = squares.get(input_TI)
    is_known = input_square_T is not None
    square_T = torch.empty(1 if is_known else 2, tokens, device=grad_TO.device)
    _layer_squares(grad_TO, None if is_known else input_TI, square_T)
    if input_square_T is None:
        input_square_T = square_T[1]
        squares.set(input_TI, input_square_T)
    # Both sums over tokens.
    _layer_sums(grad_TO, input_TI, square_T[0], input_square_T, factor, output_O, input_I)


@launches(writes=("square_T",), unread=("square_T",))
def _layer_squares(grad_TO: Tensor, input_TI: Tensor | None, square_T: Tensor) -> None:
    from sparseforge_ds.mask.kernels import layer_programs

    second = grad_TO if input_TI is None else input_TI
    tokens, outputs = grad_TO.shape
    grid = (-(-tokens // SQUARED_TOKENS), 1 if input_TI is None else 2)
    with torch.cuda.device(grad_TO.get_device()):
        layer_programs.token_squares[grid](
            grad_TO,
            second,
            grad_TO.stride(0),
            second.stride(0),
            square_T,
            tokens,
            outputs,
            second.shape[1],
            TOKENS=SQUARED_TOKENS,
            FEATURES=SQUARED_FEATURES,
            **TRITON_OPTIONS,
        )


@launches(writes=("output_O", "input_I"))
def _layer_sums(
    grad_TO: Tensor,
    input_TI: Tensor,
    grad_square_T: Tensor,
    input_square_T: Tensor,
    factor: float,
    output_O: Tensor,
    input_I: Tensor,
) -> None:
    from sparseforge_ds.mask.kernels import layer_programs

    tokens, outputs = grad_TO.shape
    inputs = input_TI.shape[1]
    grid = (-(-outputs // SUMMED_FEATURES) + -(-inputs // SUMMED_FEATURES),)
    with torch.cuda.device(grad_TO.get_device()):
        layer_programs.add_weighted_squares[grid](
            grad_TO,
            input_TI,
            grad_TO.stride(0),
            input_TI.stride(0),
            grad_square_T,
            input_square_T,
            output_O,
            input_I,
            factor,
            tokens,
            outputs,
            inputs,
            TOKENS=TOKENS_AT_ONCE,
            FEATURES=SUMMED_FEATURES,
            **TRITON_OPTIONS,
        )


def _token_squares(values_TN: Tensor) -> Tensor:
    """Return (T,) fp32 |v_t|^2."""
    return values_TN.float().square().sum(dim=1)


token_squares = fused()(_token_squares)


def _sum_squares(values_TN: Tensor, scale_T: Tensor) -> Tensor:
    """Return (N,) fp32 sum_t v_tn^2 scale_t."""
    square_TN = values_TN.float().square()
    if not torch.compiler.is_compiling():
        return square_TN.t() @ scale_T
    # A product with a vector would be a kernel of its own. Of fixed numbers of tokens first: see `row_sums`.
    return in_rows(square_TN * scale_T[:, None], SUMMED_TOKENS).sum(dim=1).sum(dim=0)


@fused(kernels=6, reads=2)
def fisher_sums(grad_TO: Tensor, input_TI: Tensor) -> list[Tensor]:
    """Return (out,) and (in,) fp32 `curvature.fisher_sums`, by one call: it costs the host more than a kernel."""
    row_sums = _sum_squares(grad_TO, _token_squares(input_TI))
    column_sums = _sum_squares(input_TI, _token_squares(grad_TO))
    return [row_sums, column_sums]


def expert_fisher_sums(grad_SO: Tensor, input_SI: Tensor, stop_E: Tensor, stacked: int = 1) -> tuple[Tensor, Tensor]:
    """Return `curvature.fisher_sums` of every expert, over the rows that belong to it, of each of its stacked matrices.

    Args:
        grad_SO: (S, out) dL/dy, rows sorted by expert.
        input_SI: (S, in) x.
        stop_E: (E,) one past the last row of each expert.
        stacked: matrices that lie one above the other in an expert's weight (gate and up), of equal height.

    Returns:
        (E, stacked, out / stacked) and (E, stacked, in) fp32; zeros where an expert has no row.
    """
    experts = len(stop_E)
    row_EO = grad_SO.new_zeros(experts, grad_SO.shape[1], dtype=torch.float32)
    column_EHI = input_SI.new_zeros(experts, stacked, input_SI.shape[1], dtype=torch.float32)
    for chunk in _token_chunks(grad_SO, input_SI):
        chunk_SO = grad_SO[chunk]
        chunk_SI = input_SI[chunk]
        # How many rows of the chunk belong to each expert.
        last_E = stop_E.clamp(chunk.start, chunk.start + len(chunk_SO)) - chunk.start
        length_E = torch.diff(last_E, prepend=last_E.new_zeros(1))
        row_EO += _sums_by_expert(weighted_squares(chunk_SO, token_squares(chunk_SI)), length_E)
        half_SHN = chunk_SO.view(len(chunk_SO), stacked, -1)
        for half in range(stacked):
            weighted_SI = weighted_squares(chunk_SI, token_squares(half_SHN[:, half]))
            column_EHI[:, half] += _sums_by_expert(weighted_SI, length_E)
    return row_EO.view(experts, stacked, -1), column_EHI


@fused()
def weighted_squares(values_SN: Tensor, scale_S: Tensor) -> Tensor:
    """Return (S, N) fp32 v_sn^2 scale_s."""
    return values_SN.float().square() * scale_S[:, None]


def _sums_by_expert(values_SN: Tensor, length_E: Tensor) -> Tensor:
    """Sum (E, N) over each expert's rows, in the order of the rows; atomics would add in any order."""
    return torch.segment_reduce(values_SN, "sum", lengths=length_E.long(), axis=0, unsafe=True)


def _token_chunks(grad_TO: Tensor, input_TI: Tensor) -> Iterator[slice]:
    """Yield chunks of tokens whose fp32 squares take about `TOKEN_BYTES`."""
    length = max(1, TOKEN_BYTES // (4 * (grad_TO.shape[1] + input_TI.shape[1])))
    return (slice(start, start + length) for start in range(0, grad_TO.shape[0], length))


def experts_at_once(outputs: int, inputs: int) -> int:
    """Count the experts that `expert_fisher` sums together: as many as fit `EXPERT_BYTES`, at least one."""
    return max(1, EXPERT_BYTES // (4 * outputs * inputs))


def expert_fisher(
    grad_SO: Tensor, input_SI: Tensor, stop_E: Tensor, loss_scale: float = 1.0
) -> Iterator[tuple[int, Tensor]]:
    """Yield `token_fisher` of every expert, over the rows that belong to it, a few experts at a time.

    Args:
        grad_SO: (S, out) dL/dy times the loss scale, rows sorted by expert.
        input_SI: (S, in) x.
        stop_E: (E,) one past the last row of each expert.
        loss_scale: what the loss was multiplied by.

    Yields:
        Number of an expert, and (e, out, in) fp32 of it and those after it; zeros where an expert has no row. Their
        sizes depend on shapes alone.
    """
    outputs = grad_SO.shape[1]
    inputs = input_SI.shape[1]
    # Rows of each expert end where those of the next begin.
    bounds = [0, *stop_E.tolist()]
    together = experts_at_once(outputs, inputs)
    for first in range(0, len(stop_E), together):
        ends = bounds[first : first + together + 1]
        sum_EOI = grad_SO.new_zeros(len(ends) - 1, outputs, inputs, dtype=torch.float32)
        for expert, (start, stop) in enumerate(pairwise(ends)):
            if stop > start:
                sum_EOI[expert] = token_fisher(grad_SO[start:stop], input_SI[start:stop], loss_scale)
        yield first, sum_EOI
        del sum_EOI  # before the next one is formed
