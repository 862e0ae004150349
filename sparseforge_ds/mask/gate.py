"""The group-wise gate and the mask it moves (SparseForge, arXiv 2605.06402, section 3.2; design eqs. 5 to 9).

Legend of shape suffixes: G groups, M members of a group.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.pattern import rank_in_group


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
    rank_GM = rank_in_group(score_GM)
    zero = score_GM.new_zeros(())
    tau_G1 = torch.where(rank_GM == n - 1, score_GM, zero).sum(dim=1, keepdim=True)
    if threshold == "midpoint":
        runner_up_G1 = torch.where(rank_GM == n, score_GM, zero).sum(dim=1, keepdim=True)
        tau_G1 = (tau_G1 + runner_up_G1) / 2
    return Gate(torch.sigmoid((score_GM - tau_G1) / temperature), rank_GM < n)


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
    hard = target.to(mask.dtype)
    blended = torch.lerp(soft, hard, dials.beta)
    pulled = (blended - dials.penalty_rate * dials.mid_penalty * (mask - hard)).clamp_(0, 1)
    return torch.lerp(mask, pulled, dials.mask_rate)
