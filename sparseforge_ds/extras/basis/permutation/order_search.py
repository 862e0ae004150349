"""Search for orders of channels in which N of every M keep the most score (after Pool and Yu, NeurIPS 2021).

One channel is taken out of every group at once. In a row, channel c adds relu(score of c - N-th largest of the rest)
to the rest of group g. Summed over rows, and up to terms that no assignment changes, that is half of an L1 distance, so
one `torch.cdist` gives the values of all G * G assignments. On that table, pairs of groups exchange their channels as
long as a pair gains; then other channels are taken out. No exchange loses score, and no loop goes over groups.

Legend of shape suffixes: B blocks with an order of their own, C channels, R rows that read them, G groups of M members.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.pattern import NM

_ELEMENTS = 1 << 26
"""Maximum of elements in a temporary tensor; more blocks are searched in portions."""
_SWEEPS = 8
"""Maximum of sweeps, in each of which every member of a group is taken out once."""


def kept_score(score_BCR: Tensor, index_BC: Tensor, pattern: NM) -> Tensor:
    """Return the (B,) sums, over rows and groups, of the N largest scores with the channels in the given order."""
    return torch.stack(
        [_kept(score_CR[index_C], pattern) for score_CR, index_C in zip(score_BCR, index_BC, strict=True)]
    )


def best_order(score_BCR: Tensor, pattern: NM, seed: int) -> Tensor:
    """Search for the order that keeps the most score.

    Args:
        score_BCR: scores >= 0; C is a multiple of M.
        pattern: N of every M.
        seed: seed of the sequence of members.

    Returns:
        (B, C) old numbers of the channels in their new order; groups are sorted by their first channel.
    """
    B, C, R = score_BCR.shape
    blocks_at_once = max(1, _ELEMENTS // max(1, (C // pattern.members) ** 2 + C * R))
    orders = [_search(part, pattern, seed) for part in score_BCR.split(blocks_at_once)]
    return torch.cat(orders)


def _search(score_BCR: Tensor, pattern: NM, seed: int) -> Tensor:
    """Search as `best_order`, for blocks that fit into temporary memory together."""
    B, C, R = score_BCR.shape
    M = pattern.members
    generator = torch.Generator().manual_seed(seed)
    # Start from the better of two orders: the original, and channels dealt to the groups by their total score.
    original_BC = torch.arange(C, device=score_BCR.device).expand(B, C)
    original_B = kept_score(score_BCR, original_BC, pattern)
    dealt_BC = score_BCR.sum(-1).argsort(dim=-1, descending=True, stable=True).view(B, M, -1).mT.reshape(B, C)
    dealt_B = kept_score(score_BCR, dealt_BC, pattern)
    group_BGM = torch.where((dealt_B > original_B)[:, None], dealt_BC, original_BC).view(B, -1, M)
    best = torch.maximum(dealt_B, original_B).sum()
    for _ in range(_SWEEPS):
        # Take the members of each group out in a random sequence.
        sequence_GM = torch.rand(C // M, M, generator=generator).argsort(1).to(group_BGM.device)
        group_BGM = group_BGM.gather(2, sequence_GM.expand_as(group_BGM))
        for member in range(M):
            group_BGM = _exchange(score_BCR, group_BGM, member, pattern)
        # Stop when a sweep gains next to nothing.
        now = kept_score(score_BCR, group_BGM.reshape(B, C), pattern).sum()
        if now <= best * (1 + 2e-4):
            break
        best = now
    # Sort members and groups, so that equal groupings give equal orders.
    group_BGM = group_BGM.sort(-1).values
    first_BG = group_BGM[..., 0].argsort(dim=-1)
    return group_BGM.gather(1, first_BG[..., None].expand_as(group_BGM)).reshape(B, C)


def _exchange(score_BCR: Tensor, group_BGM: Tensor, member: int, pattern: NM) -> Tensor:
    """Return the groups after exchanging one member each between pairs of groups that gain by it."""
    B, G, M = group_BGM.shape
    # Value of every channel that was taken out (columns) in every group (rows).
    value_BGG = torch.empty(B, G, G, device=score_BCR.device)
    rest = [m for m in range(M) if m != member]
    for score_CR, group_GM, value_GG in zip(score_BCR, group_BGM, value_BGG, strict=True):
        threshold_GR = score_CR[group_GM[:, rest]].topk(pattern.n, dim=1).values[:, -1]
        value_GG.copy_(torch.cdist(threshold_GR, score_CR[group_GM[:, member]], p=1.0))
    # source_BG: the group that a group's current channel came from.
    source_BG = torch.arange(G, device=value_BGG.device).expand(B, G).contiguous()
    number_G = torch.arange(G, device=value_BGG.device)
    while True:
        current_BGG = value_BGG.gather(2, source_BG[:, None, :].expand(B, G, G))
        own_BG = current_BGG.diagonal(dim1=1, dim2=2)
        # The gain is symmetric to the last bit: otherwise one group of a pair would move alone and lose a channel.
        before_BGG = own_BG[:, :, None] + own_BG[:, None, :]
        gain_BG, best_BG = (current_BGG + current_BGG.mT - before_BGG).max(dim=2)
        # Exchange where two groups are each other's best partner, and gain more than rounding.
        rounding_BG = 1e-6 * before_BGG.gather(2, best_BG[..., None]).squeeze(2)
        mutual_BG = (best_BG.gather(1, best_BG) == number_G) & (gain_BG > rounding_BG)
        if not bool(mutual_BG.any()):
            break
        source_BG = source_BG.gather(1, torch.where(mutual_BG, best_BG, number_G))
    result_BGM = group_BGM.clone()
    result_BGM[..., member] = group_BGM[..., member].gather(1, source_BG)
    return result_BGM


def _kept(score_CR: Tensor, pattern: NM) -> Tensor:
    """Sum the N largest scores over rows and groups, a portion of the rows at a time."""
    groups = score_CR.view(-1, pattern.members, score_CR.shape[-1])
    rows = max(1, _ELEMENTS // score_CR.shape[0])
    parts = [part.topk(pattern.n, dim=1).values.double().sum() for part in groups.split(rows, dim=2)]
    return torch.stack(parts).sum()
