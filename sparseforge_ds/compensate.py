"""SLoRB at the moment it is switched on: every B starts from what the mask removes (design eq. 13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    added = branches(model)
    for flat in {layout.shards[f"{weights[name].module}.low_rank_b"].flat for name in added}:
        _forget_moments(layout.inner.state.get(layout.flats[flat], {}))
    for name, branch in added.items():
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


def _forget_moments(state: dict[str, Any]) -> None:
    """Let Adam begin anew: it has counted steps in which B had no gradient, and would take several times the rate."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            value.zero_()
        elif key == "step":
            state[key] = 0
