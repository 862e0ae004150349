"""Sample formulas of a curvature, and its running mean."""

from __future__ import annotations

import math

import pytest
import torch

from sparseforge_ds.mask.curvature import accumulate, hutchinson_sample, token_fisher, token_rate
from sparseforge_ds.mask.random_numbers import counter_key, rademacher

CPU = torch.device("cpu")


def test_the_mean_of_hutchinson_samples_is_the_diagonal() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator)
    hessian = root @ root.t() - 2 * torch.eye(6)
    total = torch.zeros(6)
    probes = 4000
    for probe in range(probes):
        v = rademacher(counter_key(0, 0, probe, "w"), 0, 6, CPU)
        radius = 0.25
        total += hutchinson_sample(hessian @ (radius * v) - hessian @ (-radius * v), v, radius) / probes
    noise = (hessian.square().sum(1) - hessian.diagonal().square()).sqrt() / math.sqrt(probes)
    assert ((total - hessian.diagonal()).abs() < 5 * noise + 1e-4).all()


def test_token_fisher_is_the_sum_of_squared_outer_products() -> None:
    grad = torch.randn(7, 3)
    inputs = torch.randn(7, 5)
    kept = grad.clone(), inputs.clone()
    expected = sum(torch.outer(g, x).square() for g, x in zip(grad, inputs, strict=True))
    torch.testing.assert_close(token_fisher(grad, inputs), expected)
    assert torch.equal(grad, kept[0]) and torch.equal(inputs, kept[1])
    assert torch.equal(token_fisher(8 * grad, inputs, loss_scale=8.0), token_fisher(grad, inputs))


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_accumulate_is_an_average(decay: float) -> None:
    average = torch.tensor([1.0, 2.0])
    accumulate(average, torch.tensor([3.0, -2.0]), decay)
    torch.testing.assert_close(average, torch.tensor([decay * 1 + (1 - decay) * 3, decay * 2 - (1 - decay) * 2]))


def test_an_expert_average_weighs_every_token_alike() -> None:
    """Compare the average with a faded sum over tokens, divided by the faded count of tokens."""
    decay = 0.8
    tokens = [5, 0, 40, 1, 0, 7]
    means = [torch.tensor([float(3 * k - 4), 2.0**k]) for k in range(len(tokens))]
    average = torch.zeros(2)
    recent = torch.zeros(1, dtype=torch.float64)
    for count, mean in zip(tokens, means, strict=True):
        before = average.clone(), recent
        rate, recent = token_rate(torch.tensor([float(count)]), recent, decay)
        average.lerp_(mean, rate.float())
        if not count:
            assert torch.equal(average, before[0]) and recent == before[1]
    records = [(count, mean) for count, mean in zip(tokens, means, strict=True) if count]
    weights = [count * decay ** (len(records) - 1 - k) * (1 - decay) for k, (count, _) in enumerate(records)]
    expected = sum(weight * mean for weight, (_, mean) in zip(weights, records, strict=True)) / sum(weights)
    torch.testing.assert_close(average, expected)
    assert recent.item() == pytest.approx(sum(weights))
    three = torch.tensor([3.0])
    assert token_rate(three, torch.zeros(1), decay)[0] == 1.0  # no bias
    assert token_rate(three, three * 3, 0.0)[0] == 1.0
