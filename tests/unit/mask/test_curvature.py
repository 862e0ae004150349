"""Counter-based random numbers, and the two sample formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.mask.curvature import accumulate, hutchinson_sample, token_fisher, token_rate
from sparseforge_ds.mask.random_numbers import counter_hash, counter_key, rademacher, rademacher_rows, uniform

CPU = torch.device("cpu")


@given(st.integers(0, 10**12), st.integers(0, 200), st.integers(0, 200))
def test_numbers_depend_on_the_element_and_not_on_the_split(first: int, a: int, b: int) -> None:
    low, high = min(a, b), max(a, b)
    for draw in (rademacher, uniform):
        whole = draw(7, first, first + 200, CPU)
        chunks = [draw(7, first + s, first + e, CPU) for s, e in ((0, low), (low, high), (high, 200))]
        assert torch.equal(torch.cat(chunks), whole)


def test_keys_differ_by_each_of_their_parts() -> None:
    keys = {
        counter_key(seed, step, probe, name)
        for seed in range(8)
        for step in range(50)
        for probe in range(4)
        for name in ("a.weight", "b.weight", "layers.10.weight", "layers.11.weight")
    }
    assert len(keys) == 8 * 50 * 4 * 4


def test_signs_are_fair_and_independent() -> None:
    """Five standard deviations everywhere, over weights, steps and probes as they occur."""
    n = 20_000
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(6)]
    keys = [counter_key(0, step, probe, name) for name in names for step in (5, 10) for probe in (0, 1)]
    signs = torch.stack([rademacher(key, 0, n, CPU) for key in keys])
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    bound = 5 / math.sqrt(n)
    assert signs.mean(1).abs().max() < bound
    correlation = signs @ signs.t() / n - torch.eye(len(keys))
    assert correlation.abs().max() < bound
    for lag in (1, 2, 4, 64, 4096):
        assert (signs[:, lag:] * signs[:, :-lag]).mean(1).abs().max() < 5 / math.sqrt(n - lag)


@given(st.integers(0, 10**9), st.integers(0, 30), st.sampled_from([1, 8, 63, 64, 65, 200]))
def test_signs_of_rows_are_bits_of_hashes_wherever_rows_are_cut(first: int, cut: int, columns: int) -> None:
    whole = rademacher_rows(7, first, 30, columns, torch.zeros((), dtype=torch.bfloat16))
    assert whole.dtype == torch.bfloat16 and whole.shape == (30, columns)
    parts = [rademacher_rows(7, first + a, b - a, columns, torch.zeros(())) for a, b in ((0, cut), (cut, 30))]
    assert torch.equal(torch.cat(parts), whole.float())
    words = -(-columns // 64)
    for row, column in ((0, 0), (29, columns - 1), (cut % 30, columns // 2)):
        word = counter_hash(7, torch.tensor([(first + row) * words + column // 64])).item()
        assert whole[row, column].item() == (1.0 if word >> (column % 64) & 1 else -1.0)


def test_signs_of_rows_are_fair_and_independent() -> None:
    rows, columns = 400, 192
    signs = rademacher_rows(counter_key(0, 5, 0, "a outputs"), 0, rows, columns, torch.zeros(()))
    assert abs(signs.mean()) < 5 / math.sqrt(rows * columns)
    for axis, (n, of) in enumerate(((columns, rows), (rows, columns))):
        lines = signs if axis == 0 else signs.t()
        correlation = lines @ lines.t() / n - torch.eye(of)
        assert correlation.abs().max() < 6 / math.sqrt(n)


def test_uniform_is_uniform() -> None:
    values = uniform(counter_key(1, 2, 3, "labels"), 0, 50_000, CPU)
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values, 20, 0, 1)
    chi_square = ((counts - 2500) ** 2 / 2500).sum().item()
    assert chi_square < 19 + 5 * math.sqrt(2 * 19)


def test_the_hash_reaches_every_bit() -> None:
    words = counter_hash(123, torch.arange(4096))
    for bit in range(64):
        share = ((words >> bit) & 1).float().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(4096), bit


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
    grad, inputs = torch.randn(7, 3), torch.randn(7, 5)
    kept = grad.clone(), inputs.clone()
    expected = sum(torch.outer(g, x).square() for g, x in zip(grad, inputs, strict=True))
    torch.testing.assert_close(token_fisher(grad, inputs), expected)
    assert torch.equal(grad, kept[0]) and torch.equal(inputs, kept[1])


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_accumulate_is_an_average(decay: float) -> None:
    average = torch.tensor([1.0, 2.0])
    accumulate(average, torch.tensor([3.0, -2.0]), decay)
    torch.testing.assert_close(average, torch.tensor([decay * 1 + (1 - decay) * 3, decay * 2 - (1 - decay) * 2]))


def test_an_expert_average_weighs_every_token_alike() -> None:
    """An average of per-token means by `token_rate` is a faded sum over tokens by the faded count of tokens."""
    decay, tokens = 0.8, [5, 0, 40, 1, 0, 7]
    means = [torch.tensor([float(3 * k - 4), 2.0**k]) for k in range(len(tokens))]
    average, recent = torch.zeros(2), torch.zeros(1, dtype=torch.float64)
    for count, mean in zip(tokens, means, strict=True):
        before = average.clone(), recent
        rate, recent = token_rate(torch.tensor([float(count)]), recent, decay)
        average.lerp_(mean, rate.float())
        if not count:
            assert torch.equal(average, before[0]) and recent == before[1]
    seen = [(count, mean) for count, mean in zip(tokens, means, strict=True) if count]
    weights = [count * decay ** (len(seen) - 1 - k) * (1 - decay) for k, (count, _) in enumerate(seen)]
    expected = sum(weight * mean for weight, (_, mean) in zip(weights, seen, strict=True)) / sum(weights)
    torch.testing.assert_close(average, expected)
    assert recent.item() == pytest.approx(sum(weights))
    three = torch.tensor([3.0])
    assert token_rate(three, torch.zeros(1), decay)[0] == 1.0  # no bias
    assert token_rate(three, three * 3, 0.0)[0] == 1.0
