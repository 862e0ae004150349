"""Linear weights that no row names: how much of them is too much, who may name them, and families without rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPTJConfig,
    GraniteMoeConfig,
    MptConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    StableLmConfig,
)

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.coverage import percent
from sparseforge_ds.model.expert_modules import leaf_modules
from sparseforge_ds.model.families import coverage, prunable_names, prunable_weights, uncovered_weights
from tests.tiny_models import BUILDERS, tiny_gpt2, tiny_llama

ADAPTERS = [f"model.layers.{layer}.mlp.adapter.weight" for layer in (0, 1)]
PRUNABLE = 18432
"""Elements of the tiny Llama's 14 prunable weights."""


def pasted(message: str) -> dict[str, Any]:
    """Return the keys that an error says to paste into the block."""
    start = min(at for at in map(message.find, ('"include": [', '"allow_dense": [')) if at >= 0)
    text = message[start : message.rindex("]") + 1]
    return {key: tuple(globs) for key, globs in json.loads(f"{{{text}}}").items()}


def with_adapters(width: int) -> PreTrainedModel:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.adapter = nn.Linear(32, width)
    return model


def names(model: PreTrainedModel, **config: Any) -> list[str]:
    return [weight.name for weight in prunable_weights(model, SparseForgeConfig(**config))]


def test_too_much_is_an_error_with_patterns_sizes_and_shares() -> None:
    model = with_adapters(32)
    model.model.layers[0].mlp.other = nn.Linear(32, 8)
    with pytest.raises(ValueError) as raised:
        prunable_weights(model, SparseForgeConfig())
    message = str(raised.value)
    linear = PRUNABLE + 2 * 1024 + 256
    assert message.startswith(f"{percent(2304, linear)} of the linear weights of this llama model are not covered: ")
    assert (
        f"model.layers.*.mlp.adapter.weight (2 of shape (32, 32), 2,048 elements, {percent(2048, linear)}); " in message
    )
    assert f"model.layers.*.mlp.other.weight (1 of shape (8, 32), 256 elements, {percent(256, linear)})" in message
    assert pasted(message) == {
        "allow_dense": tuple(f"model.layers.*.mlp.{name}.weight" for name in ("adapter", "other"))
    }
    assert names(model, **pasted(message)) == names(tiny_llama())
    assert "\n" not in message
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=re.escape(message)):
        prunable_names("llama", shapes, SparseForgeConfig())


@pytest.mark.parametrize("width", [5, 6])
def test_two_percent_are_reported_and_no_error(width: int) -> None:
    model = with_adapters(width)
    result = uncovered_weights(model, SparseForgeConfig())
    assert list(result.shapes) == ADAPTERS and result.share == 2 * 32 * width / (PRUNABLE + 2 * 32 * width)
    if width == 5:  # 1.7%
        assert len(names(model)) == 14
        assert result.lines() == ["model.layers.*.mlp.adapter.weight (2 of shape (5, 32), 320 elements, 1.7%)"]
    else:  # 2.04%
        with pytest.raises(ValueError, match=r"^2\.0% of the linear weights"):
            names(model)


@pytest.mark.parametrize(
    "config",
    [
        {"allow_dense": ("*.adapter.weight",)},
        {"allow_dense": ("*",)},
        {"allow_dense": tuple(ADAPTERS)},
        {"allow_dense": (ADAPTERS[0],), "exclude": (ADAPTERS[1],)},
        {"exclude": ("*.adapter.*",)},
    ],
    ids=str,
)
def test_named_weights_stay_dense_and_nothing_else(config: dict[str, Any]) -> None:
    model = with_adapters(32)
    assert names(model, **config) == names(tiny_llama())
    assert not uncovered_weights(model, SparseForgeConfig(**config)).shapes


def test_include_leaves_the_others_out() -> None:
    assert len(names(with_adapters(32), include=("*_proj.weight",))) == 14
    with pytest.raises(ValueError, match="not covered"):
        names(with_adapters(32), include=("*.mlp.*",))


@pytest.mark.parametrize(
    ("glob", "masked"), [("*.nothing", False), ("lm_head.weight", False), ("*.q_proj.*", True)], ids=str
)
def test_a_glob_that_allows_nothing_is_said_and_no_error(glob: str, masked: bool) -> None:
    config = SparseForgeConfig(allow_dense=(glob,))
    assert names(tiny_llama(), allow_dense=(glob,)) == names(tiny_llama())
    (line,) = uncovered_weights(tiny_llama(), config).unneeded
    assert line.startswith(f"{glob}: not needed, it matches no weight that is undecided")
    assert ("exclude would keep that dense" in line) == masked
    with pytest.raises(ValueError, match="not covered") as raised:
        names(with_adapters(32), allow_dense=(glob,))
    assert f"; allow_dense {line}" in str(raised.value) and glob not in pasted(str(raised.value))["allow_dense"]


@pytest.mark.parametrize("key", ["include", "exclude"])
@pytest.mark.parametrize(
    ("glob", "near"),
    [
        ("q_proj", "model.layers.*.self_attn.q_proj.weight"),
        ("*.mlp", "model.layers.*.mlp.gate_proj.weight"),
        ("up_proj.weight", "model.layers.*.mlp.up_proj.weight"),
        ("self_attn.q", "model.layers.*.self_attn.q_proj.weight"),
        ("*.qproj.weight", "model.layers.*.self_attn.q_proj.weight"),
        ("transformer.h.*.mlp.down_proj.weight", "model.layers.*.mlp.down_proj.weight"),
        ("**.x", None),
        ("*.nothing.at.all", None),
    ],
)
def test_a_glob_that_matches_nothing_comes_with_one_that_does(key: str, glob: str, near: str | None) -> None:
    with pytest.raises(ValueError, match=f"sparseforge.{key}: .*matches no weight; it is a glob over whole") as raised:
        names(tiny_llama(), **{key: (glob,)})
    suggestion = str(raised.value).split("for example ")[1].strip("'")
    assert near in (None, suggestion)
    if key == "include":
        assert 0 < len(names(tiny_llama(), include=(suggestion,))) <= 14
    else:
        assert len(names(tiny_llama(), exclude=(suggestion,))) <= 14  # no error: it does match


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"include": ("*norm*",)}, ["only model.layers.0.input_layernorm.weight (and 4 more)", "which is a vector"]),
        ({"include": ("*.embed_tokens.*",)}, ["only model.embed_tokens.weight, which stays dense", "q_proj.weight"]),
        ({"include": ("*_proj.weight", "lm_head.*")}, ["'lm_head.*' matches no weight that can be", "stays dense"]),
        ({"include": ("*.adapter.*",)}, ["model.layers.0.mlp.adapter.weight (and 3 more), which no row of the family"]),
        ({"exclude": ("*norm*",)}, ["which is a vector: only matrices are pruned"]),
    ],
    ids=str,
)
def test_a_glob_that_matches_what_is_not_pruned_says_what(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        names(with_adapters(5), **config)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def unknown(family: str) -> PreTrainedModel:
    model = BUILDERS[family]()
    model.config.model_type = "bloom"
    return model


def tiny(config: type[PreTrainedConfig], **more: Any) -> Callable[[], PreTrainedModel]:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        **more,
    }
    return lambda: AutoModelForCausalLM.from_config(config(**{k: v for k, v in sizes.items() if v is not None}))


WITHOUT_ROWS: dict[str, tuple[Callable[[], PreTrainedModel], int]] = {
    "bloom": (tiny(BloomConfig, n_layer=2, n_head=4), 8),
    "gptj": (tiny(GPTJConfig, n_layer=2, n_head=4, rotary_dim=4), 12),
    "granitemoe": (tiny(GraniteMoeConfig, num_local_experts=4, num_experts_per_tok=2), 12),
    "mpt": (tiny(MptConfig, d_model=32, n_layers=2, n_heads=4, hidden_size=None), 8),
    "phi": (tiny(PhiConfig), 12),
    "phimoe": (tiny(PhimoeConfig, num_local_experts=4, num_experts_per_tok=2), 12),
    "stablelm": (tiny(StableLmConfig), 14),
}
"""Models of families that the table does not have, and how many weights of each are pruned, fused experts included."""


@pytest.mark.parametrize("family", WITHOUT_ROWS)
def test_what_a_family_without_rows_is_told_to_paste_works(family: str) -> None:
    build, layers = WITHOUT_ROWS[family]
    model = build()
    assert model.config.model_type == family
    with pytest.raises(
        ValueError, match=f"of this {family} model are not covered: .* no rows for '{family}'"
    ) as raised:
        names(model)
    message = str(raised.value)
    assert message.count("\n") == len(pasted(message)) and len(message) < 900, message
    result = names(model, **pasted(message))
    assert len(result) == layers and not uncovered_weights(model, SparseForgeConfig(**pasted(message))).shapes
    assert not [name for name in result if "router" in name or "lm_head" in name or "embed" in name]
    share = str(coverage(model, prunable_weights(model, SparseForgeConfig(**pasted(message))))).split()[0]
    assert f"These globs prune {share} of the linear weights; " in message, "as the banner says"


def test_what_is_pasted_leaves_out_what_the_pattern_does_not_fit() -> None:
    model = unknown("llama")
    for layer in model.model.layers:
        layer.mlp.odd = nn.Linear(30, 8)
    with pytest.raises(ValueError, match="no rows for 'bloom'") as raised:
        names(model)
    block = pasted(str(raised.value))
    assert block["allow_dense"] == ("model.layers.*.mlp.odd.weight",)
    assert names(model, **block) == names(tiny_llama())


def test_a_family_without_rows_needs_an_include() -> None:
    with pytest.raises(ValueError, match="no weight of this bloom model .* include names what is pruned"):
        names(unknown("gpt2"), allow_dense=("*",))


def test_a_family_without_rows_is_pruned_where_include_says() -> None:
    model = unknown("gpt2")
    result = prunable_weights(model, SparseForgeConfig(include=("*.mlp.*",)))
    assert result == prunable_weights(tiny_gpt2(), SparseForgeConfig(include=("*.mlp.*",)))
    assert {weight.input_axis for weight in result} == {-2}
    counted = coverage(model, result)
    assert counted == coverage(tiny_gpt2(), result) and counted.masked < counted.linear
    assert names(unknown("llama"), include=("*",)) == names(tiny_llama())
    with pytest.raises(ValueError, match=r"include: '\*.nothing' matches no weight"):
        names(model, include=("*.nothing",))


def test_what_has_no_known_axis_is_not_pruned_by_include() -> None:
    """Fused experts that do not say themselves how they are stored."""
    model = unknown("llama4_text")
    with pytest.raises(
        ValueError, match=r"not covered: .* globs keep the undecided weights dense\n\"allow_dense\": "
    ) as raised:
        names(model, include=("*",))
    assert names(model, include=("*",), **pasted(str(raised.value)))
    # Nor by an include that does not match it: nobody has decided that it stays dense.
    with pytest.raises(ValueError, match=r"(?s)not covered: .*experts.gate_up_proj") as raised:
        names(model, include=("*_proj.weight",))
    assert '"include"' not in str(raised.value)
    kept = names(model, include=("*_proj.weight",), allow_dense=("*.experts.*",))
    assert kept == [name for name in names(BUILDERS["llama4_text"]()) if ".experts." not in name]
    assert leaf_modules(model) == ["model.layers.1.feed_forward.experts"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_fused_experts_that_say_how_they_are_stored_are_pruned_by_include(family: str) -> None:
    """Prune the same matrices along the same axes as the family table."""
    expected = prunable_weights(BUILDERS[family](), SparseForgeConfig())
    model = unknown(family)
    with pytest.raises(ValueError, match="no rows for 'bloom'") as raised:
        names(model)
    assert prunable_weights(model, SparseForgeConfig(**pasted(str(raised.value)))) == expected
    assert any(".experts." in weight.name for weight in expected)


def test_listed_experts_of_a_family_without_rows_can_be_included() -> None:
    model = unknown("llama")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 8)])
    result = prunable_weights(model, SparseForgeConfig(include=("*.experts.*",)))
    assert [(weight.experts, weight.first_expert) for weight in result[:2]] == [
        (1, ("model.layers.0.mlp.experts", 0)),
        (1, ("model.layers.0.mlp.experts", 1)),
    ]
    assert leaf_modules(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]
