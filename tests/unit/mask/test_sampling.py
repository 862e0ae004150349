"""Gumbel-softmax over the patterns of a group: against autograd, and the same wherever a group lies."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparseforge_ds.mask import sampling
from sparseforge_ds.mask.sampling import choice, first_logits, gumbel, logit_gradient, normal, patterns

CPU = torch.device("cpu")


@pytest.mark.parametrize(("n", "m", "count"), [(2, 4, 6), (1, 4, 4), (4, 8, 70)])
def test_patterns_are_all_ways_to_keep_n(n: int, m: int, count: int) -> None:
    rows = [tuple(row) for row in patterns(n, m).tolist()]
    assert len(set(rows)) == len(rows) == count
    assert all(sum(row) == n and set(row) <= {0.0, 1.0} for row in rows)


def test_noise_depends_on_the_group_alone() -> None:
    for draw in (gumbel, normal):
        full = draw(7, 0, 50, 6, CPU)
        assert torch.allclose(draw(7, 20, 10, 6, CPU), full[20:30], atol=1e-6)
        assert not torch.allclose(draw(8, 0, 50, 6, CPU), full, atol=1e-2)
    assert gumbel(1, 0, 20000, 6, CPU).mean().item() == pytest.approx(0.5772, abs=0.02)
    drawn = normal(1, 0, 20000, 6, CPU)
    assert (drawn.mean().item(), drawn.std().item()) == (pytest.approx(0, abs=0.02), pytest.approx(1, abs=0.02))


def test_noise_is_finite_at_both_ends_of_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0.0, 0.0, 1 - 2.0**-24, 1 - 2.0**-24])
    monkeypatch.setattr(sampling, "uniform", lambda key, start, stop, device: ends)
    assert gumbel(0, 0, 1, 4, CPU).isfinite().all()
    assert normal(0, 0, 1, 2, CPU).isfinite().all()


def test_gradient_is_that_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    logit, noise, grad = (torch.randn(30, k, generator=generator).double() for k in (6, 6, 4))
    logit.requires_grad_()
    mixed = choice(logit, noise, 3.0, 0.7) @ patterns(2, 4).double()
    (expected,) = torch.autograd.grad((mixed * grad).sum(), logit)
    result = logit_gradient(choice(logit, noise, 3.0, 0.7).detach().float(), grad.float(), patterns(2, 4), 3.0, 0.7)
    torch.testing.assert_close(result, expected.float(), rtol=1e-4, atol=1e-5)


def test_prior_ranks_patterns_by_what_they_share() -> None:
    mask = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    logits = first_logits(torch.zeros(1, 6), mask, 2, 0.01, 3.0)[0].tolist()
    for kept, value in zip(itertools.combinations(range(4), 2), logits, strict=True):
        assert value == pytest.approx(0.03 * (len({0, 3} & set(kept)) - 1))
