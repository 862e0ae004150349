"""Share of all linear weights that is under a mask, whether the family table knows them or not."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.coverage import Coverage, percent
from sparseforge_ds.model.families import coverage, prunable_weights
from tests.tiny_models import BUILDERS, LEFT_DENSE, tiny_gpt2, tiny_llama


def covered(model: PreTrainedModel, **config: Any) -> Coverage:
    return coverage(model, prunable_weights(model, SparseForgeConfig(**config)))


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_fused_experts_of_a_family_without_rows_count(family: str) -> None:
    """Whatever the class of the module that holds it: of the linear weights, most are experts and stay dense."""
    model = BUILDERS[family]()
    model.config.model_type = "bloom"
    result = covered(model, include=("*_proj.weight",), allow_dense=("*.experts.*", "*.router.*"))
    experts = sum(
        math.prod(p.shape) for n, p in model.named_parameters() if ".experts." in n and not n.endswith("bias")
    )
    routers = sum(p.numel() for n, p in model.named_parameters() if n.endswith("router.weight"))
    assert result.linear == result.masked + experts + routers
    assert sum(result.dense.values()) == experts + routers and len(result.dense) == 3
    assert result.masked / result.linear < 0.6 and str(result).startswith(percent(result.masked, result.linear))
    lines = result.lines()
    assert ".experts.gate_up_proj (" in lines[0] and "router.weight (" in lines[-1]
    assert result.lines(but={next(iter(result.dense))}) == lines[1:]


@pytest.mark.parametrize("family", BUILDERS)
def test_every_matrix_but_embeddings_and_head_is_linear(family: str) -> None:
    model = BUILDERS[family]()
    result = covered(model)
    aside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    aside.add(id(model.get_output_embeddings().weight))
    biases = {id(parameter) for name, parameter in model.named_parameters() if name.endswith("bias")}
    assert result.linear == sum(p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in aside | biases)
    assert [name for name in result.dense if not name.endswith(LEFT_DENSE)] == []
    assert result.masked == result.linear - sum(result.dense.values())


def test_what_include_and_exclude_leave_dense_is_named() -> None:
    result = covered(BUILDERS["qwen3_moe"](), include=("*_proj.weight",))  # not the experts, which have rows
    assert next(iter(result.dense)).endswith("experts.gate_up_proj") and result.masked / result.linear < 0.8
    result = covered(tiny_gpt2(), exclude=("*.c_attn.weight",))
    assert result.dense == {"transformer.h.*.attn.c_attn.weight": 2 * 32 * 96}
    assert result.lines() == ["transformer.h.*.attn.c_attn.weight (6,144 elements, 25.0% of the linear weights)"]


def test_the_head_is_not_linear_and_not_pruned_by_include() -> None:
    model = tiny_llama()
    model.config.model_type = "bloom"
    everything = covered(model, include=("*",))
    assert everything.masked == everything.linear < 0.85 * everything.total and everything.dense == {}
    for family in ("llama", "bloom"):
        model.config.model_type = family
        for glob in ("lm_head.weight", "*head*"):
            with pytest.raises(
                ValueError, match=r"head.*' matches no weight that can be pruned, only lm_head.weight, which stays"
            ):
                covered(model, include=("*.mlp.*", glob))
    model = BUILDERS["llama4_text"]()
    model.config.model_type = "bloom"
    with pytest.raises(
        ValueError, match="matches no weight that can be pruned, only .*experts.gate_up_proj .and 1 more"
    ):
        covered(model, include=("*_proj.weight", "*.experts.*"))


def test_low_rank_branches_are_no_weights_of_the_model() -> None:
    from sparseforge_ds.model.low_rank import prepare

    config = SparseForgeConfig.from_dict({"low_rank": {"k": 16}})
    model = prepare(tiny_llama(), config)
    result = coverage(model, prunable_weights(model, config))
    assert result.masked == result.linear == 18432


def test_a_hundred_percent_is_all() -> None:
    assert [percent(part, 10_000) for part in (10_000, 9_999, 5, 0)] == ["100.0%", "99.9%", "0.0%", "0.0%"]
    many = Coverage(1, 16, 20, 1, {f"layer{number}.weight": 1 for number in range(15)})
    assert len(many.lines()) == 13 and many.lines()[-1] == "and 3 more patterns"
    assert asdict(many)["dense"]["layer0.weight"] == 1
