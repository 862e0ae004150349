"""Masks as samples of a categorical over the patterns of a group (MaskLLM, arXiv 2409.17481, section 3).

Legend of shape suffixes: G groups, M members of a group, K patterns of a group.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import torch
from torch import Tensor

from sparseforge_ds.mask.random_numbers import uniform


@lru_cache
def patterns(n: int, m: int) -> Tensor:
    """Return (K, M) fp32 with every way to keep n of m members, C(m, n) of them; read only."""
    choices = list(itertools.combinations(range(m), n))
    table_KM = torch.zeros(len(choices), m)
    table_KM[torch.arange(len(choices))[:, None], torch.tensor(choices)] = 1.0
    return table_KM


def gumbel(key: int, first: int, groups: int, patterns: int, device: torch.device) -> Tensor:
    """Draw (G, K) Gumbel noise of the groups from number `first` on, the same on any number of ranks."""
    drawn = _open(uniform(key, first * patterns, (first + groups) * patterns, device))
    return -(-drawn.log()).log().view(groups, patterns)


def normal(key: int, first: int, groups: int, patterns: int, device: torch.device) -> Tensor:
    """Draw (G, K) standard normal numbers, by Box and Muller, for the groups from number `first` on."""
    drawn = uniform(key, 2 * first * patterns, 2 * (first + groups) * patterns, device)
    radius, angle = _open(drawn).view(-1, 2).unbind(1)
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).view(groups, patterns)


def _open(drawn: Tensor) -> Tensor:
    """Move multiples of 2^-24 in [0, 1) up by half a step, into (0, 1); the clamp keeps fp32 from rounding to 1."""
    return (drawn + 2.0**-25).clamp_(max=1 - 2.0**-24)


def first_logits(noise_GK: Tensor, mask_GM: Tensor, n: int, spread: float, prior: float) -> Tensor:
    """Return logits that lean to a starting mask (eqs. 7 and 8).

    Args:
        noise_GK: (G, K) standard normal.
        mask_GM: (G, M) the starting mask, n ones a row.
        n: members of a group to keep.
        spread: standard deviation of the logits.
        prior: alpha: bonus of a pattern for each member that it shares with the starting mask, in units of `spread`;
            the mean over the patterns is subtracted.

    Returns:
        (G, K).
    """
    members = mask_GM.shape[1]
    shared_GK = mask_GM @ patterns(n, members).to(mask_GM.device).t() - n * n / members
    return spread * (noise_GK + prior * shared_GK)


def choice(logit_GK: Tensor, noise_GK: Tensor, scale: float, temperature: float) -> Tensor:
    """Return (G, K) Gumbel-softmax: softmax((kappa logit + noise) / tau) (eqs. 4 and 5)."""
    return torch.softmax((scale * logit_GK + noise_GK) / temperature, dim=1)


def logit_gradient(choice_GK: Tensor, grad_GM: Tensor, pattern_KM: Tensor, scale: float, temperature: float) -> Tensor:
    """Return the gradient with respect to the logits, from that with respect to the mask that `choice` mixes.

    Args:
        choice_GK: (G, K) from `choice`, which was called with the same scale and temperature.
        grad_GM: (G, M) dL/dm.
        pattern_KM: (K, M) from `patterns`.
        scale: kappa.
        temperature: tau.

    Returns:
        (G, K).
    """
    grad_GK = grad_GM @ pattern_KM.t()
    mean_G = (choice_GK * grad_GK).sum(dim=1, keepdim=True)
    return choice_GK * (grad_GK - mean_G) * (scale / temperature)
