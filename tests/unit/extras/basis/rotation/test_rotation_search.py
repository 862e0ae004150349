"""The search for rotations: what it says that a pattern removes, and what a pattern then removes."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.basis.rotation.moments import ScoredWeight, measure_moments
from sparseforge_ds.extras.basis.rotation.rotation_search import RotationSearch
from sparseforge_ds.extras.basis.rotation.stream import RESIDUAL, Stream, find_stream, untie
from sparseforge_ds.extras.basis.rotation.transform import rotate_model
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.model.families import prunable_weights
from tests.tiny_models import token_batch
from tests.unit.extras.basis.rotation.test_transform import built

CONFIG = SparseForgeConfig()


def measured(model: PreTrainedModel) -> tuple[Stream, list[ScoredWeight]]:
    tokens_BS = token_batch()["input_ids"]
    stream = find_stream(model, tokens_BS)
    return stream, measure_moments(model, stream, prunable_weights(model, CONFIG), [tokens_BS], seed=3)


def search(model: PreTrainedModel, stream: Stream, scored: list[ScoredWeight]) -> RotationSearch:
    parameters = dict(model.named_parameters())
    return RotationSearch(lambda name: parameters[name].detach(), stream, scored, NM(2, 4), seed=0)


def removed(model: PreTrainedModel, stream: Stream, scored: list[ScoredWeight]) -> float:
    """Return what 2:4 removes of a model in its own basis, from its weights and moments alone."""
    parameters = dict(model.named_parameters())
    total = 0.0
    for stored in scored:
        if not (stored.inputs.dimension or stored.outputs.dimension):
            continue
        plain = {name: torch.eye(d.channels).repeat(d.blocks, 1, 1) for name, d in stream.rotated.items()}
        value = parameters[stored.weight.name].detach()
        value = value if stored.weight.input_axis == -1 else value.T
        value = value if value.dim() == 3 else value[None]
        fisher = stored.outputs.diagonal(plain)[:, :, None] * stored.inputs.diagonal(plain)[:, None, :]
        score = (value.square() * fisher).reshape(-1, 4)
        total += float(score.sort(dim=1).values[:, :2].sum())
    return total


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "phi3", "falcon", "qwen3_moe", "deepseek", "deepseek_v2"])
def test_the_rotated_model_loses_what_was_said(family: str) -> None:
    """Moments, scores and rotations agree: in the new basis the pattern removes as much as was found."""
    model = built(family)
    untie(model)
    with torch.no_grad():  # gains of 1 from the start, so that only the rotations differ
        stream, _ = measured(model)
        plain = {name: torch.eye(d.channels).repeat(d.blocks, 1, 1) for name, d in stream.rotated.items()}
        rotate_model(model, stream, plain)
    stream, scored = measured(model)
    before = removed(model, stream, scored)
    rotation = search(model, stream, scored).run(steps=40)
    assert rotation.removed < 0.95
    rotate_model(model, stream, rotation.rotations)
    after = removed(model, *measured(model))
    assert after / before == pytest.approx(rotation.removed, rel=0.02)
    for rotation_BCC in rotation.rotations.values():
        eye = torch.eye(rotation_BCC.shape[-1])
        torch.testing.assert_close(rotation_BCC @ rotation_BCC.mT, eye.expand_as(rotation_BCC), rtol=0, atol=1e-5)


def test_norms_that_subtract_the_mean_keep_the_vector_of_ones() -> None:
    model = built("gpt2")
    untie(model)
    stream, scored = measured(model)
    assert stream.keeps_ones
    rotation_CC = search(model, stream, scored).run(steps=10).rotations[RESIDUAL][0]
    ones = torch.ones(len(rotation_CC))
    torch.testing.assert_close(ones @ rotation_CC, ones, rtol=0, atol=1e-4)
    assert not torch.allclose(rotation_CC, torch.eye(len(rotation_CC)), atol=0.1)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = built("llama").train()
    untie(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    measured(model)
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad and parameter.grad is None and torch.equal(parameter, before[name])
