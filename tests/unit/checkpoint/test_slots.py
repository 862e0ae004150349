from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from benchmarks.sharded_checkpoint import write_run
from sparseforge_ds.checkpoint.reader import Checkpoint
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


def test_a_partition_of_stage_3_is_as_long_as_its_pieces(tmp_path: Path) -> None:
    """An element more belongs to another model, or to another number of ranks."""
    config = Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=12, num_hidden_layers=1, head_dim=8)
    config.num_attention_heads = config.num_key_value_heads = 1
    write_run(tmp_path, config, ranks=3)
    Checkpoint(tmp_path)
    file = sorted(tmp_path.glob("checkpoints/*/*optim_states.pt"))[1]
    content = torch.load(file, weights_only=False)
    flats = content["optimizer_state_dict"]["fp32_flat_groups"]
    flats[0] = torch.cat([flats[0], torch.zeros(1)])
    torch.save(content, file)
    message = rf"{file.name}: its partition 0 has {len(flats[0])} elements, and .* make {len(flats[0]) - 1}; .* another"
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)
