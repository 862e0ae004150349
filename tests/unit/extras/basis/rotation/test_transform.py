"""Rotated hidden vectors leave the function of a model as it is, in every family whose norms allow it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparseforge_ds.extras.basis.permutation.channel_table import CHANNELS
from sparseforge_ds.extras.basis.rotation.stream import RESIDUAL, Stream, find_stream, untie
from sparseforge_ds.extras.basis.rotation.transform import rotate_model
from tests.tiny_models import BUILDERS, token_batch
from tests.unit.extras.basis.permutation.test_channels import BIASES, logits, randomized

BEHIND_LAYERS = {"gemma2", "gemma3_text", "glm4", "olmo2", "olmo3"}
"""Families with norms whose output is added to the residual stream."""


CASES = [(family, False) for family in sorted(set(CHANNELS) - BEHIND_LAYERS)]
CASES += [(family, True) for family in sorted(set(BIASES) - BEHIND_LAYERS)]


def random_rotations(stream: Stream) -> dict[str, Tensor]:
    torch.manual_seed(2)
    result = {
        name: torch.linalg.qr(torch.randn(stored.blocks, stored.channels, stored.channels)).Q
        for name, stored in stream.rotated.items()
    }
    if stream.keeps_ones:
        C = stream.rotated[RESIDUAL].channels
        basis_CC = torch.linalg.qr(torch.cat([torch.ones(C, 1), torch.randn(C, C - 1)], dim=1)).Q
        inner = torch.linalg.qr(torch.randn(C - 1, C - 1)).Q
        result[RESIDUAL] = (basis_CC @ torch.block_diag(torch.ones(1, 1), inner) @ basis_CC.T)[None]
    return result


def built(family: str, **settings: object) -> PreTrainedModel:
    return randomized(BUILDERS[family](**settings))


@pytest.mark.parametrize(("family", "biased"), CASES)
def test_logits_stay_within_rounding(family: str, biased: bool) -> None:
    model = built(family, **(BIASES[family] if biased else {}))
    before = logits(model)
    untie(model)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    stream = find_stream(model, token_batch()["input_ids"])
    rotate_model(model, stream, random_rotations(stream))
    after = dict(model.named_parameters())
    assert all(not torch.equal(after[name], weights[name]) for name in stream.norm_of)
    for norm, gain in stream.gains.items():
        assert torch.equal(after[f"{norm}.weight"], torch.full_like(gain, stream.gain_scales[norm]))
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)


def test_weights_stay_as_large_as_they_were() -> None:
    model = built("llama")
    untie(model)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(0.05)
        model.model.norm.weight.mul_(3)
    before = logits(model)
    sizes = {name: float(parameter.detach().square().mean().sqrt()) for name, parameter in model.named_parameters()}
    stream = find_stream(model, token_batch()["input_ids"])
    rotate_model(model, stream, random_rotations(stream))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert float(parameter.detach().square().mean().sqrt()) == pytest.approx(sizes[name], rel=0.5), name
    # The size that stays in a norm is exact in 16 bits.
    gain_C = model.model.layers[0].input_layernorm.weight
    assert set(gain_C.bfloat16().tolist()) == {stream.gain_scales["model.layers.0.input_layernorm"]}
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)


def test_a_norm_without_gains_keeps_its_zeros() -> None:
    model = built("llama")
    untie(model)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.zero_()
    before = logits(model)
    stream = find_stream(model, token_batch()["input_ids"])
    rotate_model(model, stream, random_rotations(stream))
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", sorted(BEHIND_LAYERS))
def test_norms_behind_layers_are_refused(family: str) -> None:
    model = built(family)
    untie(model)
    with pytest.raises(ValueError, match=r"rotate: .* can be permuted, not rotated"):
        find_stream(model, token_batch()["input_ids"])


def test_a_bias_behind_a_gain_of_zero_is_refused() -> None:
    model = built("gpt2")
    untie(model)
    with torch.no_grad():
        model.transformer.ln_f.weight[3] = 0
    with pytest.raises(ValueError, match=r"rotate: transformer\.ln_f has gains of 0"):
        find_stream(model, token_batch()["input_ids"])


def test_values_of_heads_that_are_clamped_stay() -> None:
    model = built("olmoe", clip_qkv=0.05)
    before = logits(model)
    untie(model)
    stream = find_stream(model, token_batch()["input_ids"])
    assert list(stream.rotated) == [RESIDUAL]
    rotate_model(model, stream, random_rotations(stream))
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)
