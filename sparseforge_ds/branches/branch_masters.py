"""Masters of what a branch learns, B and perhaps P, which are sharded differently than the weight beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.model.branch import Branch
from sparseforge_ds.model.families import BRANCH, PrunableWeight
from sparseforge_ds.zero.shard import Shard, ShardLayout


def master_of(layout: ShardLayout, weight: PrunableWeight, which: str) -> tuple[Shard, Tensor]:
    """Return this rank's shard of the B or P (a name of `BRANCH`) of a weight, and its master."""
    shard = layout.shards[f"{weight.module}.{which}"]
    return shard, shard.slice_of_flat(layout.flats[shard.flat].data)


def gather_master(layout: ShardLayout, weight: PrunableWeight, which: str) -> Tensor:
    """Return the masters of B or P in fp32, in their shape, on every rank. Collective."""
    own, master = master_of(layout, weight, which)
    value = torch.zeros(own.shape, device=layout.device)
    value.view(-1)[own.start : own.stop] = master
    return layout.sum_shards(value)


def write(layout: ShardLayout, weight: PrunableWeight, which: str, value: Tensor) -> None:
    """Set the masters of B or P, whole on every rank, in any shape with as many elements."""
    own, master = master_of(layout, weight, which)
    master.copy_(value.reshape(-1)[own.start : own.stop])


def as_forward_dtype(layout: ShardLayout, weight: PrunableWeight, which: str, branch: Branch, value: Tensor) -> Tensor:
    """Return what the forward sees of a value of the masters of B or P, in fp32."""
    _, master = master_of(layout, weight, which)
    return value.to(master.dtype).to(getattr(branch, which).dtype).float()


def forget_moments(layout: ShardLayout, weights: Iterable[PrunableWeight]) -> None:
    """Let Adam begin anew.

    It has counted steps in which a branch had no gradient, and would take several times the rate.
    """
    names = {f"{weight.module}.{which}" for weight in weights for which in BRANCH}
    for flat in {shard.flat for name, shard in layout.shards.items() if name in names}:
        state: dict[str, Any] = layout.inner.state.get(layout.flats[flat], {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                value.zero_()
            elif key == "step":
                state[key] = 0
