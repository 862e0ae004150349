"""Diagonal curvature of the training loss (SparseForge, arXiv 2605.06402, section 3.1; eq. 2).

Functions on plain tensors; `zero.extra_passes` runs the passes that they measure.

Legend of shape suffixes: T tokens, O outputs, I inputs, N rows of logits, V entries of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hutchinson_sample(difference: Tensor, sign: Tensor, radius: Tensor | float) -> Tensor:
    """Return one Hutchinson sample of the diagonal by a central gradient difference (eq. 2).

    With v Rademacher, g the gradient at w +- D v, and D the diagonal matrix of every weight's r:
    v (g(w + D v) - g(w - D v)) / 2r = v (H D v) / r + O(r^2), whose mean over v is diag(H).
    Signed: clamping samples would bias the average upwards by the off-diagonal noise.

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
        loss_scale: factor of the loss.

    Returns:
        (out, in) fp32.
    """
    grad_square_OT = (grad_TO.float() / loss_scale).square().t()
    input_square_TI = input_TI.float().square()
    if input_TI.device.type != "cpu" and input_TI.dtype in (torch.bfloat16, torch.float16):
        return (grad_square_OT.bfloat16() @ input_square_TI.bfloat16()).float()
    return grad_square_OT @ input_square_TI


def fisher_sums(grad_TO: Tensor, input_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column sums of `token_fisher`, without the matrix: sum_t g_to^2 |x_t|^2 and sum_t x_ti^2 |g_t|^2.

    `kernels.fisher` sums the same in chunks, and for mixtures of experts.

    Args:
        grad_TO: (T, out) dL/dy.
        input_TI: (T, in) x.

    Returns:
        (out,) and (in,) fp32.
    """
    grad_square_TO = grad_TO.float().square()
    input_square_TI = input_TI.float().square()
    return grad_square_TO.t() @ input_square_TI.sum(dim=1), input_square_TI.t() @ grad_square_TO.sum(dim=1)


def token_rate(tokens: Tensor, recent: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Return the rates at which experts' averages move to a sample, so that every token counts alike.

    `accumulate` weighs samples by age alone; here an expert's sample also counts by its number of tokens N. With C, the
    decayed count of tokens in the average, the rate is (1-d) N / (d C + (1-d) N), and that denominator is the new C.
    The first sample has rate 1, so there is no bias to correct. An expert without tokens keeps its average and its C.

    Args:
        tokens: (n,) N.
        recent: (n,) C.
        decay: d.

    Returns:
        (n,) the rates, and the new C.
    """
    total = decay * recent + (1 - decay) * tokens
    has_tokens = tokens > 0
    return torch.where(has_tokens, (1 - decay) * tokens / total, 0.0), torch.where(has_tokens, total, recent)


def accumulate(average: Tensor, sample: Tensor, decay: float) -> None:
    """Take a sample into a running mean in place (eq. 2); readers correct its bias by 1 / (1 - decay^k), as in Adam."""
    average.lerp_(sample, 1 - decay)
