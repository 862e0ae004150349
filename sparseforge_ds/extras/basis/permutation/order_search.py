"""The search for orders of channels in which N of every M keep the most score (after Pool and Yu, NeurIPS 2021).

One channel is taken out of every group at once. What channel c adds to the rest of group g in a row is relu(score of c
- N-th largest of the rest), summed over rows: up to terms that no assignment changes, half of an L1 distance, so that a
`torch.cdist` values all G * G places. On that table pairs of groups exchange their channels as long as any two of them
gain; then other channels are taken out. No exchange ever loses, and no loop goes over groups.

Legend of shape suffixes: B blocks with an order of their own, C channels, R rows that read them, G groups of M members.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.pattern import NM

_ELEMENTS = 1 << 26
"""Of a temporary; blocks are searched in portions of so many."""


def kept_score(score_BCR: Tensor, index_BC: Tensor, pattern: NM) -> Tensor:
    """(B,) sum over rows and groups of the N largest scores, with the channels in the given order."""
    return torch.stack(
        [_kept(score_CR[index_C], pattern) for score_CR, index_C in zip(score_BCR, index_BC, strict=True)]
    )


def best_order(score_BCR: Tensor, pattern: NM, seed: int, sweeps: int = 8) -> Tensor:
    """(B, C) for every channel the one that takes its place; groups are in order of their first channel.

    Scores are >= 0, and C is a multiple of M. In a sweep each of a group's M channels is taken out once; fewer
    where nothing is gained.
    """
    B, C, R = score_BCR.shape
    at_once = max(1, _ELEMENTS // max(1, (C // pattern.members) ** 2 + C * R))
    found = [_search(part, pattern, seed, sweeps) for part in score_BCR.split(at_once)]
    return torch.cat(found)


def _search(score_BCR: Tensor, pattern: NM, seed: int, sweeps: int) -> Tensor:
    B, C, R = score_BCR.shape
    M, generator = pattern.members, torch.Generator().manual_seed(seed)
    plain_BC = torch.arange(C, device=score_BCR.device).expand(B, C)
    before_B = kept_score(score_BCR, plain_BC, pattern)
    dealt_BC = score_BCR.sum(-1).argsort(dim=-1, descending=True, stable=True).view(B, M, -1).mT.reshape(B, C)
    dealt_B = kept_score(score_BCR, dealt_BC, pattern)
    group_BGM = torch.where((dealt_B > before_B)[:, None], dealt_BC, plain_BC).view(B, -1, M)
    kept = torch.maximum(dealt_B, before_B).sum()
    for _ in range(sweeps):
        # Which of a group's members is taken out when.
        turn_GM = torch.rand(C // M, M, generator=generator).argsort(1).to(group_BGM.device)
        group_BGM = group_BGM.gather(2, turn_GM.expand_as(group_BGM))
        for member in range(M):
            group_BGM = _exchange(score_BCR, group_BGM, member, pattern)
        now = kept_score(score_BCR, group_BGM.reshape(B, C), pattern).sum()
        if now <= kept * (1 + 2e-4):
            break
        kept = now
    group_BGM = group_BGM.sort(-1).values
    first_BG = group_BGM[..., 0].argsort(dim=-1)
    return group_BGM.gather(1, first_BG[..., None].expand_as(group_BGM)).reshape(B, C)


def _exchange(score_BCR: Tensor, group_BGM: Tensor, member: int, pattern: NM) -> Tensor:
    """Groups after exchanging one member each, where that keeps more."""
    B, G, M = group_BGM.shape
    value_BGG = torch.empty(B, G, G, device=score_BCR.device)
    others = [m for m in range(M) if m != member]
    for score_CR, group_GM, value_GG in zip(score_BCR, group_BGM, value_BGG, strict=True):
        threshold_GR = score_CR[group_GM[:, others]].topk(pattern.n, dim=1).values[:, -1]
        value_GG.copy_(torch.cdist(threshold_GR, score_CR[group_GM[:, member]], p=1.0))
    # Groups are rows; column h is the channel that h held at first; place_BG says whose channel a group holds now.
    place_BG = torch.arange(G, device=value_BGG.device).expand(B, G).contiguous()
    number_G = torch.arange(G, device=value_BGG.device)
    while True:
        held_BGG = value_BGG.gather(2, place_BG[:, None, :].expand(B, G, G))
        own_BG = held_BGG.diagonal(dim1=1, dim2=2)
        # Of a pair both must find the same gain, to the last bit, or one of them moves alone and a channel is lost.
        before_BGG = own_BG[:, :, None] + own_BG[:, None, :]
        gain_BG, best_BG = (held_BGG + held_BGG.mT - before_BGG).max(dim=2)
        least_BG = 1e-6 * before_BGG.gather(2, best_BG[..., None]).squeeze(2)
        mutual_BG = (best_BG.gather(1, best_BG) == number_G) & (gain_BG > least_BG)
        if not bool(mutual_BG.any()):
            break
        place_BG = place_BG.gather(1, torch.where(mutual_BG, best_BG, number_G))
    result_BGM = group_BGM.clone()
    result_BGM[..., member] = group_BGM[..., member].gather(1, place_BG)
    return result_BGM


def _kept(score_CR: Tensor, pattern: NM) -> Tensor:
    """Sum over rows and groups of the N largest; a part of the rows at a time."""
    groups = score_CR.view(-1, pattern.members, score_CR.shape[-1])
    rows = max(1, _ELEMENTS // score_CR.shape[0])
    parts = [part.topk(pattern.n, dim=1).values.double().sum() for part in groups.split(rows, dim=2)]
    return torch.stack(parts).sum()
