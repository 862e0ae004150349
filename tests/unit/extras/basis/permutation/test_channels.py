"""Reordered channels leave the function of a model as it is, in every family."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparseforge_ds.extras.basis.permutation.channel_table import CHANNELS
from sparseforge_ds.extras.basis.permutation.channels import PARTS, Dimension, dimensions
from sparseforge_ds.model.family_table import FAMILIES
from tests.tiny_models import BUILDERS, token_batch

BIASES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
    "deepseek_v2": {"attention_bias": True},
    "deepseek_v3": {"attention_bias": True},
    "qwen3_moe": {"attention_bias": True},
    "falcon": {"bias": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
}
TIED = {"gpt2": True, "opt": True, "qwen3": True}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Biases and norms of a new model are zeros and ones, in any order."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def shuffled(stored: Dimension, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(stored.blocks, stored.channels, generator=generator).argsort(-1)


def reorder(model: PreTrainedModel, which: str) -> dict[str, Dimension]:
    """Reorder all channels of a model at random."""
    parameters = dict(model.named_parameters())
    by_name = dimensions(model.config.model_type, model.config.get_text_config(), shapes_of(parameters), which)
    with torch.no_grad():
        for number, stored in enumerate(by_name.values()):
            index_BC = shuffled(stored, number)
            for axis in stored.axes:
                parameters[axis.tensor].copy_(axis.reorder(parameters[axis.tensor], index_BC))
    return by_name


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=token_batch()["input_ids"]).logits


def test_every_family_has_its_channels() -> None:
    """But those whose experts or linear attention the layouts do not describe, which are refused."""
    refused = {"gpt_oss", "llama4_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
    assert set(FAMILIES) - set(CHANNELS) == refused and set(CHANNELS) < set(FAMILIES)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("which", PARTS)
@pytest.mark.parametrize("family", CHANNELS)
def test_logits_stay_within_rounding(family: str, which: str, biased: bool) -> None:
    if biased and family not in BIASES:
        pytest.skip("the family has no biases to switch on")
    model = randomized(BUILDERS[family](**(BIASES[family] if biased else {})))
    before = logits(model)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    result = reorder(model, which)
    assert {stored.part for stored in result.values()} == set(PARTS[which])
    assert any(not torch.equal(p, weights[name]) for name, p in model.named_parameters())
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", CHANNELS)
def test_every_input_axis_has_channels_that_move(family: str) -> None:
    """Read every prunable weight in another order, as all dimensions are permuted."""
    from sparseforge_ds.config import SparseForgeConfig
    from sparseforge_ds.model.families import prunable_weights

    model = BUILDERS[family]()
    shapes = shapes_of(dict(model.named_parameters()))
    by_name = dimensions(family, model.config.get_text_config(), shapes, "all")
    axes = {(axis.tensor, axis.axis) for stored in by_name.values() for axis in stored.axes}
    weights = prunable_weights(model, SparseForgeConfig())
    assert {(weight.name, weight.input_axis) for weight in weights} <= axes


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_heads_without_groups_and_tied_embeddings_can_be_reordered(family: str) -> None:
    model = randomized(BUILDERS[family](num_key_value_heads=4, tie_word_embeddings=True))
    before = logits(model)
    reorder(model, "all")
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=2e-5)


def test_opt_without_projections_has_a_residual_order() -> None:
    model = randomized(BUILDERS["opt"](word_embed_proj_dim=32))
    before = logits(model)
    assert "residual" in reorder(model, "all")
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=2e-5)


def test_queries_without_a_latent_can_be_reordered() -> None:
    model = randomized(BUILDERS["deepseek_v2"](q_lora_rank=None))
    before = logits(model)
    reorder(model, "all")
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=2e-5)


def test_heads_have_orders_of_their_own() -> None:
    model = BUILDERS["llama"]()
    shapes = shapes_of(dict(model.named_parameters()))
    by_name = dimensions("llama", model.config, shapes, "mlp+heads")["layers.0.self_attn.values"]
    assert (by_name.blocks, by_name.channels) == (2, 8)
    (read,) = (axis for axis in by_name.axes if axis.tensor.endswith("o_proj.weight"))
    index_BC = torch.stack([torch.arange(8).flip(0), torch.arange(8)])
    assert read.order(index_BC).tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8, *range(16, 32)]


def test_a_family_without_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'qwen3_next'.*Add a line \"qwen3_next\" to CHANNELS"):
        dimensions("qwen3_next", None, {}, "mlp")


def test_a_tensor_without_a_line_is_refused() -> None:
    model = BUILDERS["llama"]()
    shapes = {**shapes_of(dict(model.named_parameters())), "model.layers.0.mlp.scale": (64,)}
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.scale .*has no line in the row 'llama'"):
        dimensions("llama", model.config, shapes, "mlp")
