"""SLoRB at the moment it is switched on: where every B starts (design eq. 13).

`shift_into_branches`, before the first step: from the shift of each segment that leaves the pattern the least to remove
(`mask/shift`); the network computes what it did. `switch_on_branches`, as published: from what a mask removes already.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.shift import best_shift
from sparseforge_ds.methods.branch_masters import forget_moments, seen, whole, write
from sparseforge_ds.methods.decompose import decompose_into_branches
from sparseforge_ds.methods.method import MaskMethod
from sparseforge_ds.methods.sharded_weights import ShardedWeights
from sparseforge_ds.model.branch import branches
from sparseforge_ds.model.families import LOW_RANK
from sparseforge_ds.zero.halo import HaloExchange
from sparseforge_ds.zero.shard import Shard


@torch.no_grad()
def switch_on_branches(on: ShardedWeights, method: MaskMethod) -> None:
    """Set the master of every B to the mean of the weights that the mask removes over each segment of inputs.

    With R the removed part, the branch's error is R x - B P x, and (B P)_oi = B_oj for every input i of segment j. Let
    the inputs have variance s^2, correlation c >= 0 inside a segment and none between them. With d_oi = R_oi - B_oj,

        E |R x - B P x|^2 = s^2 * sum over o, j of ( (1 - c) * sum_i d_oi^2 + c * (sum_i d_oi)^2 )

    and both sums are least where sum_i d_oi = 0: B_oj = mean_i R_oi, whatever c is. At c = 1, where inputs of a segment
    are equal, the error is then exactly zero.

    Collective. W and B are sharded differently, so each B is summed whole, one at a time: 1/k of its weight on the
    wire, once in a run. `ShardLayout.push` afterwards makes it visible.
    """
    layout, weights, published = on.layout, on.weights, dict[int, Tensor]()

    def removed(shard: Shard) -> Tensor:
        """(numel of the shard,) fp32 (1 - m_eff) W; masters may have too few bits for it."""
        if shard.flat not in published:
            published.clear()
            dense = on.state.weights_being_trained(shard.flat)
            published[shard.flat] = torch.empty_like(dense)
            method.publish(shard.flat, dense, None, published[shard.flat], on.step)
        return on.state.dense(shard) - shard.slice_of_flat(published[shard.flat])

    added = branches(on.engine.module)
    forget_moments(layout, [weights[name] for name in added])
    for name, branch in added.items():
        weight, shard = weights[name], layout.shards[name]
        inputs, k = weight.shape[weight.input_axis], branch.k
        outputs, segments = weight.numel // inputs, math.ceil(inputs / k)
        unit, each = _unit(inputs, k)
        # Flat, a unit is neighbours; or, with the inputs first, the same place in each of as many rows of outputs.
        input_last = weight.input_axis == -1
        apart = 1 if input_last else outputs
        span = unit * apart
        widened = F.pad(removed(shard), (shard.start % span, -shard.stop % span)).view(-1, unit, apart)
        sum_RSA = F.pad(widened, (0, 0, 0, each * k - unit)).view(-1, each, k, apart).sum(dim=2)
        lengths = torch.full((each, 1), k, device=sum_RSA.device)
        lengths[-1] -= each * k - unit
        mean_RA = sum_RSA.div_(lengths).view(-1, apart).to(layout.device)
        b = torch.zeros(outputs * segments, device=layout.device)
        of_segments = b.view(-1, 1) if input_last else b.view(outputs, segments).t()
        of_segments[shard.start // span * each :][: len(mean_RA)] = mean_RA
        layout.sum_shards(b)
        write(layout, weight, LOW_RANK, b)
        branch.enabled = True


def move_into_branches(model: nn.Module, on: ShardedWeights) -> None:
    """Before the first step: what `low_rank` moves from the weights into the branches. Collective."""
    low_rank = on.config.low_rank
    assert low_rank is not None
    (decompose_into_branches if low_rank.learned else shift_into_branches)(model, on)


@torch.no_grad()
def shift_into_branches(model: nn.Module, on: ShardedWeights) -> None:
    """W <- W - b and B <- B + b with the best b of every segment of k inputs, and the branches on. Collective.

    Segments lie along the inputs as groups do, so that shards are completed to segments as to groups: only what a
    boundary cuts travels, and B, as in `switch_on_branches`. Where k does not divide the inputs, shards are completed
    to all inputs of an output; of a `Conv1D`, whose inputs come first, that is the whole weight. The masters of W are
    not written here: publish them, and push, afterwards. W gives up what the forward will see B add, in its precision,
    also when B was not 0 before. The pattern is n:m, and m divides k.
    """
    added, layout = branches(model), on.layout
    assert isinstance(on.pattern, NM)
    shards = {name: on.shards[name] for name in added}
    inputs_of = {name: weight.shape[weight.input_axis] for name, weight in on.weights.items() if name in added}
    unit_of = {name: NM(1, _unit(inputs_of[name], branch.k)[0]) for name, branch in added.items()}
    spans = {name: unit_of[name].span(shard.shape, on.weights[name].input_axis) for name, shard in shards.items()}
    forget_moments(layout, [on.weights[name] for name in added])
    edges = HaloExchange(layout, shards, spans)
    halo = edges.exchange(on.reader(on.dense))
    for name, branch in added.items():
        weight, k, inputs = on.weights[name], branch.k, inputs_of[name]
        outputs, segments = weight.numel // inputs, math.ceil(inputs / k)
        unit, each = _unit(inputs, k)
        input_last = weight.input_axis == -1
        b, before = torch.zeros(outputs * segments, device=layout.device), whole(layout, weight, LOW_RANK).view(-1)
        in_unit_S = torch.arange(each, device=layout.device)
        places = []
        for chunk in edges.chunks[name]:
            dense = edges.with_halo(chunk, on.dense(chunk), halo)
            unit_RU = unit_of[name].to_groups(dense, weight.shape, weight.input_axis).to(layout.device)
            first = chunk.start - chunk.start % spans[name]  # flat element that the first span of the chunk begins with
            number_R1 = torch.arange(first // unit, first // unit + len(unit_RU), device=layout.device)[:, None]
            # In the order of `to_groups`: along the inputs of an output, or all outputs of a unit after another.
            if input_last:
                place_RS, begins_RS = number_R1 * each + in_unit_S, number_R1 * unit + in_unit_S * k
            else:
                row_R1, output_R1 = number_R1 // outputs, number_R1 % outputs
                place_RS = output_R1 * segments + row_R1 * each + in_unit_S
                begins_RS = (row_R1 * unit + in_unit_S * k) * outputs + output_R1
            mine = (begins_RS >= chunk.start) & (begins_RS < chunk.stop)  # a segment that is cut counts where it begins
            b[place_RS] = torch.where(mine, _best_shifts(unit_RU, k, on.pattern), b[place_RS])
            places.append(place_RS)
        layout.sum_shards(b)
        b += before
        write(layout, weight, LOW_RANK, b)
        b = seen(layout, weight, LOW_RANK, branch, b) - seen(layout, weight, LOW_RANK, branch, before)
        for chunk, place_RS in zip(edges.chunks[name], places, strict=True):
            dense = on.dense(chunk)
            b_RU = b[place_RS].to(dense.device).repeat_interleave(k, dim=1)[:, :unit]
            dense -= edges.without_halo(chunk, unit_of[name].from_groups(b_RU, weight.shape, weight.input_axis))
        branch.enabled = True


def _unit(inputs: int, k: int) -> tuple[int, int]:
    """The fewest inputs that whole segments make up, for all outputs alike, and how many segments these are."""
    return (inputs, math.ceil(inputs / k)) if inputs % k else (k, 1)


def _best_shifts(unit_RU: Tensor, k: int, pattern: NM) -> Tensor:
    """(R, S) of the segments of units of inputs, the last of which may be shorter than k."""
    whole = unit_RU.shape[1] - unit_RU.shape[1] % k
    parts = unit_RU[:, :whole].reshape(-1, k), unit_RU[:, whole:]
    found = [best_shift(part, pattern.kept, pattern.members) for part in parts if part.numel()]
    return torch.cat([shift.view(len(unit_RU), -1) for shift in found], dim=1)
