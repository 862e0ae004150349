"""First masks by score: what an input that never occurred leaves to magnitude, and pairs by their squares."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.pattern import NM, Pairs
from sparseforge_ds.model.families import PrunableWeight, prunable_weights
from sparseforge_ds.start.first_mask import choose_by_score
from tests.tiny_models import tiny_gpt2, tiny_llama


def _weight(inputs_first: bool) -> PrunableWeight:
    """Return a weight of one of the two orientations."""
    model = tiny_gpt2() if inputs_first else tiny_llama()
    return prunable_weights(model, SparseForgeConfig())[0]


@pytest.mark.parametrize("inputs_first", [False, True])
def test_weights_of_inputs_that_never_occurred_are_ranked_by_magnitude_behind_all_others(inputs_first: bool) -> None:
    weight = _weight(inputs_first)
    outputs, inputs = (weight.shape[::-1] if inputs_first else weight.shape)[-2:]
    value_OI = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    value = (value_OI.t() if inputs_first else value_OI).contiguous()
    # Of each group, none, one, or all inputs occurred.
    occurred_I = torch.zeros(inputs)
    occurred_I[1] = 1e-6
    occurred_I[4:8] = 3.0
    for square_I in (torch.zeros(inputs), occurred_I):
        kept = choose_by_score(weight, value, NM(2, 4), square_I[None])
        kept_OGM = (kept.t() if inputs_first else kept).unflatten(1, (-1, 4))
        # Python sorts by two keys.
        score_OGM = (value_OI.square() * square_I).unflatten(1, (-1, 4)).tolist()
        size_OGM = value_OI.abs().unflatten(1, (-1, 4)).tolist()
        for output in range(outputs):
            for group in range(inputs // 4):
                keys = list(zip(score_OGM[output][group], size_OGM[output][group], strict=True))
                largest = sorted(range(4), key=lambda member, keys=keys: keys[member])[2:]
                assert kept_OGM[output, group].nonzero().flatten().tolist() == sorted(largest), (output, group)


def test_pairs_are_compared_by_the_squares_that_they_hold() -> None:
    weight = _weight(False)
    value = torch.ones(weight.shape)
    value[:, 0::8] = 1.9  # 1.9² + 0² is above 1² + 1², although 1.9 + 0 is below 1 + 1
    value[:, 1::8] = 0.0
    kept = choose_by_score(weight, value, Pairs(4, 8), None)
    assert kept.unflatten(1, (-1, 8)).all(dim=(0, 1)).tolist() == [True] * 4 + [False] * 4
