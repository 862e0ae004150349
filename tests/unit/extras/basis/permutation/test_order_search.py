"""The order that is found keeps more score than those that cost nothing, and on small blocks the most."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sparseforge_ds.extras.basis.permutation.order_search import best_order, kept_score
from sparseforge_ds.mask.pattern import NM


def scores(blocks: int, channels: int, rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(blocks, channels, rows, generator=generator).abs()


def plain(score_BCR: Tensor) -> Tensor:
    return torch.arange(score_BCR.shape[1]).expand(score_BCR.shape[:2])


def dealt(score_BCR: Tensor, members: int) -> Tensor:
    """Sorted by their total score and dealt out: every group gets one of each class."""
    B, C, _ = score_BCR.shape
    return score_BCR.sum(-1).argsort(-1, descending=True).view(B, members, -1).mT.reshape(B, C)


def test_kept_score_is_that_of_the_groups() -> None:
    score_BCR = scores(2, 8, 3)
    order_BC = torch.stack([torch.randperm(8), torch.randperm(8)])
    expected = [
        sum(
            sum(sorted((score_BCR[b, c, r].item() for c in order_BC[b, g : g + 4]), reverse=True)[:2])
            for g in (0, 4)
            for r in range(3)
        )
        for b in range(2)
    ]
    assert kept_score(score_BCR, order_BC, NM(2, 4)).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(1, 4), NM(3, 4), NM(4, 8)], ids=str)
def test_an_order_keeps_more_than_identity_and_sorted_channels(pattern: NM) -> None:
    score_BCR = scores(3, 64, 40) * torch.linspace(0.2, 2, 64)[None, :, None]
    order_BC = best_order(score_BCR, pattern, seed=0)
    assert torch.equal(order_BC.sort(-1).values, plain(score_BCR))
    kept_B = kept_score(score_BCR, order_BC, pattern)
    assert (kept_B > kept_score(score_BCR, plain(score_BCR), pattern)).all()
    assert (kept_B > kept_score(score_BCR, dealt(score_BCR, pattern.members), pattern)).all()


def test_an_order_is_near_the_best_of_all() -> None:
    """Compare with the 35 ways to make two groups of 4 of 8 channels."""
    score_BCR = scores(20, 8, 12)
    ways = [(0, *rest) for rest in itertools.combinations(range(1, 8), 3)]
    orders = [[*way, *(c for c in range(8) if c not in way)] for way in ways]
    best_B = torch.stack([kept_score(score_BCR, torch.tensor([o]).expand(20, 8), NM(2, 4)) for o in orders]).amax(0)
    worst_B = kept_score(score_BCR, plain(score_BCR), NM(2, 4))
    found_B = kept_score(score_BCR, best_order(score_BCR, NM(2, 4), seed=0), NM(2, 4))
    assert (found_B <= best_B + 1e-6).all()
    assert (found_B - worst_B).sum() > 0.8 * (best_B - worst_B).sum()


def test_channels_that_would_lose_each_other_are_parted() -> None:
    """Large scores lie in neighbours; apart, everything large is kept."""
    score_BCR = torch.zeros(1, 16, 4)
    for row in range(4):
        score_BCR[0, 4 * row : 4 * row + 4, row] = 1.0
    assert kept_score(score_BCR, plain(score_BCR), NM(2, 4)).item() == 8
    assert kept_score(score_BCR, best_order(score_BCR, NM(2, 4), seed=0), NM(2, 4)).item() == 16


def test_an_order_is_a_function_of_its_seed() -> None:
    score_BCR = scores(4, 32, 16)
    order_BC = best_order(score_BCR, NM(2, 4), seed=3)
    assert torch.equal(order_BC, best_order(score_BCR, NM(2, 4), seed=3))
    assert not torch.equal(order_BC, best_order(score_BCR, NM(2, 4), seed=4))


def test_nothing_to_gain_leaves_the_order() -> None:
    score_BCR = torch.zeros(2, 16, 5)
    assert torch.equal(best_order(score_BCR, NM(2, 4), seed=0), plain(score_BCR))


@pytest.mark.parametrize(("channels", "rows"), [(16, 3), (32, 2), (64, 8)])
def test_no_channel_is_lost_where_scores_differ_by_magnitudes(channels: int, rows: int) -> None:
    """Gains that are mere rounding for one of a pair and not for the other made one of them move alone, or no end."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        scale = 10 ** (8 * torch.rand(4, channels, 1, generator=generator) - 4)
        score = torch.rand(4, channels, rows, generator=generator) * scale
        assert torch.equal(best_order(score, NM(2, 4), 0).sort(-1).values, plain(score))
