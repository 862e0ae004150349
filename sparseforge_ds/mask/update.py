"""One mask update of whole groups in one pass: score, gate, target, the moved mask and its top N (eqs. 3 to 9).

Legend of shape suffixes: S spans of consecutive elements, M members of a group, C groups that are interleaved in a span
(1 where the input axis is last), n = S M C elements in flat order. Groups of up to `UNROLLED` members are worked on as
M tensors of (S, C), one a member, so that everything about a group is element-wise between them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.bits import set_bits
from sparseforge_ds.mask.codes import stored_as, values_of
from sparseforge_ds.mask.factored import rank_one
from sparseforge_ds.mask.fusing import between, fused
from sparseforge_ds.mask.importance import Curvature, part_of, score
from sparseforge_ds.mask.pattern import NM, Pattern, rank_in_group
from sparseforge_ds.mask.runs import runs

UNROLLED = 16
"""Members of a group at most whose places are found by comparing each with each; larger groups are sorted."""


class Chosen(NamedTuple):
    """What an update decided."""

    target: Tensor
    """(n,) bool: the top N of the scores."""
    kept: Tensor
    """(n,) bool: the top N of the new mask."""
    disagrees: Tensor
    """(n / M,) bool of every group: its top N is not what the paper's own rule 1[m > 0.5] would keep."""


class Tally(NamedTuple):
    """Choices as they are kept, and the sums that metrics are made of."""

    target: Tensor
    """(ceil(n / 8),) packed bits."""
    kept: Tensor
    """(ceil(n / 8),) packed bits."""
    sums: Tensor
    """(3,) fp64: m (1 - m), m, and bits of the target that changed."""


def move_groups(
    dense: Tensor,
    mask: Tensor,
    curvature: Curvature,
    scaling: Tensor,
    dials: Dials,
    pattern: Pattern,
    shape: tuple[int, ...],
    input_axis: int,
    midpoint: bool = True,
) -> Chosen:
    """One update of the mask of consecutive elements of one matrix, in place.

    Args:
        dense: (n,) fp32 weights, whole spans of the pattern.
        mask: (n,) soft mask, fp32 or codes.
        curvature: of these elements.
        scaling: (3,) fp64, the matrix's row of `scalings`.
        dials: the annealed numbers at this step.
        pattern: how many members of a group survive.
        shape: shape of the weight.
        input_axis: the axis that the matmul contracts.
        midpoint: the threshold of the gate, see `gate`.
    """
    span = pattern.span(shape, input_axis)
    side_by_side = isinstance(pattern, NM) and pattern.members <= UNROLLED
    interleaved = span // pattern.members if side_by_side else 1
    pull = dials.penalty_rate * dials.mid_penalty
    rates = (dials.temperature, dials.beta, dials.beta >= 0.5, pull, dials.mask_rate, dials.mask_rate >= 0.5)
    settings = (scaling, pattern.members, interleaved, pattern.kept, midpoint, *rates)
    chosen = []
    for run in runs(dense.view(-1, span)):
        inside = slice(run.start * span, run.stop * span)
        elements, share_R, column_C, first = part_of(curvature, inside)
        if side_by_side:
            mask[inside], *found = _fused_move(
                dense[inside], mask[inside], elements, share_R, column_C, first, *settings
            )
        else:
            if share_R is not None and column_C is not None:
                elements = rank_one(share_R, column_C, first, first + inside.stop - inside.start)
            dense_GM, mask_GM = (pattern.to_groups(flat[inside], shape, input_axis) for flat in (dense, mask))
            curvature_GM = None if elements is None else pattern.to_groups(elements, shape, input_axis)
            *flat, disagrees = _move_mask(dense_GM, mask_GM, curvature_GM, None, None, 0, *settings)
            mask[inside], *found = (
                pattern.from_groups(one.view(-1, pattern.members), shape, input_axis) for one in flat
            )
            found.append(disagrees)
        chosen.append(found)
    return Chosen(*(_end_to_end(one) for one in zip(*chosen, strict=True)))


def tally(mask: Tensor, target: Tensor, kept: Tensor, before: Tensor | None) -> Tally:
    """Bits and sums of an update.

    Args:
        mask: (n,) new mask, fp32 or codes.
        target: (n,) bool, see `Chosen`.
        kept: (n,) bool, see `Chosen`.
        before: (ceil(n / 8),) packed target of the update before, or None where there is none to compare with.
    """
    found = []
    for run in runs(mask):  # of a multiple of 8 elements
        octets = slice(run.start // 8, -(-run.stop // 8))
        found.append(_tally(mask[run], target[run], kept[run], None if before is None else before[octets]))
    bits = [_end_to_end([one[i] for one in found]) for i in range(2)]
    return Tally(bits[0], bits[1], torch.stack([torch.stack(one[2:]) for one in found]).sum(0))


def _move_mask(
    dense: Tensor,
    mask: Tensor,
    elements: Tensor | None,
    share_R: Tensor | None,
    column_C: Tensor | None,
    first: int,
    scaling: Tensor,
    members: int,
    interleaved: int,
    kept: int,
    midpoint: bool,
    temperature: float,
    beta: float,
    late_beta: bool,
    pull: float,
    rate: float,
    late_rate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New mask, target, kept and disagreement of elements in flat order, or of groups one after the other."""
    if share_R is not None and column_C is not None:
        elements = rank_one(share_R, column_C, first, first + dense.numel())
    weights, old = _by_member(dense, members, interleaved), _by_member(mask, members, interleaved)
    curvatures = [None] * len(old) if elements is None else _by_member(elements, members, interleaved)
    scores = [score(weight, h, scaling) for weight, h in zip(weights, curvatures, strict=True)]
    places = _places(scores)
    near = [(place == kept - 1) | (place == kept) if midpoint else place == kept - 1 for place in places]
    # Every other term is +0.0, which leaves the sum exact.
    tau = _over_group([torch.where(one, value, 0.0) for one, value in zip(near, scores, strict=True)])
    if midpoint:
        tau = tau * 0.5
    moved, targets = [], [place < kept for place in places]
    for value, target, stored in zip(scores, targets, old, strict=True):
        gated = torch.sigmoid((value - tau).double() / temperature).float()
        at, hard = values_of(stored), target.float()
        pulled = (between(gated, hard, beta, late_beta) - (at - hard) * pull).clamp(0, 1)
        moved.append(stored_as(between(at, pulled, rate, late_rate), mask.dtype))
    new = [values_of(stored) for stored in moved]
    tops = [place < kept for place in _places(new)]
    wrong = [(value > 0.5) != top for value, top in zip(new, tops, strict=True)]
    disagrees = wrong[0].any(0, keepdim=True) if len(wrong) == 1 else functools.reduce(torch.logical_or, wrong)
    moved_n, target_n, kept_n = (_in_order(one, interleaved) for one in (moved, targets, tops))
    return moved_n, target_n, kept_n, disagrees.view(-1)


_fused_move = fused()(_move_mask)


def _by_member(flat: Tensor, members: int, interleaved: int) -> list[Tensor]:
    """(n,) -> M tensors (S, C) to compile; step by step, where every operation costs a call, one of (M, S C)."""
    member = flat.view(-1, members, interleaved)
    if torch.compiler.is_compiling():
        return list(member.unbind(1))
    return [member.transpose(0, 1).reshape(members, -1)]


def _in_order(member: list[Tensor], interleaved: int) -> Tensor:
    """Inverse of `_by_member`."""
    if len(member) > 1:
        return torch.stack(member, dim=1).view(-1)
    return member[0].view(len(member[0]), -1, interleaved).transpose(0, 1).reshape(-1)


def _places(member: list[Tensor]) -> list[Tensor]:
    """How many members of its group beat each, as `rank_in_group` has it."""
    if len(member) == 1:
        return [rank_in_group(member[0].t()).t().contiguous()]
    places = []
    for i, own in enumerate(member):
        wins = [(other >= own if j < i else other > own).to(torch.int8) for j, other in enumerate(member) if j != i]
        places.append(functools.reduce(torch.add, wins))
    return places


def _over_group(member: list[Tensor]) -> Tensor:
    """Sum over the members of a group, in the order of their numbers."""
    if len(member) == 1:
        return member[0].sum(dim=0, keepdim=True)
    return functools.reduce(torch.add, member)


def _end_to_end(run: Sequence[Tensor]) -> Tensor:
    """Results of all runs; those of a single one without a copy."""
    return run[0] if len(run) == 1 else torch.cat(list(run))


@fused()
def _tally(mask: Tensor, target: Tensor, kept: Tensor, before: Tensor | None) -> list[Tensor]:
    rest = -mask.numel() % 8
    values = [values_of(one).double() for one in F.pad(mask, (0, rest)).view(-1, 8).unbind(1)]
    target_bits, kept_bits = (
        _over_group(
            [one.to(torch.uint8) << place for place, one in enumerate(F.pad(bit, (0, rest)).view(-1, 8).unbind(1))]
        )
        for bit in (target, kept)
    )
    return [
        target_bits,
        kept_bits,
        _over_group([value * (1 - value) for value in values]).sum(),
        _over_group(values).sum(),
        values[0].new_zeros(()) if before is None else set_bits(target_bits ^ before).sum(dtype=torch.float64),
    ]
