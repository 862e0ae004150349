"""One update of a soft mask (SparseForge, arXiv 2605.06402, section 3.2; eqs. 3 to 9), a function an equation.

`kernels.fused_update` gives the same bits, many elements at a time.

Legend of shape suffixes: G groups, M members of a group, of which N survive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.importance import standardized_score
from sparseforge_ds.mask.interpolation import lerp
from sparseforge_ds.mask.pattern import Pattern, rank_in_group


def update_mask(
    dense_GM: Tensor,
    mask_GM: Tensor,
    curvature_GM: Tensor | None,
    scaling: Tensor,
    dials: Dials,
    pattern: Pattern,
    midpoint: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the new mask and the target of groups of one matrix.

    Args:
        dense_GM: (G, M) fp32 W.
        mask_GM: (G, M) fp32 m in [0, 1].
        curvature_GM: (G, M) fp32 signed H; None scores by magnitude.
        scaling: (3,) fp64 damping, mean and 1 / std of the whole matrix: its row of `importance.scalings`.
        dials: the annealed numbers at this step.
        pattern: how many members of a group survive.
        midpoint: see `threshold`.

    Returns:
        (G, M) fp32 m and (G, M) bool of the target.
    """
    # eqs. 3 and 4: curvature times squared weight, in standard deviations of the matrix
    score_GM = pattern.pooled(standardized_score(dense_GM, curvature_GM, scaling))
    # eq. 6: the N best of every group
    rank_GM = rank_in_group(score_GM)
    target_GM = rank_GM < pattern.kept_count
    # eq. 5: soft membership, 1/2 on the threshold between survivors and others
    threshold_G = threshold(score_GM, rank_GM, pattern.kept_count, midpoint)
    gate_GM = soft_gate(score_GM, threshold_G[:, None], dials.temperature)
    # eq. 7: from the soft choice to the hard one
    gate_GM = blend(gate_GM, target_GM, dials.beta)
    # eq. 8: away from the middle
    gate_GM = penalize(gate_GM, mask_GM, target_GM.float(), dials.penalty_rate * dials.mid_penalty)
    # eq. 9: a part of the way there
    return move(mask_GM, gate_GM, dials.mask_rate), target_GM


def threshold(score_GM: Tensor, rank_GM: Tensor, kept_count: int, midpoint: bool) -> Tensor:
    """Return (G,) tau of eq. 5: the middle between the N-th largest score of a group and the next.

    Args:
        score_GM: (G, M) fp32.
        rank_GM: (G, M) integers, see `rank_in_group`.
        kept_count: N.
        midpoint: False takes the N-th score itself, as the paper does; the gate of that member is then always 1/2.
    """
    if not midpoint:
        return torch.where(rank_GM == kept_count - 1, score_GM, 0.0).sum(dim=1)
    # Every other term is 0, which leaves the sum exact.
    is_near_GM = (rank_GM == kept_count - 1) | (rank_GM == kept_count)
    return torch.where(is_near_GM, score_GM, 0.0).sum(dim=1) * 0.5


def soft_gate(score: Tensor, threshold: Tensor, temperature: float) -> Tensor:
    """Return G = sigmoid((s~ - tau) / T), eq. 5: (...) fp32, an exponential in fp64 that is rounded once."""
    return torch.sigmoid((score - threshold).double() / temperature).float()


def blend(gate: Tensor, target: Tensor, beta: float) -> Tensor:
    """Return (1 - beta) G + beta Gbar, eq. 7."""
    return lerp(gate, target.float(), beta)


def penalize(gate: Tensor, mask: Tensor, target: Tensor, pull: float) -> Tensor:
    """Return G~ = clamp(G - eta lambda_mid (m - Gbar), 0, 1), eq. 8; `pull` is eta lambda_mid."""
    return (gate - (mask - target) * pull).clamp(0, 1)


def move(mask: Tensor, gate: Tensor, rate: float) -> Tensor:
    """Return m <- (1 - alpha) m + alpha G~, eq. 9."""
    return lerp(mask, gate, rate)
