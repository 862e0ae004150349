"""One mask update of whole groups in one pass: score, gate, target, the moved mask and its top N (eqs. 3 to 9).

Legend of shape suffixes: S spans of consecutive elements, M members of a group, C groups that are interleaved in a span
(1 where the input axis is last), n = S M C elements in flat order. Groups of up to `SMALL` members are worked on as
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
from sparseforge_ds.mask.bits import pack, set_bits
from sparseforge_ds.mask.chunks import chunks
from sparseforge_ds.mask.codes import stored_as, values_of
from sparseforge_ds.mask.factored import rank_one
from sparseforge_ds.mask.fusing import between, from_nearer, fused, row_sums
from sparseforge_ds.mask.importance import Curvature, part_of, score
from sparseforge_ds.mask.pattern import NM, SMALL, Pattern, beaten_by, rank_in_group


class Chosen(NamedTuple):
    """What an update decided."""

    target: Tensor
    """(n,) bool: the top N of the scores."""
    kept: Tensor
    """(n,) bool: the top N of the new mask."""
    disagrees: Tensor
    """(n / M,) bool of every group: its top N is not what the paper's own rule 1[m > 0.5] would keep."""


class Tally(NamedTuple):
    """Choices as they are kept, and sums that metrics are made of."""

    target: Tensor
    """(ceil(n / 8),) packed bits."""
    kept: Tensor | None
    """(ceil(n / 8),) packed bits, where they were asked for."""
    sums: list[Tensor]
    """() fp64 each: m (1 - m), m, and, where there was an update before, bits of the target that changed."""


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
        midpoint: whether the threshold of the gate lies halfway between the N-th and the next score; else on the N-th,
            as the paper writes it, which holds that survivor at exactly 0.5 at every temperature.
    """
    span = pattern.span(shape, input_axis)
    side_by_side = isinstance(pattern, NM) and pattern.members <= SMALL
    interleaved = span // pattern.members if side_by_side else 1
    pull = dials.penalty_rate * dials.mid_penalty
    rates = (dials.temperature, *from_nearer(dials.beta), pull, *from_nearer(dials.mask_rate))
    settings = (scaling, pattern.members, interleaved, pattern.kept, midpoint, *rates)
    chosen = []
    for chunk in chunks(dense.view(-1, span)):
        inside = slice(chunk.start * span, chunk.stop * span)
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


def tally(mask: Tensor, target: Tensor, kept: Tensor | None, before: Tensor | None) -> Tally:
    """Bits and sums of an update.

    Args:
        mask: (n,) new mask, fp32 or codes.
        target: (n,) bool, see `Chosen`.
        kept: (n,) bool, see `Chosen`, or None where nobody needs its bits.
        before: (ceil(n / 8),) packed target of the update before, or None where there is none to compare with.
    """
    targets, keeps, sums = [], [], []
    for chunk in chunks(mask):  # of a multiple of 8 elements
        octets = slice(chunk.start // 8, -(-chunk.stop // 8))
        given = (None if kept is None else kept[chunk], None if before is None else before[octets])
        bits, *found = _tally(mask[chunk], target[chunk], *given)
        targets.append(bits)
        if kept is not None:
            keeps.append(found.pop(0))
        sums.append([total for rows in found for total in rows.sum(dim=1).unbind()])
    totals = sums[0] if len(sums) == 1 else [torch.stack(list(one)).sum() for one in zip(*sums, strict=True)]
    return Tally(_end_to_end(targets), _end_to_end(keeps) if keeps else None, totals)


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
    nearer_beta: float,
    way_beta: float,
    pull: float,
    nearer_rate: float,
    way_rate: float,
) -> list[Tensor]:
    """New mask, target, kept and disagreement of elements in flat order, or of groups one after the other."""
    if share_R is not None and column_C is not None:
        elements = rank_one(share_R, column_C, first, first + dense.numel())
    sizes = (dense.numel() // (members * interleaved), members, interleaved)
    weights, old = _by_member(dense, *sizes), _by_member(mask, *sizes)
    curvatures = [None] * len(old) if elements is None else _by_member(elements, *sizes)
    scores = [score(weight, h, scaling) for weight, h in zip(weights, curvatures, strict=True)]
    places = _places(scores)
    near = [(place == kept - 1) | (place == kept) if midpoint else place == kept - 1 for place in places]
    # Every other term is 0, which leaves the sum exact.
    tau = _over_group([value * one.float() for one, value in zip(near, scores, strict=True)])
    if midpoint:
        tau = tau * 0.5
    moved, targets = [], [place < kept for place in places]
    for value, target, stored in zip(scores, targets, old, strict=True):
        gated = torch.sigmoid((value - tau).double() / temperature).float()
        at, hard = values_of(stored), target.float()
        pulled = (between(gated, hard, nearer_beta, way_beta) - (at - hard) * pull).clamp(0, 1)
        moved.append(stored_as(between(at, pulled, nearer_rate, way_rate), mask.dtype))
    new = [values_of(stored) for stored in moved]
    tops = [place < kept for place in _places(new)]
    wrong = [(value > 0.5) != top for value, top in zip(new, tops, strict=True)]
    disagrees = functools.reduce(torch.logical_or, wrong[0].unbind(0) if len(wrong) == 1 else wrong)
    return [*(_in_order(one, interleaved) for one in (moved, targets, tops)), disagrees.view(-1)]


_fused_move = fused()(_move_mask)


def _by_member(flat: Tensor, spans: int, members: int, interleaved: int) -> list[Tensor]:
    """(n,) -> M tensors (S, C) to compile; step by step, where every operation costs a call, one of (M, S C)."""
    member = flat.view(spans, members, interleaved)
    if torch.compiler.is_compiling():
        return list(member.unbind(1))
    return [torch.stack(member.unbind(1)).view(members, -1)]


def _in_order(member: list[Tensor], interleaved: int) -> Tensor:
    """Inverse of `_by_member`."""
    if len(member) > 1:
        return torch.stack(member, dim=1).view(-1)
    found = member[0].view(len(member[0]), -1, interleaved)
    flat = found.new_empty(found.shape[1], len(found), interleaved)
    for place, one in enumerate(found):  # several times faster than a transposed copy
        flat[:, place] = one
    return flat.view(-1)


def _places(member: list[Tensor]) -> list[Tensor]:
    """How many members of its group beat each, as `rank_in_group` has it."""
    if len(member) > 1:
        return beaten_by(member)
    one = member[0]
    return [rank_in_group(one.t()).t().contiguous() if len(one) > SMALL else torch.stack(beaten_by(one.unbind(0)))]


def _over_group(member: list[Tensor]) -> Tensor:
    """Sum over the members of a group, in the order of their numbers."""
    if len(member) == 1:
        return member[0].sum(dim=0, keepdim=True)
    return functools.reduce(torch.add, member)


def _end_to_end(found: Sequence[Tensor]) -> Tensor:
    """Results of all chunks; those of a single one without a copy."""
    return found[0] if len(found) == 1 else torch.cat(list(found))


@fused(kernels=4)
def _tally(mask: Tensor, target: Tensor, kept: Tensor | None, before: Tensor | None) -> list[Tensor]:
    """Bits of each that is given, (2, rows) sums of the mask and, where there is a `before`, (1, rows) of flips."""
    values = values_of(mask).double()
    found = [_packed(one) for one in (target, kept) if one is not None]
    sums = [row_sums([values * (1 - values), values])]
    if before is not None:
        sums.append(row_sums([set_bits(found[0] ^ before).double()]))
    return found + sums


def _packed(bit: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return pack(bit)
    octet = F.pad(bit, (0, -bit.numel() % 8)).view(-1, 8).unbind(1)
    return _over_group([one.to(torch.uint8) << place for place, one in enumerate(octet)])
