"""Start of every B of SLoRB at the moment it is switched on (eq. 13).

`shift_into_branches` starts before the first step, from the shift of each segment that leaves the pattern the least to
remove (`mask/shift`); the network computes what it did. `switch_on_branches` starts as published, from what a mask
removes already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseforge_ds.branches.decompose import decompose_into_branches
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.shift import best_shift
from sparseforge_ds.model.branch import branches, run_length
from sparseforge_ds.model.families import BRANCH, LOW_RANK
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.halo import HaloExchange
from sparseforge_ds.zero.shard import Shard

Publish = Callable[[int, Tensor, Tensor | None, Tensor, int], None]
"""`MaskMethod.publish`: partition, W, W before the step, master to write, step."""


@torch.no_grad()
def switch_on_branches(weights: ShardedWeights, publish: Publish | None) -> None:
    """Set the master of every B to the mean of the weights that the mask removes over each segment of inputs.

    Without `publish`, masters already hold m_eff W in full. With it, m_eff W of a partition is formed beside them.

    With R the removed part, the branch's error is R x - B P x, and (B P)_oi = B_oj for every input i of segment j. Let
    the inputs have variance s^2, correlation c >= 0 inside a segment and none between them. With d_oi = R_oi - B_oj,

        E |R x - B P x|^2 = s^2 * sum over o, j of ( (1 - c) * sum_i d_oi^2 + c * (sum_i d_oi)^2 )

    and both sums are least where sum_i d_oi = 0: B_oj = mean_i R_oi, whatever c is. At c = 1, where inputs of a segment
    are equal, the error is then exactly zero.

    Collective. W and B are sharded differently, so each B is summed whole, one at a time: 1/k of its weight on the
    wire, once in a run. `ShardLayout.push` afterwards makes it visible.
    """
    layout = weights.layout
    published: dict[int, Tensor] = {}

    def removed(shard: Shard) -> Tensor:
        """Return (numel of the shard,) fp32 (1 - m_eff) W."""
        if publish is None:
            return weights.state.dense(shard) - layout.master(shard)
        if shard.flat not in published:
            published.clear()
            dense = weights.state.weights_being_trained(shard.flat)
            published[shard.flat] = torch.empty_like(dense)
            publish(shard.flat, dense, None, published[shard.flat], weights.step)
        return weights.state.dense(shard) - shard.slice_of_flat(published[shard.flat])

    added = branches(weights.engine.module)
    _forget_moments(weights)
    for name, branch in added.items():
        weight = weights.prunable[name]
        shard = layout.shards[name]
        inputs = weight.shape[weight.input_axis]
        k = run_length(inputs, branch.k)
        outputs = weight.numel // inputs
        segments = math.ceil(inputs / k)
        unit, per_unit = _unit(inputs, k)
        # Flat, a unit is neighbours; or, with the inputs first, the same place in each of as many rows of outputs.
        input_last = weight.input_axis == -1
        apart = 1 if input_last else outputs
        period = unit * apart
        # Complete this rank's elements to whole units with zeros, and average over each segment.
        padded = F.pad(removed(shard), (shard.start % period, -shard.stop % period)).view(-1, unit, apart)
        sum_RSA = F.pad(padded, (0, 0, 0, per_unit * k - unit)).view(-1, per_unit, k, apart).sum(dim=2)
        lengths = torch.full((per_unit, 1), k, device=sum_RSA.device)
        lengths[-1] -= per_unit * k - unit
        mean_RA = sum_RSA.div_(lengths).view(-1, apart).to(layout.device)
        # Add up the parts of all ranks.
        b = torch.zeros(outputs * segments, device=layout.device)
        by_segment = b.view(-1, 1) if input_last else b.view(outputs, segments).t()
        by_segment[shard.start // period * per_unit :][: len(mean_RA)] = mean_RA
        layout.sum_shards(b)
        layout.write_master(f"{weight.module}.{LOW_RANK}", b)
        branch.enabled = True


def move_into_branches(model: nn.Module, weights: ShardedWeights) -> None:
    """Move what `low_rank` takes from the weights into the branches, before the first step. Collective."""
    low_rank = weights.config.low_rank
    assert low_rank is not None
    _forget_moments(weights)
    (decompose_into_branches if low_rank.learned else shift_into_branches)(model, weights)


@torch.no_grad()
def shift_into_branches(model: nn.Module, weights: ShardedWeights) -> None:
    """Do W <- W - b, B <- B + b with the best b of every segment of k inputs, and switch the branches on. Collective.

    Segments lie along the inputs as groups do, so that shards are completed to segments as to groups: only what a
    boundary cuts travels, and B, as in `switch_on_branches`. Where k does not divide the inputs, shards are completed
    to all inputs of an output; of a `Conv1D`, whose inputs come first, that is the whole weight. The masters of W are
    not written here: publish them, and push, afterwards. W gives up what the forward will see B add, in its precision,
    also when B was not 0 before. The pattern is n:m, and m divides k.
    """
    added = branches(model)
    layout = weights.layout
    assert isinstance(weights.pattern, NM)
    shards = {name: weights.shards[name] for name in added}
    inputs_of = {name: weight.shape[weight.input_axis] for name, weight in weights.prunable.items() if name in added}
    unit_of = {
        name: NM(1, _unit(inputs_of[name], run_length(inputs_of[name], branch.k))[0]) for name, branch in added.items()
    }
    periods = {
        name: unit_of[name].period(shard.shape, weights.prunable[name].input_axis) for name, shard in shards.items()
    }
    unit_halo = HaloExchange(layout, shards, periods)
    halo = unit_halo.exchange(weights.dense)
    for name, branch in added.items():
        weight = weights.prunable[name]
        inputs = inputs_of[name]
        k = run_length(inputs, branch.k)
        outputs = weight.numel // inputs
        segments = math.ceil(inputs / k)
        unit, per_unit = _unit(inputs, k)
        branch_name = f"{weight.module}.{LOW_RANK}"
        before = layout.gather_master(branch_name).view(-1)
        # Find b of the segments that begin here, and sum over the ranks.
        b = torch.zeros(outputs * segments, device=layout.device)
        in_unit_S = torch.arange(per_unit, device=layout.device)
        segments_of_chunks = []
        for chunk in unit_halo.chunks[name]:
            dense = unit_halo.with_halo(chunk, weights.dense(chunk), halo)
            unit_RU = unit_of[name].to_groups(dense, weight.shape, weight.input_axis).to(layout.device)
            first = chunk.start - chunk.start % periods[name]  # first flat element of the chunk's first period
            number_R = torch.arange(first // unit, first // unit + len(unit_RU), device=layout.device)
            # In the order of `to_groups`: along the inputs of an output, or all outputs of a unit after another.
            if weight.input_axis == -1:
                segment_RS = number_R[:, None] * per_unit + in_unit_S
                begins_RS = number_R[:, None] * unit + in_unit_S * k
            else:
                row_R = number_R // outputs
                output_R = number_R % outputs
                segment_RS = (output_R * segments + row_R * per_unit)[:, None] + in_unit_S
                begins_RS = (row_R[:, None] * unit + in_unit_S * k) * outputs + output_R[:, None]
            begins_here = (begins_RS >= chunk.start) & (begins_RS < chunk.stop)
            b[segment_RS] = torch.where(begins_here, _best_shifts(unit_RU, k, weights.pattern), b[segment_RS])
            segments_of_chunks.append(segment_RS)
        layout.sum_shards(b)
        b += before
        layout.write_master(branch_name, b)
        # W gives up what the forward will see B add.
        gained = layout.as_forward_dtype(branch_name, b) - layout.as_forward_dtype(branch_name, before)
        for chunk, segment_RS in zip(unit_halo.chunks[name], segments_of_chunks, strict=True):
            dense = weights.dense(chunk)
            b_RU = gained[segment_RS].to(dense.device).repeat_interleave(k, dim=1)[:, :unit]
            shift = unit_of[name].from_groups(b_RU, weight.shape, weight.input_axis)
            dense -= unit_halo.without_halo(chunk, shift)
        branch.enabled = True


def _forget_moments(weights: ShardedWeights) -> None:
    """Let Adam begin anew with all branches.

    It has counted steps in which a branch had no gradient, and would take several times the rate.
    """
    layout = weights.layout
    flats = {shard.flat for name, shard in layout.shards.items() if name.rpartition(".")[2] in BRANCH}
    for flat in flats:
        state: dict[str, Any] = layout.inner.state.get(layout.flats[flat], {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                value.zero_()
            elif key == "step":
                state[key] = 0


def _unit(inputs: int, k: int) -> tuple[int, int]:
    """Return the fewest inputs that whole segments make up, for all outputs alike, and how many segments these are."""
    return (inputs, math.ceil(inputs / k)) if inputs % k else (k, 1)


def _best_shifts(unit_RU: Tensor, k: int, pattern: NM) -> Tensor:
    """Return (R, S) shifts of the segments of units of inputs, the last of which may be shorter than k."""
    whole_segments = unit_RU.shape[1] - unit_RU.shape[1] % k
    segments = (unit_RU[:, :whole_segments].reshape(-1, k), unit_RU[:, whole_segments:])
    shifts = [best_shift(values, pattern.kept_count, pattern.members) for values in segments if values.numel()]
    return torch.cat([shift.view(len(unit_RU), -1) for shift in shifts], dim=1)
