"""Shift b of each segment of weights, chosen so that an N:M pattern removes as little as possible.

SLoRB's branch adds one number b to all k weights of a segment (eq. 13). Written as w = (w - b) + b, a layer
computes what it did before, and the pattern acts on w - b: in every group it removes the weights that are nearest to b
instead of those nearest to 0. The best b solves

    min over b of  sum over the groups of the segment of the M - N smallest (w - b)^2.

This is k-means with one centre. Its members are, in every group, the M - N weights that are nearest to b; b is then
their mean. Both steps lower the sum. They start from several points, because the sum has many minima.

With normally distributed weights, 2:4 then removes 0.10 of what it removes without a shift at k = 4, 0.43 at k = 8 and
0.67 at k = 16. SLoRB's published start, the mean of what the mask removes from the segment, gives 0.75, 0.87 and 0.94.

Shape suffixes: R segments of rows, K weights of a segment, G groups of a segment, M members of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.kernels.chunks import chunks

STARTS = 8
"""Points that the search begins from, at most: further ones gain less than 0.1% of what is removed."""
STEPS = 2
"""Improvement steps from each starting point."""


def best_shift(segment_RK: Tensor, kept_count: int, members: int) -> Tensor:
    """Return the best b of every segment.

    Args:
        segment_RK: (R, K) fp32 weights that share one b; K is a multiple of `members`.
        kept_count: N, weights of a group that the pattern keeps.
        members: M.

    Returns:
        (R,) fp32; 0 where no other b removes less. It depends on nothing but the K weights of the segment.
    """
    removed = members - kept_count
    best_R = torch.empty(segment_RK.shape[0], device=segment_RK.device)
    for chunk in chunks(segment_RK):
        best_R[chunk] = _search(segment_RK[chunk], removed, members)
    return best_R


def removed_by(segment_RK: Tensor, shift_R: Tensor, removed: int, members: int) -> tuple[Tensor, Tensor]:
    """Measure what the pattern removes from shifted segments.

    Returns:
        (R,) sum of squares of the `removed` smallest |w - b| of every group, and (R,) mean of those w.
    """
    rest_RGM = (segment_RK - shift_R[:, None]).view(segment_RK.shape[0], -1, members)
    gone_RGM = rest_RGM.gather(2, rest_RGM.abs().topk(removed, dim=2, largest=False).indices)
    return gone_RGM.square().sum((1, 2)), shift_R + gone_RGM.mean((1, 2))


def _search(segment_RK: Tensor, removed: int, members: int) -> Tensor:
    ordered_RK = segment_RK.sort(dim=1).values
    # Between neighbours: for 2:4 and K = 4 the best b is among them.
    middle_R = (ordered_RK[:, 1:] + ordered_RK[:, :-1]) / 2
    starts = torch.linspace(0, middle_R.shape[1] - 1, min(STARTS, middle_R.shape[1])).round().long().tolist()
    best_R = torch.zeros_like(middle_R[:, 0])
    least_R, _ = removed_by(segment_RK, best_R, removed, members)
    for start in starts:
        shift_R = middle_R[:, start]
        for _ in range(STEPS):
            _, shift_R = removed_by(segment_RK, shift_R, removed, members)
        sum_R, _ = removed_by(segment_RK, shift_R, removed, members)
        better_R = sum_R < least_R
        best_R = torch.where(better_R, shift_R, best_R)
        least_R = torch.where(better_R, sum_R, least_R)
    return best_R
