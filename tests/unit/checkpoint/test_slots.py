from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseforge_ds.checkpoint.slots import Slot, whole_slots, zero3_slots, zero12_slots

shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=5)


@given(shapes, st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_zero3_slots_end_to_end_are_the_weight(sizes: list[tuple[int, int]], world_size: int) -> None:
    group = {f"w{i}": size for i, size in enumerate(sizes)}
    weights = {name: torch.randn(math.prod(shape)) for name, shape in group.items()}
    flats = []
    for rank in range(world_size):
        pieces = []
        for weight in weights.values():
            piece = math.ceil(weight.numel() / world_size)
            padded = torch.cat([weight, torch.full((piece * world_size - weight.numel(),), math.nan)])
            pieces.append(padded[rank * piece : (rank + 1) * piece])
        flats.append([torch.cat(pieces)])
    for name, slots in zero3_slots([group], world_size).items():
        assert torch.equal(torch.cat([flats[s.rank][s.flat][s.start : s.stop] for s in slots]), weights[name])


@given(shapes, st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_zero12_slots_end_to_end_are_the_weight(sizes: list[tuple[int, int]], world_size: int, gap: int) -> None:
    group = {f"w{i}": size for i, size in enumerate(sizes)}
    weights = {name: torch.randn(math.prod(shape)) for name, shape in group.items()}
    full = torch.cat([torch.cat([weight, torch.full((gap,), math.nan)]) for weight in weights.values()])
    partition = 2 * math.ceil(full.numel() / (2 * world_size))
    full = torch.cat([full, torch.full((partition * world_size - full.numel(),), math.nan)])
    for name, slots in zero12_slots([group], [[gap] * len(group)], [partition]).items():
        flats = full.view(world_size, partition)
        assert torch.equal(torch.cat([flats[s.rank, s.start : s.stop] for s in slots]), weights[name])
        assert all(s.stop <= partition for s in slots)


def test_groups_without_a_partition_size_are_an_error() -> None:
    with pytest.raises(ValueError):
        zero12_slots([{"a": (2,)}], [[0]], [])


def test_stage_0_slots_are_on_rank_0_end_to_end() -> None:
    slots = whole_slots([{"a": (2, 3), "b": (4,)}, {}, {"c": (1,)}])
    assert slots == {"a": [Slot(0, 0, 0, 6)], "b": [Slot(0, 0, 6, 10)], "c": [Slot(0, 2, 0, 1)]}
