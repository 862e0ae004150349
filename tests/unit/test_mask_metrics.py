"""Mask health on one process: every number against a literal computation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sparseforge_ds.curvature.histograms import CURVATURE_DECADES, histogram_counts
from sparseforge_ds.mask.kernels.chunks import ELEMENTS_PER_THREAD
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask_metrics import MaskMetrics
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.model.peak_memory import PeakMemoryCounter
from sparseforge_ds.zero.matrices import Matrices
from sparseforge_ds.zero.shard import Shard

WEIGHT = PrunableWeight("w", (4, 8), -1, "layer")


def metrics_of(start: int, stop: int) -> tuple[MaskMetrics, Shard]:
    shard = Shard("w", WEIGHT.shape, start, stop, 0, 0)
    layout = cast(Any, SimpleNamespace(device=torch.device("cpu"), replicated=True, sum_shards=lambda table: table))
    return MaskMetrics(Matrices(layout, {"w": shard}, {"w": 1}), NM(2, 4)), shard


def test_a_soft_mask_is_undecided_by_its_variance() -> None:
    health, shard = metrics_of(0, 32)
    mask = torch.linspace(0, 1, 32)
    health.add_update(shard, mask, mask > 0.5)
    metrics = health.report(False)
    assert metrics["mask/undecided"] == pytest.approx(sum(m * (1 - m) for m in mask.tolist()) / 32)
    assert metrics["mask/kept"] == pytest.approx(0.5)
    assert "mask/flip_rate" not in metrics and "curvature/mean" not in metrics


def test_flips_are_counted_between_updates_and_forgotten_after_a_load() -> None:
    health, shard = metrics_of(0, 32)
    mask = torch.ones(32)
    target = torch.zeros(32, dtype=torch.bool)
    for flipped, expected in ((0, None), (3, 3 / 32), (0, 0.0)):
        target[:flipped] = ~target[:flipped]
        health.add_update(shard, mask, target)
        assert health.report(False).get("mask/flip_rate") == expected
    # What an update had counted when it broke off is forgotten, too.
    health.add_update(shard, torch.zeros(32), target)
    health.forget()
    health.add_update(shard, mask, ~target)
    assert health.report(False) == {"mask/undecided": 0.0, "mask/kept": 1.0}


@pytest.mark.parametrize(
    ("start", "stop", "groups"), [(0, 32, 8), (1, 32, 7), (0, 31, 7), (5, 7, 0), (2, 10, 1), (3, 6, 0), (4, 8, 1)]
)
def test_only_whole_groups_are_compared(start: int, stop: int, groups: int) -> None:
    health, shard = metrics_of(start, stop)
    mask = torch.tensor([1.0, 0.9, 0.1, 0.0]).repeat(8)[start:stop]
    touched = -(-stop // 4) - start // 4
    health.add_update(shard, mask, mask > 0.5)
    # One complete group disagrees, and so does a group that the shard's start cuts, which is not counted.
    disagrees = torch.zeros(touched, dtype=torch.bool)
    disagrees[: 1 + (start % 4 > 0)] = groups > 0
    disagrees[0] |= start % 4 > 0
    health.add_disagreement(WEIGHT, shard, disagrees)
    assert health.report(False).get("mask/disagreement") == (pytest.approx(1 / groups) if groups else None)


def test_curvature_numbers_are_those_of_all_elements() -> None:
    health, shard = metrics_of(0, 32)
    average = torch.randn(32)
    sample = torch.randn(32)
    health.add_refresh(average, sample)
    curvature = torch.tensor([-1.0, 3.0]).repeat(16)
    health.add_update(shard, torch.ones(32), torch.ones(32, dtype=torch.bool))
    health.add_curvature(curvature, correction=0.5)
    metrics = health.report(True)
    assert metrics["curvature/mean"] == pytest.approx(2.0)
    assert metrics["curvature/negative_share"] == 0.5
    expected = torch.nn.functional.cosine_similarity(average.double(), sample.double(), dim=0).item()
    assert metrics["curvature/signal"] == pytest.approx(expected, rel=1e-5)
    # The next report has its own update alone.
    health.add_update(shard, torch.full((32,), 0.5), torch.ones(32, dtype=torch.bool))
    metrics = health.report(True)
    assert metrics["mask/undecided"] == 0.25 and metrics["curvature/mean"] == 0.0
    assert "curvature/signal" not in metrics


def test_histograms_count_every_element_once() -> None:
    mask = torch.tensor([0.0, 0.04, 0.5, 1.0])
    curvature = torch.tensor([0.0, -1.0, 1e-25, 1e9])
    counts = histogram_counts(mask, curvature, bins=20)
    assert counts[:20].tolist() == [2.0] + [0.0] * 9 + [1.0] + [0.0] * 8 + [1.0]
    low, high = CURVATURE_DECADES
    of_one = int((0 - low) / (high - low) * 20)
    assert counts[20] == 2 and counts[20 + of_one] == 1 and counts[-1] == 1
    assert histogram_counts(mask, None, bins=20)[20:].sum() == 0


def test_a_large_shard_is_summed_in_runs() -> None:
    """Sum to the same numbers as at once, with no temporary of the shard's size beside the kept target bits."""
    count = 40 * ELEMENTS_PER_THREAD * torch.get_num_threads() + 8
    shape = (count // 8, 8)
    layout = cast(Any, SimpleNamespace(device=torch.device("cpu"), replicated=True, sum_shards=lambda table: table))
    shard = Shard("w", shape, 0, count, 0, 0)
    health = MaskMetrics(Matrices(layout, {"w": shard}, {"w": 1}), NM(2, 4))
    generator = torch.Generator().manual_seed(0)
    mask, curvature, sample = (torch.rand(count, generator=generator) - shift for shift in (0.0, 0.2, 0.1))
    first, second = mask > 0.5, mask > 0.3
    with PeakMemoryCounter((mask, curvature, sample, first, second)) as live:
        for target in (first, second):
            health.add_refresh(curvature, sample)
            health.add_update(shard, mask, target)
            health.add_curvature(curvature)
    assert live.peak < count
    metrics = health.report(True)
    assert metrics["mask/flip_rate"] == pytest.approx((first != second).double().mean().item())
    assert metrics["mask/undecided"] == pytest.approx((mask.double() * (1 - mask.double())).mean().item(), rel=1e-6)
    assert metrics["curvature/mean"] == pytest.approx(curvature.double().mean().item(), rel=1e-6)
    assert metrics["curvature/negative_share"] == pytest.approx((curvature < 0).double().mean().item())
    cosine = torch.cosine_similarity(curvature.double(), sample.double(), dim=0).item()
    assert metrics["curvature/signal"] == pytest.approx(cosine, rel=1e-6)
