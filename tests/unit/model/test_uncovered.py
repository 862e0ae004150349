"""Linear weights that no row names: how much of them is too much, who may name them, and families without rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.experts import leaf_modules
from sparseforge_ds.model.families import coverage, prunable_names, prunable_weights, uncovered_weights
from tests.tiny_models import BUILDERS, tiny_gpt2, tiny_llama

ADAPTERS = [f"model.layers.{layer}.mlp.adapter.weight" for layer in (0, 1)]
PRUNABLE = 18432
"""Elements of the tiny Llama's 14 prunable weights."""


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
    assert message.startswith(f"{2304 / linear:.1%} of the linear weights of this llama model are not covered: ")
    assert f"model.layers.*.mlp.adapter.weight (2 of shape (32, 32), 2,048 elements, {2048 / linear:.1%}); " in message
    assert f"model.layers.*.mlp.other.weight (1 of shape (8, 32), 256 elements, {256 / linear:.1%})" in message
    assert "--allow_dense 'model.layers.*.mlp.adapter.weight'" in message and "include" not in message
    assert "\n" not in message
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=re.escape(message)):
        prunable_names("llama", shapes, SparseForgeConfig())


@pytest.mark.parametrize("width", [5, 6])
def test_two_percent_are_reported_and_no_error(width: int) -> None:
    model = with_adapters(width)
    found = uncovered_weights(model, SparseForgeConfig())
    assert list(found.shapes) == ADAPTERS and found.share == 2 * 32 * width / (PRUNABLE + 2 * 32 * width)
    if width == 5:  # 1.7%
        assert len(names(model)) == 14
        assert found.lines() == [
            f"model.layers.*.mlp.adapter.weight (2 of shape (5, 32), 320 elements, {320 / 18752:.1%})"
        ]
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
    ("glob", "model", "message"),
    [
        ("*.nothing", tiny_llama, "leaves open; leave it out"),
        ("*.nothing", lambda: with_adapters(32), f"whole names such as {ADAPTERS[0]}"),
        ("*.q_proj.*", lambda: with_adapters(32), "goes under a mask, and exclude is what keeps that dense"),
        ("lm_head.weight", tiny_llama, "leaves open; leave it out"),
    ],
)
def test_a_glob_that_allows_nothing_is_an_error(glob: str, model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--allow_dense {glob}: matches no linear weight") + ".*") as raised:
        names(model(), allow_dense=(glob,))
    assert message in str(raised.value)


def unknown(family: str) -> PreTrainedModel:
    model = BUILDERS[family]()
    model.config.model_type = "bloom"
    return model


def test_a_family_without_rows_lists_its_linear_layers() -> None:
    with pytest.raises(ValueError, match=r"^100\.0% of the linear weights of this bloom model are not") as raised:
        names(unknown("gpt2"))
    message = str(raised.value)
    assert "no rows for 'bloom' (it has deepseek, deepseek_v2, " in message
    assert "transformer.h.*.mlp.c_fc.weight (2 of shape (32, 128), 8,192 elements, 33.3%)" in message
    assert 'prune linear layers by naming them, like "include": ["transformer.h.*.mlp.c_fc.weight"]' in message
    assert "wte" not in message and "lm_head" not in message
    with pytest.raises(ValueError, match="no weight of this bloom model .* include names what is pruned"):
        names(unknown("gpt2"), allow_dense=("*",))


def test_a_family_without_rows_is_pruned_where_include_says() -> None:
    model = unknown("gpt2")
    found = prunable_weights(model, SparseForgeConfig(include=("*.mlp.*",)))
    assert found == prunable_weights(tiny_gpt2(), SparseForgeConfig(include=("*.mlp.*",)))
    assert {weight.input_axis for weight in found} == {-2}
    counted = coverage(model, found)
    assert counted == coverage(tiny_gpt2(), found) and counted.of_linear < 100
    assert names(unknown("llama"), include=("*",)) == names(tiny_llama())
    with pytest.raises(ValueError, match=r"include: '\*.nothing' matches no weight"):
        names(model, include=("*.nothing",))


def test_what_has_no_known_axis_is_not_pruned_by_include() -> None:
    """Fused experts of a family without rows: which axis is contracted is not known."""
    model = unknown("qwen3_moe")
    with pytest.raises(ValueError, match=r"not covered: .*experts.gate_up_proj .*experts.down_proj .*gate.weight"):
        names(model, include=("*",))
    # Nor by an include that does not match it: nobody has decided that it stays dense.
    with pytest.raises(ValueError, match=r"not covered: .*experts.gate_up_proj") as raised:
        names(model, include=("*_proj.weight",))
    assert "prune linear layers" not in str(raised.value)
    assert names(model, include=("*_proj.weight",), allow_dense=("*.experts.*", "*.mlp.gate.weight"))
    kept = names(model, include=("*",), allow_dense=("*.experts.*", "*.mlp.gate.weight"))
    assert kept == [name for name in names(BUILDERS["qwen3_moe"]()) if ".experts." not in name]
    assert leaf_modules(model) == ["model.layers.1.mlp.experts"]


def test_listed_experts_of_a_family_without_rows() -> None:
    model = unknown("llama")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 8)])
    found = prunable_weights(model, SparseForgeConfig(include=("*.experts.*",)))
    assert [(weight.experts, weight.place) for weight in found[:2]] == [
        (1, ("model.layers.0.mlp.experts", 0)),
        (1, ("model.layers.0.mlp.experts", 1)),
    ]
    assert leaf_modules(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]
