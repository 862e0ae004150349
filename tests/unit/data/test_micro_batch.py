"""Parts of sequences: laid side by side they are the whole, in tokens, in what those predict and in the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparseforge_ds.data.batches import Batches
from sparseforge_ds.data.micro_batch import IGNORED, BatchLayout, MicroBatch
from sparseforge_ds.data.windows import CachedWindows
from sparseforge_ds.model.distill import next_labels, task_loss

S = 12


def stream(layout: BatchLayout, uneven: bool) -> Batches:
    token = np.arange(600, dtype=np.uint16)
    if uneven:  # a window of three is not trained on at all
        trained = (np.arange(600) % 7 < 3) & (np.arange(600) // S % 3 > 0)
        token = np.rec.fromarrays([token, trained], dtype=np.dtype("uint16,?"))
    return Batches([CachedWindows(token, "text", S, 0, 1)], [1], layout)


def mean_loss(batches: list[MicroBatch], table_VV: Tensor) -> float:
    """Over micro-batches, and ranks, of a model whose logits are a table of the token."""
    losses = [
        task_loss(table_VV[batch.token_BS], batch.label_BS, trained=batch.trained, shifted=batch.shifted)
        for batch in batches
    ]
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("uneven", [False, True], ids=["all", "completions"])
@pytest.mark.parametrize(("world_size", "parts"), [(2, 2), (4, 2), (4, 4), (6, 3)])
def test_parts_of_all_ranks_are_the_whole(world_size: int, parts: int, uneven: bool) -> None:
    groups = world_size // parts
    wholes = [stream(BatchLayout(2, 3, groups, group), uneven) for group in range(groups)]
    ranks = [stream(BatchLayout(2, 3, world_size, rank, parts), uneven) for rank in range(world_size)]
    table_VV = torch.randn(600, 600, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        steps, expected = [rank.step() for rank in ranks], [undivided.step() for undivided in wholes]
        for number in range(3):
            for group in range(groups):
                of_group = [steps[group * parts + part][number] for part in range(parts)]
                undivided = expected[group][number]
                assert torch.equal(torch.cat([batch.token_BS for batch in of_group], 1), undivided.token_BS)
                predicted = torch.cat([batch.label_BS for batch in of_group], 1)
                assert torch.equal(predicted.reshape(-1), next_labels(undivided.label_BS))
                assert (predicted[:, -1] == IGNORED).all() and (uneven or (predicted[:, :-1] != IGNORED).all())
        of_parts = mean_loss([batch for step in steps for batch in step], table_VV)
        assert of_parts == pytest.approx(mean_loss([batch for step in expected for batch in step], table_VV), rel=1e-6)
        for batch in (*ranks, *wholes):
            for _ in range(3):
                batch.advance()
        assert len({batch.position for batch in (*ranks, *wholes)}) == 1


def test_a_rank_knows_its_group_and_its_part() -> None:
    layout = BatchLayout(micro_batch=2, accumulation=3, world_size=6, rank=4, sequence_parallel=3)
    assert (layout.sequences_at_once, layout.global_batch, layout.data_parallel_rank, layout.token_slice(12)) == (
        4,
        12,
        1,
        slice(4, 8),
    )


def test_a_state_of_parts_continues_whole_ones() -> None:
    part, undivided = stream(BatchLayout(2, 1, 4, 3, 2), uneven=False), stream(BatchLayout(4, 1, 1, 0), uneven=False)
    for _ in range(5):
        part.advance()
    undivided.load_state_dict(part.state_dict())
    assert undivided.position == part.position == 20
    (own_part,) = part.step()
    (all_of_it,) = undivided.step()
    assert torch.equal(own_part.token_BS, all_of_it.token_BS[2:, S // 2 :])
