"""The group-wise gate and the mask it moves (SparseForge, arXiv 2605.06402, section 3.2; design eqs. 5 to 9).

Legend of shape suffixes: G groups, M members of a group.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.pattern import rank_in_group
from sparseforge_ds.mask.runs import runs


class Gate(NamedTuple):
    """Soft and hard choice of every group."""

    soft_GM: Tensor
    """(G, M) fp32 in (0, 1): G of eq. 5."""
    target_GM: Tensor
    """(G, M) bool with N True a row: Gbar of eq. 6."""


def gate(score_GM: Tensor, n: int, temperature: float, threshold: Literal["midpoint", "nth"] = "midpoint") -> Gate:
    """Soft gate and target of standardized scores (eqs. 5 and 6).

    Args:
        score_GM: (G, M) fp32 standardized scores.
        n: members of a group to keep.
        temperature: T > 0.
        threshold: 'midpoint' puts tau halfway between the n-th and the (n+1)-th score; 'nth' puts it on the n-th as the
            paper writes it, which holds that survivor at exactly 0.5 whatever the temperature.
    """
    soft_GM = torch.empty_like(score_GM)
    target_GM = torch.empty_like(score_GM, dtype=torch.bool)
    zero = score_GM.new_zeros(())
    for run in runs(score_GM):
        rank_GM = rank_in_group(score_GM[run])
        near_GM = rank_GM == n - 1
        if threshold == "midpoint":
            near_GM |= rank_GM == n
        # Every other term is +0.0, which leaves the sum exact.
        tau_G1 = torch.where(near_GM, score_GM[run], zero).sum(dim=1, keepdim=True)
        if threshold == "midpoint":
            tau_G1 /= 2
        torch.sigmoid((score_GM[run] - tau_G1) / temperature, out=soft_GM[run])
        torch.lt(rank_GM, n, out=target_GM[run])
    return Gate(soft_GM, target_GM)


def move_mask(mask: Tensor, soft: Tensor, target: Tensor, dials: Dials) -> Tensor:
    """One mask update (eqs. 7 to 9), element by element.

    Args:
        mask: (n,) fp32 soft mask m in [0, 1].
        soft: (n,) fp32 soft gate G.
        target: (n,) bool target Gbar.
        dials: the annealed numbers at this step.

    Returns:
        (n,) fp32, the new soft mask.
    """
    moved = torch.empty_like(mask)
    for run in runs(mask):
        hard = target[run].to(mask.dtype)
        blended = torch.lerp(soft[run], hard, dials.beta)
        pulled = (blended - dials.penalty_rate * dials.mid_penalty * (mask[run] - hard)).clamp_(0, 1)
        torch.lerp(mask[run], pulled, dials.mask_rate, out=moved[run])
    return moved
