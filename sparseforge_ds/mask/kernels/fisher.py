"""Squared gradients per token of large layers and of mixtures of experts (`mask.curvature`), in bounded memory.

Legend of shape suffixes: T tokens, S rows sorted by expert, E experts, O outputs, I inputs, N either of them,
H matrices that are stacked in an expert's weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from sparseforge_ds.mask.curvature import token_fisher
from sparseforge_ds.mask.kernels.fusing import fused, in_rows, is_compiled

EXPERT_BYTES = 1 << 28
"""Most bytes of sums of squares that exist at a time, where a weight holds many experts."""
TOKEN_BYTES = 1 << 26
"""Most bytes of squares of a layer's inputs and gradients that exist at a time."""
SUMMED_TOKENS = 128
"""Tokens whose squares compiled code sums first."""


def add_fisher_sums(grad_TO: Tensor, input_TI: Tensor, factor: float, output_O: Tensor, input_I: Tensor) -> None:
    """Add `curvature.fisher_sums` of a layer's tokens.

    Args:
        grad_TO: (T, out) dL/dy.
        input_TI: (T, in) x.
        factor: by which both are multiplied.
        output_O: (out,) fp64, added to.
        input_I: (in,) fp64, added to.
    """
    # Compiled code stores no squares, and takes all tokens at once.
    all_tokens = is_compiled(grad_TO.device)
    for tokens in (slice(None),) if all_tokens else _token_chunks(grad_TO, input_TI):
        row_sums, column_sums = fisher_sums(grad_TO[tokens], input_TI[tokens])
        output_O.add_(row_sums, alpha=factor)
        input_I.add_(column_sums, alpha=factor)


def _token_squares(values_TN: Tensor) -> Tensor:
    """Return (T,) fp32 |v_t|^2."""
    return values_TN.float().square().sum(dim=1)


token_squares = fused()(_token_squares)


def _sum_squares(values_TN: Tensor, weight_T: Tensor) -> Tensor:
    """Return (N,) fp32 sum_t v_tn^2 weight_t."""
    square_TN = values_TN.float().square()
    if not torch.compiler.is_compiling():
        return square_TN.t() @ weight_T
    # A product with a vector would be a kernel of its own. Of fixed numbers of tokens first: see `row_sums`.
    return in_rows(square_TN * weight_T[:, None], SUMMED_TOKENS).sum(dim=1).sum(dim=0)


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
def weighted_squares(values_SN: Tensor, weight_S: Tensor) -> Tensor:
    """Return (S, N) fp32 v_sn^2 weight_s."""
    return values_SN.float().square() * weight_S[:, None]


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
