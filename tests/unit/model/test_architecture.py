"""Sizes from a config alone, against what is published and against real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.architecture import Architecture, architecture_of, bare_model, empty_model
from sparseforge_ds.model.families import coverage, prunable_weights
from sparseforge_ds.model.model_config import read_model_config
from sparseforge_ds.model.registration import build_model, load_config
from tests import tiny_models
from tests.unit.extras.planner.hub_configs import PARAMETERS, gpt2_xl, llama2_7b, qwen3_14b

FORGE = SparseForgeConfig()


def architecture(
    config: PretrainedConfig, forge: SparseForgeConfig = FORGE, leaves: tuple[str, ...] = ()
) -> Architecture:
    model = empty_model(config, forge, torch.bfloat16)
    return architecture_of(model, prunable_weights(model, forge), leaves)


@pytest.mark.parametrize("name", PARAMETERS)
def test_full_size_models_have_their_published_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = read_model_config(name)
    result = architecture(config)
    model = bare_model(config)
    covered = coverage(model, prunable_weights(model, FORGE))
    assert result.total == PARAMETERS[name]
    text = config.get_text_config()
    table = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
    of_positions = ("wpe.weight", "embed_positions.weight")
    positions = sum(parameter.numel for parameter in result.parameters if parameter.name.endswith(of_positions))
    assert result.active == (2_828_650_496 if "moe" in name else result.total)
    assert result.looked_up == table + positions
    assert result.masked == covered.masked == covered.linear - sum(covered.dense.values())
    assert [*covered.dense] == (["model.layers.*.mlp.gate.weight"] if "moe" in name else [])


def test_what_is_pruned_of_full_size_models() -> None:
    qwen = architecture(qwen3_14b())
    assert qwen.total - 2 * 151936 * 5120 == pytest.approx(13.2e9, rel=0.002)  # the model card's non-embedding number
    assert len(qwen.matrices) == 40 * 7 and qwen.matrices[0] == (1, 40 * 128, 5120)
    assert qwen.masked == 40 * (2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 5120 * 17408)
    assert qwen.largest_module == qwen.largest == 151936 * 5120
    assert architecture(llama2_7b()).masked == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    xl = architecture(gpt2_xl())
    assert xl.masked == 48 * 12 * 1600**2
    assert xl.input_first and not qwen.input_first and (1, 4 * 1600, 1600) in xl.matrices


def test_low_rank_branches_are_parameters() -> None:
    forge = SparseForgeConfig.from_dict({"low_rank": {"k": 16}})
    plain, branched = (architecture(llama2_7b(), item) for item in (FORGE, forge))
    assert branched.total == plain.total + plain.masked // 16
    assert branched.masked == plain.masked


def test_a_token_uses_some_of_the_experts() -> None:
    config = tiny_models.tiny_mixture(Qwen3MoeConfig).config
    result = architecture(config, leaves=("mlp.experts",))
    experts = sum(parameter.numel for parameter in result.parameters if ".experts." in parameter.name)
    unused = experts - experts * config.num_experts_per_tok // config.num_experts
    assert unused > 0
    assert result.active == result.total - unused
    assert result.largest_module == experts // (config.num_hidden_layers - len(config.mlp_only_layers))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gemma4_text", {"num_experts": 8, "top_k_experts": 2, "enable_moe_block": True, "moe_intermediate_size": 32}),
        ("aria_text", {"moe_num_experts": 8, "moe_topk": 2}),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 2, "head_dim": 8}),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [1, 3], "head_dim": 8}),
        ("dbrx", {"ffn_config": {"moe_num_experts": 8, "moe_top_k": 2}, "attn_config": {"rope_theta": 1e4}}),
    ],
)
def test_the_number_of_chosen_experts_has_several_names(kind: str, keys: dict[str, Any]) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = bare_model(AutoConfig.for_model(kind, **sizes, **heads, **keys))
    result = architecture_of(model, ())
    experts = sum(parameter.numel for parameter in result.parameters if ".experts." in f".{parameter.name}")
    assert experts > 0 and result.active == result.total - experts * 3 // 4


def test_every_expert_of_llama4_is_given_all_tokens() -> None:
    result = architecture(tiny_models.BUILDERS["llama4_text"]().config)
    assert any(".experts." in parameter.name for parameter in result.parameters)
    assert result.active == result.total


@pytest.mark.parametrize("make", [tiny_models.tiny_llama, tiny_models.BUILDERS["falcon"]])
def test_an_empty_model_leaves_the_config_alone(make: Callable[..., PreTrainedModel]) -> None:
    """Leave a config as it is, which a run writes into its folder."""
    config = make().config
    before = config.to_dict(), config._attn_implementation
    for dtype in (None, torch.bfloat16):
        assert next(bare_model(config, dtype).parameters()).is_meta
        assert (config.to_dict(), config._attn_implementation) == before


def test_a_config_is_read_by_folder_file_and_name(tmp_path: Path) -> None:
    llama2_7b().save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        assert read_model_config(name).hidden_size == 4096
    assert read_model_config("stdlib_llama").model_type == "llama"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "its config.json cannot be used .*'hidden_size': TypeError: .* got str"),
        ({"layer_types": ["full_attention"]}, r"its config.json cannot be used .*`num_hidden_layers` \(2\) must be"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads is 0; it must be 1 or more"),
        ({"hidden_act": "nothing"}, "no qwen2 model can be made of this config.json .KeyError: 'nothing'"),
        ({"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}, "no qwen2 model can be made .*KeyError: 'odd'"),
        ({"intermediate_size": -64}, "no qwen2 model can be made .*negative dimension"),
        ({"pad_token_id": 10_000}, "no qwen2 model can be made .*Padding_idx must be within num_embeddings"),
    ],
)
def test_a_config_with_a_wrong_value_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    content = {**tiny_models.BUILDERS["qwen2"]().config.to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as raised:
        bare_model(read_model_config(str(tmp_path)))
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=message):
        build_model(load_config(tmp_path, str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing", "no such folder or file"),
        ("some/where/else", "no such folder or file"),
        ("missing.json", "no such folder or file"),
        ("{folder}", "no config.json in this folder"),
        ("{folder}/odd.json", "its config.json cannot be used .*model type `no such thing`"),
        ("nobody/no-such-model", "check the name and the network"),
    ],
)
def test_a_config_that_does_not_exist_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "odd.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(ValueError, match=message):
        read_model_config(name.format(folder=tmp_path))
