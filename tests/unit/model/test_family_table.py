"""Rows that a user gives a family."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, MptConfig, SeedOssConfig

import sparseforge_ds as sf
from sparseforge_ds.model.expert_modules import leaf_modules
from sparseforge_ds.model.families import coverage, prunable_weights
from sparseforge_ds.model.family_table import FAMILIES, Row, register_family
from tests.tiny_models import BUILDERS, LLAMA_LIKE, tiny_llama

BLANK = sf.SparseForgeConfig()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Take registrations back, which are of the process."""
    kept = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(kept)


def test_a_family_can_have_the_rows_of_another() -> None:
    model = AutoModelForCausalLM.from_config(SeedOssConfig(**LLAMA_LIKE, head_dim=8))
    with pytest.raises(ValueError, match="no rows for 'seed_oss'"):
        prunable_weights(model, BLANK)
    sf.register_family("seed_oss", like="llama")
    sf.register_family("seed_oss", like="llama")  # an import may come twice
    result = prunable_weights(model, BLANK)
    assert [weight.name for weight in result] == [weight.name for weight in prunable_weights(tiny_llama(), BLANK)]
    assert coverage(model, result).dense == {}


def test_the_rows_of_the_guide_cover_their_model() -> None:
    model = AutoModelForCausalLM.from_config(MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=64))
    sf.register_family(
        "mpt",
        prunable=["blocks.*.attn.Wqkv.weight", "blocks.*.attn.out_proj.weight", "blocks.*.ffn.*_proj.weight"],
        dense=["wte.weight", "lm_head.weight"],
    )
    result = prunable_weights(model, BLANK)
    assert len(result) == 8 and coverage(model, result).dense == {}


def test_registered_rows_of_experts_are_those_of_the_table() -> None:
    family = FAMILIES["gpt_oss"]
    model = BUILDERS["gpt_oss"]()
    expected = prunable_weights(model, BLANK)
    model.config.model_type = "new"
    rows = [Row(**dataclasses.asdict(row)) for row in family.prunable]
    register_family("new", prunable=rows, dense=family.dense, experts=family.experts)
    assert prunable_weights(model, BLANK) == expected and leaf_modules(model) == leaf_modules(BUILDERS["gpt_oss"]())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_type": "llama", "prunable": ["a.weight"]}, "'llama' has other rows in the family table already"),
        ({"model_type": "new", "like": "lama"}, "like='lama' has no rows; known families: cohere2, "),
        ({"model_type": "new", "dense": ["a.weight"]}, "'new' has nothing that is prunable; give rows, or like"),
        ({"model_type": "new", "prunable": "a.*"}, r"prunable = 'a.\*' is no list; write \['a.\*'\]"),
        ({"model_type": "new", "prunable": ["a.weight"], "dense": "*"}, r"dense = '\*' is no list; write \['\*'\]"),
    ],
)
def test_a_family_without_rows_or_with_others_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_family(**arguments)  # type: ignore[arg-type]
    assert "new" not in FAMILIES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_axis": 1}, "^a: input_axis = 1; use -1 "),
        ({"input_axis": -2, "stacked": 2}, "^a: stacked = 2 with input_axis = -2, .*; leave stacked out$"),
    ],
)
def test_a_row_of_no_layout_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sf.Row("a", **settings)
