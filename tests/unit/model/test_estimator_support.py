"""Layers in which an importance can be measured, known from a config and tried with hooks on real models."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, PretrainedConfig, PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.architecture import bare_model
from sparseforge_ds.model.estimator_support import check_measurable
from sparseforge_ds.model.families import PrunableWeight, coverage, prunable_weights, uncovered_weights
from sparseforge_ds.model.rules import linear_layers
from sparseforge_ds.zero.layer_hooks import token_gradients
from tests.tiny_models import BUILDERS, MIXTURES, token_batch

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA2: dict[str, Any] = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
UNKNOWN: dict[str, dict[str, Any]] = {
    "bamba": {**_HEADS, **_MAMBA2, "attn_layer_indices": [1]},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "granitemoehybrid": {**_HEADS, **_MAMBA2, **_EXPERTS, "layer_types": ["mamba", "attention"]},
    "jamba": {
        **_HEADS,
        **{"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
        **{"expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    },
    "lfm2": _HEADS,
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {
        **_HEADS,
        **{"hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
        **{"n_groups": 1, "head_dim": 8},
    },
    "phi": _HEADS,
    "phimoe": {**_HEADS, **_EXPERTS},
    "recurrent_gemma": {**_HEADS, "lru_width": 32, "head_dim": 8, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "zamba2": {
        **_HEADS,
        **{"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16, "num_mem_blocks": 1},
        **{"layers_block_type": ["mamba", "hybrid"], "use_mamba_kernels": False, "adapter_rank": 4},
    },
}
"""Families without rows, and what makes a model of each tiny."""
NOT_PASSED = {
    "falcon_mamba": "mixer.dt_proj.weight",
    "jamba": "mamba.dt_proj.weight",
    "mamba": "mixer.dt_proj.weight",
}
"""A linear layer that is not called, or that gives more than its outputs."""


def tiny_config(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **{**_SIZES, **UNKNOWN[family]})


def measured(model: PreTrainedModel, names: list[str]) -> set[str]:
    """Weights whose layer hooks see tokens and gradients in a pass of a real model."""
    records = set()

    def hook(name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
        shape = model.get_parameter(name).shape
        assert {grad_TO.shape[1], input_TI.shape[1]} == set(shape)
        assert torch.isfinite(grad_TO).all()
        records.add(name)

    model.train()
    with token_gradients({name: model.get_submodule(name.rpartition(".")[0]) for name in names}, hook):
        model(**token_batch(), use_cache=False).loss.backward()
    return records


def pasted(message: str) -> dict[str, Any]:
    """Return the keys that a message tells to paste."""
    keys = re.findall(r'"(?:include|exclude|allow_dense)": \[[^]]*\]', message.partition("aste ")[2])
    return {key: tuple(value) for key, value in json.loads("{" + ", ".join(keys) + "}").items()}


def weights_to_prune(model: Any, block: SparseForgeConfig) -> list[PrunableWeight]:
    """Return the prunable weights of a model, all of which can be measured."""
    weights = prunable_weights(model, block)
    check_measurable(model, weights, block)
    return weights


def pasted_until_accepted(config: Any, block: SparseForgeConfig) -> SparseForgeConfig:
    """Return a block with what the first refusal says to paste, and with what later ones add."""
    for _ in range(3):
        try:
            weights_to_prune(bare_model(config), block)
        except ValueError as error:
            block = replace(block, **pasted(str(error)))
    return block


@pytest.mark.parametrize("family", UNKNOWN)
def test_what_is_proposed_can_be_measured_and_nothing_else_could(family: str) -> None:
    config = tiny_config(family)
    with pytest.raises(ValueError, match="are not covered: "):
        weights_to_prune(bare_model(config), SparseForgeConfig())
    block = pasted_until_accepted(config, SparseForgeConfig())
    weights = weights_to_prune(bare_model(config), block)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    assert weights == prunable_weights(model, block) and not uncovered_weights(model, block).shapes
    names = [weight.name for weight in weights if not weight.experts or len(weight.shape) == 2]
    assert measured(model, names) == set(names)
    left = {name for name in linear_layers(model) if name not in names and "router" not in name}
    assert left == {name for name in left if name.split(".")[-2] in ("gate", "shared_expert_gate")} | {
        name for name in left if family in NOT_PASSED and name.endswith(NOT_PASSED[family])
    }
    covered = coverage(model, weights)
    assert covered.masked > covered.linear * (0.1 if any("experts" in name for name in model.state_dict()) else 0.8)


@pytest.mark.parametrize("family", NOT_PASSED)
def test_layers_that_no_token_passes_are_named_with_the_cure(family: str) -> None:
    config = tiny_config(family)
    dense = ("*A_log", "*.conv1d.weight")
    if "moe" in family or family == "jamba":
        dense = ("*.experts.*", *(dense if family == "jamba" else ()))
    block = SparseForgeConfig(include=("*",), allow_dense=dense, exclude=("*.0.*in_proj.weight",) * (family == "mamba"))
    with pytest.raises(ValueError, match=r'^importance "fisher" is measured where tokens pass a layer') as raised:
        weights_to_prune(bare_model(config), block)
    assert NOT_PASSED[family] in str(raised.value)
    cured = replace(block, **pasted(str(raised.value)))
    assert set(cured.exclude) > set(block.exclude)
    weights = weights_to_prune(bare_model(config), cured)
    assert len(weights) < len(prunable_weights(bare_model(config), block))
    by_magnitude = replace(block, importance="magnitude")
    assert weights_to_prune(bare_model(config), by_magnitude) == prunable_weights(bare_model(config), block)


@pytest.mark.parametrize("importance", ["fisher", "wanda", "hutchinson"])
def test_every_family_with_rows_is_measured_everywhere(importance: str) -> None:
    for family, build in BUILDERS.items():
        model = build()
        block = SparseForgeConfig(importance=importance)
        if importance == "hutchinson" and family in MIXTURES:
            with pytest.raises(ValueError, match="displaces outputs of layers that every token passes"):
                weights_to_prune(bare_model(model.config), block)
        else:
            assert weights_to_prune(bare_model(model.config), block) == prunable_weights(model, block)


def test_a_weight_of_several_layers_is_refused() -> None:
    """Refuse the blocks of Zamba2 that have attention: a hook at one of them would not see the others' tokens."""
    twice = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
    config = AutoConfig.for_model("zamba2", **{**_SIZES, **UNKNOWN["zamba2"], **twice})
    block = SparseForgeConfig(include=("*proj.weight",), allow_dense=("*.conv1d.weight",))
    with pytest.raises(ValueError, match="is the weight of several layers of this zamba2 model.*; paste") as raised:
        weights_to_prune(bare_model(config), block)
    weights = weights_to_prune(bare_model(config), replace(block, **pasted(str(raised.value))))
    assert weights and not any(".shared_transformer." in weight.name for weight in weights)
    assert weights_to_prune(bare_model(config), pasted_until_accepted(config, SparseForgeConfig()))
    assert len(weights_to_prune(bare_model(config), replace(block, importance="magnitude"))) > len(weights)


def test_layers_that_are_called_twice_are_refused_by_hutchinson() -> None:
    model = bare_model(BUILDERS["llama"]().config)
    model.model.layers[1] = model.model.layers[0]
    block = SparseForgeConfig(importance="hutchinson")
    with pytest.raises(ValueError, match=r"\(7 in all\) is called 2 times in a forward pass; paste"):
        weights_to_prune(model, block)
    assert len(weights_to_prune(model, replace(block, importance="fisher"))) == 7


def test_what_cannot_be_run_without_numbers_is_not_refused() -> None:
    config = AutoConfig.for_model("jetmoe", **_SIZES, num_attention_heads=4, num_key_value_heads=2, kv_channels=8)
    block = SparseForgeConfig(include=("*_proj.weight",), allow_dense=("*",))
    assert weights_to_prune(bare_model(config), block) == prunable_weights(bare_model(config), block)


def test_the_layers_of_a_vision_tower_are_left_out() -> None:
    text = {**_SIZES, **_HEADS, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config={**vision, **images}, mm_tokens_per_image=4)
    weights = weights_to_prune(bare_model(config), pasted_until_accepted(config, SparseForgeConfig()))
    assert len(weights) == 14 and all(".language_model." in weight.name for weight in weights)
