"""Masters are quantized alike wherever shards cut the groups that share a scale; ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.quantization import quantized
from sparseforge_ds.zero.quantized_masters import QuantizedMasters
from sparseforge_ds.zero.shard import Shard
from tests.distributed import PATIENCE

SHAPES = {"a": (6, 24), "b": (24, 5), "c": (3, 4, 12)}
AXES = {"a": -1, "b": -2, "c": -1}
GROUPS = {"a": NM(8, 8), "b": NM(12, 12), "c": NM(12, 12)}


class Wire:
    """Collectives of some threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=PATIENCE)
        self.values: list[Any] = [None] * ranks

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self.values[rank] = value
        self.barrier.wait()
        everything = list(self.values)
        self.barrier.wait()
        return everything


def layout(wire: Wire, rank: int, flat: Tensor, shards: dict[str, Shard]) -> Any:
    """Return a stand-in for a `ShardLayout`, with what `QuantizedMasters` uses."""
    ranks = len(wire.values)

    def all_to_all(out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        parts = wire.gather(rank, tensor.clone().split(sent))
        out.copy_(torch.cat([parts[other][rank] for other in range(ranks)]))

    return SimpleNamespace(
        rank=rank,
        world_size=ranks,
        device=torch.device("cpu"),
        replicated=False,
        flats=[flat],
        shards_in=[list(shards.values())],
        master=lambda shard: shard.slice_of_flat(flat),
        all_gather_object=lambda value: wire.gather(rank, value),
        all_reduce=lambda tensor: torch.stack(wire.gather(rank, tensor.clone())).sum(0),
        all_to_all=all_to_all,
    )


def one_rank(wire: Wire, rank: int, weights: dict[str, Tensor], bounds: dict[str, list[int]]) -> dict[str, Tensor]:
    """Quantize this rank's elements, and return them by weight."""
    shards = {}
    parts = []
    offset = 0
    for name, weight in weights.items():
        start, stop = bounds[name][rank : rank + 2]
        shards[name] = Shard(name, SHAPES[name], start, stop, 0, offset)
        parts.append(weight.flatten()[start:stop])
        offset += stop - start
    flat = torch.cat([*parts, torch.zeros(3)])
    QuantizedMasters(layout(wire, rank, flat, shards), shards, GROUPS, AXES, bits=4).quantize(0)
    return {name: shard.slice_of_flat(flat).clone() for name, shard in shards.items()}


@pytest.mark.parametrize("bounds", [[0, 1], [0, 0.37, 1], [0, 0.1, 0.13, 1], [0, 0.02, 0.6, 0.6, 1]])
def test_a_cut_group_is_rounded_as_a_whole_one(bounds: list[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    ends = {name: [round(share * weight.numel()) for share in bounds] for name, weight in weights.items()}
    wire = Wire(len(bounds) - 1)
    with ThreadPoolExecutor(len(wire.values)) as pool:
        ranks = list(pool.map(lambda rank: one_rank(wire, rank, weights, ends), range(len(wire.values))))
    for name, weight in weights.items():
        rounded = quantized(GROUPS[name].to_groups(weight.flatten(), SHAPES[name], AXES[name]), 4)
        expected = GROUPS[name].from_groups(rounded, SHAPES[name], AXES[name])
        assert torch.equal(torch.cat([rank[name] for rank in ranks]), expected), name
