"""SLoRB at the moment it is switched on: every B starts from what the mask removes (design eq. 13)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.model.low_rank import branches
from sparseforge_ds.zero.shard import Layout, Shard


@torch.no_grad()
def switch_on_branches(
    model: nn.Module, layout: Layout, weights: dict[str, PrunableWeight], removed: Callable[[Shard], Tensor]
) -> None:
    """Set the master of every B to the mean of the removed weights over each run of inputs. Collective.

    W and B are sharded differently, so each B is summed whole, one at a time: 1/k of its weight on the wire, once in a
    run. `Layout.push` afterwards makes it visible.

    Args:
        model: the engine's module.
        layout: of the engine.
        weights: the prunable weights by name.
        removed: gives (numel of the shard,) fp32 (1 - m_eff) W.
    """
    for name, branch in branches(model).items():
        weight, shard = weights[name], layout.shards[name]
        inputs = weight.shape[weight.input_axis]
        outputs, runs = weight.numel // inputs, inputs // branch.k
        part = removed(shard)
        index = torch.arange(shard.start, shard.stop, device=part.device)
        input_last = weight.input_axis == -1
        row, column = (index // inputs, index % inputs) if input_last else (index % outputs, index // outputs)
        b = torch.zeros(outputs * runs, device=part.device)
        b.index_add_(0, row * runs + column // branch.k, part / branch.k)
        b = b.to(layout.device)
        if not layout.replicated:
            dist.all_reduce(b)
        own = layout.shards[f"{weight.module}.low_rank_b"]
        own.of(layout.flats[own.flat].data).copy_(b[own.start : own.stop])
        branch.enabled = True
