"""Diagonal curvature of the training loss (SparseForge, arXiv 2605.06402, section 3.1; design eq. 2).

Free functions on plain tensors. Who runs the probe and where the tensors live is `zero.probe`'s business.

Random numbers are counter-based: a sign depends on (seed, step, probe, weight, element) only, so that a probe is the
same on any number of ranks and at any ZeRO stage, and need never be stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.mask.fusing import fused, in_rows, is_compiled

EXPERT_BYTES = 1 << 28
"""Of the sums of squares that exist at a time, where a weight holds many experts."""
TOKEN_BYTES = 1 << 26
"""Of the squares of a layer's inputs and gradients that exist at a time."""

SUMMED_TOKENS = 128
"""Tokens whose squares compiled code sums first."""

# Odd constants of the splitmix64 finalizer (Steele et al., 2014), as signed 64-bit integers.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def counter_key(seed: int, step: int, probe: int, name: str) -> int:
    """A 63-bit key for one weight's random numbers in one probe."""
    text = f"{seed}/{step}/{probe}/{name}".encode()
    return (zlib.crc32(text) << 31) ^ zlib.adler32(text)


def counter_hash(key: int, index: Tensor) -> Tensor:
    """Well mixed int64 for every counter value: splitmix64 of `key + index * golden`.

    Args:
        key: from `counter_key`.
        index: (n,) int64 counters.
    """
    z = index * _GOLDEN + key
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def rademacher(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """(stop - start,) fp32 of +-1 for the elements start..stop of a weight."""
    index = torch.arange(start, stop, device=device, dtype=torch.int64)
    return ((counter_hash(key, index) & 1) * 2 - 1).float()


def rademacher_rows(key: int, first: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """(rows, columns) of +-1 in the dtype and on the device of `like`, for rows first..first + rows of any number.

    One hash gives 64 signs, by a table of what the 8 bits of a byte stand for: next to a matmul's output, a hash for
    every sign would cost more than the matmul.
    """
    words = -(-columns // 64)
    index = torch.arange(first * words, (first + rows) * words, device=like.device, dtype=torch.int64)
    byte_RB = counter_hash(key, index).view(torch.uint8).view(rows, words * 8)
    shift_8 = torch.arange(8, device=like.device)
    sign_V8 = ((torch.arange(256, device=like.device)[:, None] >> shift_8 & 1) * 2 - 1).to(like.dtype)
    return F.embedding(byte_RB.int(), sign_V8).view(rows, words * 64)[:, :columns]


def uniform(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """(stop - start,) fp32 in [0, 1) for the counters start..stop."""
    index = torch.arange(start, stop, device=device, dtype=torch.int64)
    return _shift(counter_hash(key, index), 40).float() * 2.0**-24


def sample_labels(logits_NV: Tensor, key: int, first: int, chunk: int = 1024) -> Tensor:
    """Draw one label a row from softmax(logits), for the Gauss-Newton estimate (labels from the model itself).

    Args:
        logits_NV: (N, V) logits.
        key: from `counter_key`.
        first: global number of the first row, which makes the draw independent of the number of ranks.
        chunk: rows whose fp32 probabilities exist at a time.

    Returns:
        (N,) int64.
    """
    labels = []
    for start in range(0, logits_NV.shape[0], chunk):
        rows = logits_NV[start : start + chunk].detach().float()
        cumulative = torch.softmax(rows, dim=1).cumsum(dim=1)
        stop = first + start + rows.shape[0]
        draw = uniform(key, first + start, stop, rows.device)[:, None] * cumulative[:, -1:]
        labels.append(torch.searchsorted(cumulative, draw, right=True).squeeze(1).clamp_(max=rows.shape[1] - 1))
    return torch.cat(labels)


def hutchinson_sample(difference: Tensor, sign: Tensor, radius: Tensor | float) -> Tensor:
    """One Hutchinson sample of the diagonal by a central gradient difference.

    With v Rademacher and g the gradient at w +- r v:  v (g(w + r v) - g(w - r v)) / 2r = v (H v) + O(r^2), whose mean
    over v is diag(H). Signed: clamping samples would bias the average upwards by the off-diagonal noise.

    Linear in its first argument, so that the two sides can be added one after the other.

    Args:
        difference: (n,) g(w + r v) - g(w - r v), or one of the two with its sign.
        sign: (n,) v.
        radius: r of this weight.
    """
    return difference * sign / (2 * radius)


def token_fisher(grad_TO: Tensor, input_TI: Tensor, loss_scale: float = 1.0) -> Tensor:
    """Sum over tokens of squared per-token gradients of a linear layer: (dL/dy)^2^T x^2, a weight-shaped matmul.

    Squares are formed in fp32. On an accelerator the matmul of a 16-bit layer takes them in bf16, whose range they
    need and whose rounding (2^-8) is far below the noise of the estimate: fp32 would miss the tensor cores.

    Args:
        grad_TO: (T, out) dL/dy, times the loss scale.
        input_TI: (T, in) x.
        loss_scale: what the loss was multiplied by.

    Returns:
        (out, in) fp32.
    """
    grad_square_OT = (grad_TO.float() / loss_scale).square().t()
    input_square_TI = input_TI.float().square()
    if input_TI.device.type != "cpu" and input_TI.dtype in (torch.bfloat16, torch.float16):
        return (grad_square_OT.bfloat16() @ input_square_TI.bfloat16()).float()
    return grad_square_OT @ input_square_TI


def add_fisher_sums(grad_TO: Tensor, input_TI: Tensor, factor: float, output_O: Tensor, input_I: Tensor) -> None:
    """Add row and column sums of `token_fisher`, without the matrix: sum_t g_to^2 |x_t|^2 and sum_t x_ti^2 |g_t|^2.

    Args:
        grad_TO: (T, out) dL/dy.
        input_TI: (T, in) x.
        factor: by which both are multiplied.
        output_O: (out,) fp64, added to.
        input_I: (in,) fp64, added to.
    """
    stored = not is_compiled(grad_TO.device)
    for rows in _token_chunks(grad_TO, input_TI) if stored else (slice(None),):
        of_output, of_input = fisher_sums(grad_TO[rows], input_TI[rows])
        output_O.add_(of_output, alpha=factor)
        input_I.add_(of_input, alpha=factor)


def _token_squares(values_TN: Tensor) -> Tensor:
    """(T,) fp32 |v_t|^2."""
    return values_TN.float().square().sum(dim=1)


token_squares = fused()(_token_squares)


def _sum_squares(values_TN: Tensor, weight_T: Tensor) -> Tensor:
    """(N,) fp32 sum_t v_tn^2 weight_t."""
    square_TN = values_TN.float().square()
    if not torch.compiler.is_compiling():
        return square_TN.t() @ weight_T
    # A product with a vector would be a kernel of its own. Of fixed numbers of tokens first: see `row_sums`.
    return in_rows(square_TN * weight_T[:, None], SUMMED_TOKENS).sum(dim=1).sum(dim=0)


@fused(kernels=6, reads=2)
def fisher_sums(grad_TO: Tensor, input_TI: Tensor) -> list[Tensor]:
    """(out,) and (in,) fp32: what `add_fisher_sums` adds, as one function, as a call costs the host more than a kernel
    costs a GPU."""
    of_output = _sum_squares(grad_TO, _token_squares(input_TI))
    return [of_output, _sum_squares(input_TI, _token_squares(grad_TO))]


def expert_fisher_sums(grad_SO: Tensor, input_SI: Tensor, stop_E: Tensor, stacked: int = 1) -> tuple[Tensor, Tensor]:
    """`add_fisher_sums` of every expert, over the rows that belong to it, of each of its stacked matrices.

    Args:
        grad_SO: (S, out) dL/dy, rows sorted by expert.
        input_SI: (S, in) x.
        stop_E: (E,) one past the last row of each expert.
        stacked: matrices that lie one above the other in an expert's weight (gate and up), of equal height.

    Returns:
        (E, stacked, out / stacked) and (E, stacked, in) fp32; zeros where an expert has no row.
    """
    experts, outputs, inputs = len(stop_E), grad_SO.shape[1], input_SI.shape[1]
    row_EO = grad_SO.new_zeros(experts, outputs, dtype=torch.float32)
    column_EHI = input_SI.new_zeros(experts, stacked, inputs, dtype=torch.float32)
    for rows in _token_chunks(grad_SO, input_SI):
        grad, given = grad_SO[rows], input_SI[rows]
        last_E = stop_E.clamp(rows.start, rows.start + len(grad)) - rows.start
        length_E = torch.diff(last_E, prepend=last_E.new_zeros(1))
        half_SHN = grad.view(len(grad), stacked, -1)
        row_EO += _sums_by_expert(weighted_squares(grad, token_squares(given)), length_E)
        for half in range(stacked):
            weighted_SI = weighted_squares(given, token_squares(half_SHN[:, half]))
            column_EHI[:, half] += _sums_by_expert(weighted_SI, length_E)
    return row_EO.view(experts, stacked, -1), column_EHI


@fused()
def weighted_squares(values_SN: Tensor, weight_S: Tensor) -> Tensor:
    """(S, N) fp32 v_sn^2 weight_s."""
    return values_SN.float().square() * weight_S[:, None]


def _sums_by_expert(values_SN: Tensor, length_E: Tensor) -> Tensor:
    """(E, N) sums over each expert's rows, in the order of the rows: without atomics, whose order is no order."""
    return torch.segment_reduce(values_SN, "sum", lengths=length_E.long(), axis=0, unsafe=True)


def _token_chunks(grad_TO: Tensor, input_TI: Tensor) -> Iterator[slice]:
    """Chunks of tokens whose fp32 squares take about `TOKEN_BYTES`."""
    length = max(1, TOKEN_BYTES // (4 * (grad_TO.shape[1] + input_TI.shape[1])))
    return (slice(start, start + length) for start in range(0, grad_TO.shape[0], length))


def experts_at_once(outputs: int, inputs: int) -> int:
    """Experts of which `expert_fisher` forms the sums together: as many as take `EXPERT_BYTES`, at least one."""
    return max(1, EXPERT_BYTES // (4 * outputs * inputs))


def expert_fisher(
    grad_SO: Tensor, input_SI: Tensor, stop_E: Tensor, loss_scale: float = 1.0
) -> Iterator[tuple[int, Tensor]]:
    """`token_fisher` of every expert, over the rows that belong to it, a few experts at a time.

    Args:
        grad_SO: (S, out) dL/dy times the loss scale, rows sorted by expert.
        input_SI: (S, in) x.
        stop_E: (E,) one past the last row of each expert.
        loss_scale: what the loss was multiplied by.

    Yields:
        Number of an expert, and (e, out, in) fp32 of it and those after it; zeros where an expert has no row. Their
        sizes depend on shapes alone.
    """
    outputs, inputs = grad_SO.shape[1], input_SI.shape[1]
    bounds = [0, *stop_E.tolist()]
    together = experts_at_once(outputs, inputs)
    for first in range(0, len(stop_E), together):
        rows = bounds[first : first + together + 1]
        full = grad_SO.new_zeros(len(rows) - 1, outputs, inputs, dtype=torch.float32)
        for expert, (start, stop) in enumerate(pairwise(rows)):
            if stop > start:
                full[expert] = token_fisher(grad_SO[start:stop], input_SI[start:stop], loss_scale)
        yield first, full
        del full  # before the next one is formed


def token_rate(tokens: Tensor, recent: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """How far experts' averages move to a sample over `tokens` tokens, so that every token counts alike.

    `accumulate` weighs samples by age alone. An expert's samples rest on more tokens or on fewer: with C the faded
    count of those that its average rests on and N those of the sample, the rate is (1-d) N / (d C + (1-d) N), and C
    becomes the denominator. The first sample has rate 1, so there is no bias to correct. Without tokens nothing fades.

    Args:
        tokens: (n,) N.
        recent: (n,) C.
        decay: d.

    Returns:
        (n,) the rates, and the new C.
    """
    total = decay * recent + (1 - decay) * tokens
    seen = tokens > 0
    return torch.where(seen, (1 - decay) * tokens / total, 0.0), torch.where(seen, total, recent)


def accumulate(average: Tensor, sample: Tensor, decay: float) -> None:
    """EMA step in place; the bias correction 1 / (1 - decay^k) is applied by the reader, as in Adam."""
    average.lerp_(sample, 1 - decay)
