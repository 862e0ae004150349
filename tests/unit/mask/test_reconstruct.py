"""SparseGPT of one layer; that it is its literal version is asserted in tests/zero/test_methods.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseforge_ds.mask.reconstruct import reconstruct


def layer(tokens: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(24, 24, generator=generator)
    inputs = torch.randn(tokens, 24, generator=generator) @ mixing
    return torch.randn(10, 24, generator=generator), inputs


def error(weight: Tensor, pruned: Tensor, inputs: Tensor) -> float:
    return ((weight - pruned) @ inputs.t()).square().sum().item()


def test_updated_weights_serve_the_layer_better_than_their_mask_alone() -> None:
    weight, inputs = layer()
    updated, kept = reconstruct(weight, inputs.t() @ inputs, 2, 4, 0.01)
    assert (kept.view(-1, 4).sum(1) == 2).all() and (updated[~kept] == 0).all()
    magnitude = weight * (weight.abs().view(-1, 4).argsort(1).argsort(1) >= 2).view_as(weight)
    with_update, without, by_size = (error(weight, w, inputs) for w in (updated, weight * kept, magnitude))
    assert with_update < 0.7 * without and with_update < 0.7 * by_size


def test_the_size_of_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = layer()
    gram = inputs.t() @ inputs
    first, kept = reconstruct(weight, gram, 2, 4, 0.01)
    for columns in (4, 8, 10):
        monkeypatch.setattr("sparseforge_ds.mask.reconstruct.BLOCK_COLUMNS", columns)
        other, other_kept = reconstruct(weight, gram, 2, 4, 0.01)
        assert torch.equal(kept, other_kept)
        torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-4)


def test_inputs_that_are_always_zero_and_layers_without_tokens() -> None:
    weight, inputs = layer()
    inputs[:, [3, 8]] = 0.0
    updated, _ = reconstruct(weight, inputs.t() @ inputs, 2, 4, 0.01)
    assert updated.isfinite().all() and (updated[:, [3, 8]] == 0).all()
    # Damping is relative to the inputs that live, however small they are.
    small, _ = reconstruct(weight, 1e-8 * (inputs.t() @ inputs), 2, 4, 0.01)
    torch.testing.assert_close(small, updated, rtol=1e-3, atol=1e-5)
    # Without the group of inputs that are always 0, the others are what they were.
    inputs[:, 8:12] = 0.0
    live = [*range(8), *range(12, 24)]
    gram = inputs.t() @ inputs
    alone, _ = reconstruct(weight[:, live], gram[live][:, live], 2, 4, 0.1)
    torch.testing.assert_close(reconstruct(weight, gram, 2, 4, 0.1)[0][:, live], alone, rtol=1e-3, atol=1e-5)
    # The caller's matrix is not changed, whatever its dtype.
    precise = gram.double()
    reconstruct(weight, precise, 2, 4, 0.1)
    assert torch.equal(precise, gram.double())
    unseen, kept = reconstruct(weight, torch.zeros(24, 24), 2, 4, 0.01)
    assert torch.equal(unseen, torch.where(kept, weight, 0.0))
    assert (weight.abs()[kept].view(10, -1, 2).amin(2) >= (weight.abs() * ~kept).view(10, -1, 4).amax(2)).all()
