"""A family without rows, pruned by one flag."""

from __future__ import annotations

import json

import pytest
import transformers
from transformers import HunYuanMoEV1Config, PreTrainedConfig, Qwen3_5TextConfig

from sparseforge_ds import prepare
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.any_family import any_family, pasteable
from sparseforge_ds.model.architecture import bare_model
from sparseforge_ds.model.families import coverage, prunable_weights, uncovered_weights
from sparseforge_ds.model.rules import contracting
from tests.tiny_models import BUILDERS, tiny_llama
from tests.unit.model.test_uncovered import WITHOUT_ROWS, tiny, unknown

BLANK = SparseForgeConfig()


@pytest.mark.parametrize("family", WITHOUT_ROWS)
def test_everything_is_decided_and_can_be_pasted(family: str) -> None:
    build, weights = WITHOUT_ROWS[family]
    model = build()
    config = any_family(model, BLANK)
    result = prunable_weights(model, config)
    assert len(result) == weights and not uncovered_weights(model, config).shapes
    covered = coverage(model, result)
    assert covered.masked > 0.95 * covered.linear
    assert any_family(bare_model(model.config), BLANK) == config
    pasted = SparseForgeConfig.from_dict(json.loads("{" + pasteable(config) + "}"))
    assert pasted == config and prunable_weights(model, pasted) == result


def test_branches_of_a_family_without_rows_stay_dense() -> None:
    model = unknown("llama")
    config = any_family(model, SparseForgeConfig.from_dict({"low_rank": {"k": 4, "learned": True}}))
    weights = prunable_weights(model, config)
    prepare(model, config)
    assert any(name.endswith("low_rank_b") for name, _ in model.named_parameters())
    assert prunable_weights(model, config) == weights and not uncovered_weights(model, config).shapes


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_neox", "starcoder2", "gpt_oss", "qwen2_moe"])
def test_it_finds_what_the_rows_name(family: str) -> None:
    model = unknown(family)
    assert prunable_weights(model, any_family(model, BLANK)) == prunable_weights(BUILDERS[family](), BLANK)


def test_experts_without_a_gate_stay_dense_as_their_curvature_cannot_be_measured() -> None:
    """Those who keep a pattern that is there already take them."""
    model = BUILDERS["qwen3_moe"]()
    names = {name for name, parameter in model.named_parameters() if ".experts." in name}
    assert names and names <= contracting(model).keys()
    for module in model.modules():
        if hasattr(module, "has_gate"):
            module.has_gate = False
    assert not names & contracting(model).keys()
    assert names <= contracting(model, ungated=True).keys()


# Of later releases than the oldest that we take.
ZayaConfig, DeepseekV32Config = (getattr(transformers, name, None) for name in ("ZayaConfig", "DeepseekV32Config"))


@pytest.mark.parametrize("config", [item for item in (HunYuanMoEV1Config, ZayaConfig) if item is not None])
def test_layers_inside_a_router_stay_dense(config: type[PreTrainedConfig]) -> None:
    model = tiny(config, num_experts=4, num_experts_per_tok=1, moe_topk=1, moe_intermediate_size=16)()
    inside = {name for name, parameter in model.named_parameters() if ".mlp.gate." in name and parameter.ndim == 2}
    result = {weight.name for weight in prunable_weights(model, any_family(model, BLANK))}
    assert inside and result and not inside & result
    assert all(name in result for name, _ in model.named_parameters() if ".experts." in name or ".o_proj." in name)


def test_a_family_with_rows_is_left_to_them() -> None:
    assert any_family(tiny_llama(), BLANK) is BLANK


def test_what_the_user_has_decided_stays() -> None:
    model = unknown("llama")
    chosen = SparseForgeConfig(include=("*.mlp.*",))
    assert any_family(model, chosen).include == chosen.include
    assert len(prunable_weights(model, any_family(model, chosen))) == 6
    without = SparseForgeConfig(exclude=("*.q_proj.weight",), allow_dense=("*.k_proj.weight",))
    config = any_family(model, without)
    assert config.exclude == without.exclude and config.allow_dense == without.allow_dense
    names = [weight.name for weight in prunable_weights(model, config)]
    assert len(names) == 10 and not [name for name in names if "q_proj" in name or "k_proj" in name]


@pytest.mark.skipif(DeepseekV32Config is None, reason="transformers has no DeepSeek V3.2")
def test_indexers_of_sparse_attention_stay_dense() -> None:
    model = bare_model(DeepseekV32Config(num_hidden_layers=1, first_k_dense_replace=1))
    weights = {weight.name for weight in prunable_weights(model, any_family(model, BLANK))}
    assert weights and not [name for name in weights if ".indexer." in name]
    assert "model.layers.0.self_attn.indexer.wk.weight" in dict(model.named_parameters())


def test_what_fades_the_state_of_linear_attention_stays_dense() -> None:
    model = bare_model(Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"]))
    names = {weight.name.split(".")[-2] for weight in prunable_weights(model, any_family(model, BLANK))}
    assert names == {"in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj", "down_proj"}
    assert "model.layers.0.linear_attn.in_proj_a.weight" in dict(model.named_parameters())
