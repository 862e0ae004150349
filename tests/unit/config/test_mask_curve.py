"""Conversion of fractions of a run to steps: one setting means one thing in short runs and in long ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels.fused_update import update_mask_in_place
from sparseforge_ds.mask.kernels.scores import score_moments

FRACTIONS = [0.02, 0.05, 0.1, 0.15, 0.19]


def _curve(max_steps: int) -> Tensor:
    """(fractions, n) effective masks of a run of static weights and curvature, as far as `FRACTIONS` of it."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(64, 64, generator=generator)
    curvature = torch.rand(64, 64, generator=generator)
    config = SparseForgeConfig(max_steps=max_steps)
    schedule = config.resolved_schedule
    pattern = config.parsed_pattern
    known = curvature.flatten()
    row = scalings(score_moments(dense.flatten(), known)[None], config.curvature.damping)[0]
    mask = torch.ones(dense.numel())
    result = []
    ends = [round(fraction * max_steps) for fraction in FRACTIONS]
    for step in range(1, ends[-1] + 1):
        if schedule.is_update(step):
            update_mask_in_place(dense.flatten(), mask, known, row, schedule.dials(step), pattern, dense.shape, 1)
        if step in ends:
            kept = torch.zeros(dense.numel() // 4, 4).scatter_(1, mask.view(-1, 4).topk(2).indices, 1.0).flatten()
            x = schedule.dials(step).x
            result.append(x * mask + (1 - x) * kept)
    return torch.stack(result)


@pytest.mark.parametrize("max_steps", [1_200, 20_000])
def test_long_runs_take_masks_along_the_curve_of_short_ones(max_steps: int) -> None:
    """Bound the difference by a mask's rate, as there is an update more or less by a fraction."""
    short = _curve(300)
    long = _curve(max_steps)
    assert short[0].mean() > 0.9 and ((short[-1] < 0.1) | (short[-1] > 0.9)).float().mean() > 0.9
    assert (short - long).abs().mean(1).max() < 0.05, (short - long).abs().mean(1)


def test_the_default_number_of_updates_does_not_depend_on_length() -> None:
    for max_steps in (150, 300, 1_200, 20_000, 1_000_000):
        schedule = SparseForgeConfig(max_steps=max_steps).resolved_schedule
        assert 14 <= sum(map(schedule.is_update, range(schedule.freeze_step))) <= 15, max_steps
