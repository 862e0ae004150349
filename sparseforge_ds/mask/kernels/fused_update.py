"""`mask.update.update_mask` on flat elements of a shard: a chunk at a time, one compiled kernel a chunk.

Masks may be 16-bit codes, and curvature a product. The new mask is written in place; its top N comes with it, because
that is what the steps until the next update need.

Legend of shape suffixes: G groups, S periods of consecutive elements, M members of a group, C groups that are
interleaved in a period (1 where the input axis is last), n = S M C elements in flat order. Groups of up to `SMALL`
members are worked on as M tensors of (S, C), one a member: everything about a group is element-wise between them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.importance import standardized_score
from sparseforge_ds.mask.kernels.bits import octets, pack, set_bits
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.codes import stored_as, values_of
from sparseforge_ds.mask.kernels.exact_lerp import exact_lerp, split_lerp
from sparseforge_ds.mask.kernels.fusing import fused, row_sums
from sparseforge_ds.mask.kernels.groups import SMALL, pairwise_ranks
from sparseforge_ds.mask.kernels.scores import Curvature, curvature_elements, curvature_slice
from sparseforge_ds.mask.pattern import NM, Pattern, top_n
from sparseforge_ds.mask.update import penalize, soft_gate, update_mask


class MaskUpdate(NamedTuple):
    """Choices of an update."""

    target: Tensor
    """(n,) bool: the top N of the scores."""
    kept: Tensor
    """(n,) bool: the top N of the new mask."""
    disagrees: Tensor
    """(n / M,) bool of every group: its top N is not what the paper's own rule 1[m > 0.5] would keep."""


class MaskStats(NamedTuple):
    """Choices as they are stored, and sums that metrics are made of."""

    target: Tensor
    """(ceil(n / 8),) packed bits."""
    kept: Tensor | None
    """(ceil(n / 8),) packed bits, where they were asked for."""
    sums: list[Tensor]
    """() fp64 each: m (1 - m), m and, if there was an earlier update, the number of target bits that changed."""


def update_mask_in_place(
    dense: Tensor,
    mask: Tensor,
    curvature: Curvature,
    scaling: Tensor,
    dials: Dials,
    pattern: Pattern,
    shape: tuple[int, ...],
    input_axis: int,
    midpoint: bool = True,
) -> MaskUpdate:
    """Update the mask of consecutive elements of one matrix.

    Args:
        dense: (n,) fp32 weights, whole periods of the pattern.
        mask: (n,) soft mask, fp32 or codes; overwritten.
        curvature: H of these elements.
        scaling: (3,) fp64, the matrix's row of `scalings`.
        dials: the annealed numbers at this step.
        pattern: how many members of a group survive.
        shape: shape of the weight.
        input_axis: the axis that the matmul contracts.
        midpoint: see `mask.update.threshold`.
    """
    # Small groups are worked on member by member, in one kernel; rates of a blend are split to be exact at both ends.
    period = pattern.period(shape, input_axis)
    is_small = isinstance(pattern, NM) and pattern.members <= SMALL
    sizes = [pattern.members, period // pattern.members, pattern.kept_count]
    pull = dials.penalty_rate * dials.mid_penalty
    rates = [dials.temperature, *split_lerp(dials.beta), pull, *split_lerp(dials.mask_rate)]
    # A chunk of whole periods at a time, so that temporaries have a limit.
    parts = []
    for periods in chunks(dense.view(-1, period)):
        inside = slice(periods.start * period, periods.stop * period)
        curvature_part, first = curvature_slice(curvature, inside)
        if is_small:
            new, *choices = _update_small_groups(
                dense[inside], mask[inside], curvature_part, first, scaling, sizes, midpoint, rates
            )
        else:
            to_groups = functools.partial(pattern.to_groups, shape=shape, input_axis=input_axis)
            elements = curvature_elements(curvature_part, first, inside.stop - inside.start)
            curvature_GM = None if elements is None else to_groups(elements)
            *masks_GM, disagrees = _update_large_groups(
                to_groups(dense[inside]), to_groups(mask[inside]), curvature_GM, scaling, dials, pattern, midpoint
            )
            new, *choices = [pattern.from_groups(values_GM, shape, input_axis) for values_GM in masks_GM]
            choices.append(disagrees)
        mask[inside] = new
        parts.append(choices)
    target, kept, disagrees = (_concat(choice) for choice in zip(*parts, strict=True))
    return MaskUpdate(target, kept, disagrees)


def mask_stats(mask: Tensor, target: Tensor, kept: Tensor | None, before: Tensor | None) -> MaskStats:
    """Pack the choices of an update, and sum what metrics need.

    Args:
        mask: (n,) new mask, fp32 or codes.
        target: (n,) bool, see `MaskUpdate`.
        kept: (n,) bool, see `MaskUpdate`, or None where nobody needs its bits.
        before: (ceil(n / 8),) packed target of the update before, or None where there is none to compare with.
    """
    packed = []
    sums = []
    for chunk in chunks(mask):  # of a multiple of 8 elements
        choices = [target[chunk]] if kept is None else [target[chunk], kept[chunk]]
        results = _mask_stats(mask[chunk], choices, None if before is None else before[octets(chunk)])
        packed.append(results[: len(choices)])
        sums.append([total for rows in results[len(choices) :] for total in rows.sum(dim=1).unbind()])
    totals = sums[0] if len(sums) == 1 else [torch.stack(list(parts)).sum() for parts in zip(*sums, strict=True)]
    bits = [_concat(parts) for parts in zip(*packed, strict=True)]
    return MaskStats(bits[0], None if kept is None else bits[1], totals)


def _update_large_groups(
    dense_GM: Tensor,
    mask_GM: Tensor,
    curvature_GM: Tensor | None,
    scaling: Tensor,
    dials: Dials,
    pattern: Pattern,
    midpoint: bool,
) -> list[Tensor]:
    """Return new mask, target and kept, (G, M) each, and the (G,) disagreement."""
    new_GM, target_GM = update_mask(dense_GM, values_of(mask_GM), curvature_GM, scaling, dials, pattern, midpoint)
    stored_GM = stored_as(new_GM, mask_GM.dtype)
    new_GM = values_of(stored_GM)
    kept_GM = top_n(pattern.pooled(new_GM), pattern.kept_count)
    return [stored_GM, target_GM, kept_GM, ((new_GM > 0.5) != kept_GM).any(dim=1)]


@fused()
def _update_small_groups(
    dense: Tensor,
    mask: Tensor,
    curvature: list[Tensor],
    first: int,
    scaling: Tensor,
    sizes: list[int],
    midpoint: bool,
    rates: list[float],
) -> list[Tensor]:
    """Return new mask, target, kept, (n,) each, and the disagreement, as `_update_large_groups` does.

    Args:
        dense: (n,) fp32.
        mask: (n,) fp32 or codes.
        curvature: see `CurvatureSlice`.
        first: see `CurvatureSlice`.
        scaling: (3,) fp64.
        sizes: M, C and N.
        midpoint: see `mask.update.threshold`.
        rates: T, beta split, eta lambda_mid, alpha split.
    """
    members, interleaved, kept_count = sizes
    temperature, nearer_beta, offset_beta, pull, nearer_rate, offset_rate = rates
    weights = _by_member(dense, members, interleaved)
    stored = _by_member(mask, members, interleaved)
    elements = curvature_elements(curvature, first, dense.numel())
    curvatures = [None] * len(stored) if elements is None else _by_member(elements, members, interleaved)
    # eqs. 3, 4 and 6: scores, and the N best of every group
    scores = [standardized_score(weight, h, scaling) for weight, h in zip(weights, curvatures, strict=True)]
    ranks = _rank(scores)
    targets = [rank < kept_count for rank in ranks]
    # eq. 5: the threshold. Every other term of the sum is 0, which leaves it exact.
    near = [(rank == kept_count - 1) | (rank == kept_count) if midpoint else rank == kept_count - 1 for rank in ranks]
    tau = _sum_members([score * is_near.float() for is_near, score in zip(near, scores, strict=True)])
    if midpoint:
        tau = tau * 0.5
    new = []
    for score, target, code in zip(scores, targets, stored, strict=True):
        old = values_of(code)
        hard = target.float()
        gate = soft_gate(score, tau, temperature)  # eq. 5
        gate = exact_lerp(gate, hard, nearer_beta, offset_beta)  # eq. 7
        gate = penalize(gate, old, hard, pull)  # eq. 8
        new.append(stored_as(exact_lerp(old, gate, nearer_rate, offset_rate), mask.dtype))  # eq. 9
    # The top N of the mask as it is stored, and where the paper's rule would keep others.
    values = [values_of(code) for code in new]
    kept = [rank < kept_count for rank in _rank(values)]
    wrong = [(value > 0.5) != is_kept for value, is_kept in zip(values, kept, strict=True)]
    disagrees = functools.reduce(torch.logical_or, wrong[0].unbind(0) if len(wrong) == 1 else wrong)
    return [*(_in_order(choice, interleaved) for choice in (new, targets, kept)), disagrees.view(-1)]


def _by_member(flat: Tensor, members: int, interleaved: int) -> list[Tensor]:
    """Split (n,) into M tensors (S, C) when compiling, else into one (M, S C): eager operations cost a call each."""
    member = flat.view(flat.numel() // (members * interleaved), members, interleaved)
    if torch.compiler.is_compiling():
        return list(member.unbind(1))
    return [torch.stack(member.unbind(1)).view(members, -1)]


def _in_order(member: list[Tensor], interleaved: int) -> Tensor:
    """Undo `_by_member`: return (n,)."""
    if len(member) > 1:
        return torch.stack(member, dim=1).view(-1)
    rows = member[0].view(len(member[0]), -1, interleaved)
    flat = rows.new_empty(rows.shape[1], len(rows), interleaved)
    for number, row in enumerate(rows):  # several times faster than a transposed copy
        flat[:, number] = row
    return flat.view(-1)


def _rank(member: list[Tensor]) -> list[Tensor]:
    """Return the ranks of `pattern.rank_in_group`, split as `_by_member` does."""
    return pairwise_ranks(member) if len(member) > 1 else [torch.stack(pairwise_ranks(member[0].unbind(0)))]


def _sum_members(member: list[Tensor]) -> Tensor:
    """Sum over the members of a group, in the order of their numbers."""
    if len(member) == 1:
        return member[0].sum(dim=0, keepdim=True)
    return functools.reduce(torch.add, member)


def _concat(parts: Sequence[Tensor]) -> Tensor:
    """Join the results of all chunks; those of a single one without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@fused(kernels=4)
def _mask_stats(mask: Tensor, choices: list[Tensor], before: Tensor | None) -> list[Tensor]:
    """Return the bits of each choice, (2, rows) sums of the mask and, where there is a `before`, (1, rows) of flips."""
    packed = [_pack(choice) for choice in choices]
    values = values_of(mask).double()
    sums = [row_sums([values * (1 - values), values])]
    if before is not None:
        sums.append(row_sums([set_bits(packed[0] ^ before).double()]))
    return packed + sums


def _pack(bit: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return pack(bit)
    octet = F.pad(bit, (0, -bit.numel() % 8)).view(-1, 8).unbind(1)
    return _sum_members([member.to(torch.uint8) << shift for shift, member in enumerate(octet)])
