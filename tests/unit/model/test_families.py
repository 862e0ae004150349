"""The family table against real architectures, and its errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model import families
from sparseforge_ds.model.families import FAMILIES, Family, Row, coverage, prunable_names, prunable_weights
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen3


def _from_config(kind: type[PretrainedConfig], **overrides: Any) -> PreTrainedModel:
    config = tiny_llama().config.to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = {key: config[key] for key in (*keys, "num_key_value_heads", "max_position_embeddings")}
    return AutoModelForCausalLM.from_config(kind(**{**shape, "bos_token_id": 1, "eos_token_id": 2, **overrides}))


BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "mistral": lambda **overrides: _from_config(MistralConfig, **overrides),
    "qwen2": lambda **overrides: _from_config(Qwen2Config, **overrides),
    "qwen3": tiny_qwen3,
}
PER_LAYER = {"gpt2": 4, "llama": 7, "mistral": 7, "qwen2": 7, "qwen3": 7}


def _rows_of(name: str, family: Family) -> list[str]:
    rows = [row.names for row in family.prunable] + list(family.dense)
    return [row for row in rows if families._is_row(name, row)]


def test_the_tests_walk_the_whole_table() -> None:
    assert set(BUILDERS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_is_named_exactly_once(family: str, tied: bool) -> None:
    model = BUILDERS[family](tie_word_embeddings=tied)
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    for name in matrices:
        assert len(_rows_of(name, FAMILIES[family])) == 1, name
    used = {row for name in model.state_dict() for row in _rows_of(name, FAMILIES[family])}
    rows = {row.names for row in FAMILIES[family].prunable} | set(FAMILIES[family].dense)
    assert rows - used <= {"h.*.attn.bias"}, "a row that names nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_prunable_is_every_linear_layer_but_the_head(family: str) -> None:
    """Found a second way: by the type of the module instead of by name."""
    model = BUILDERS[family]()
    expected = []
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, (nn.Linear, Conv1D)) and parameter.ndim > 1 and "lm_head" not in name:
            axis = -1 if isinstance(module, nn.Linear) else -2
            expected.append((name, tuple(parameter.shape), axis, name.removesuffix(".weight")))
    found = prunable_weights(model, SparseForgeConfig())
    assert [dataclasses.astuple(weight) for weight in found] == expected
    assert len(found) == 2 * PER_LAYER[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_input_axis_is_the_one_that_the_layer_contracts(family: str) -> None:
    model = BUILDERS[family]()
    seen = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen[module] = (inputs[0].shape[-1], output.shape[-1])

    weights = prunable_weights(model, SparseForgeConfig())
    for weight in weights:
        model.get_submodule(weight.module).register_forward_hook(note)
    model(input_ids=torch.arange(8)[None])
    for weight in weights:
        inputs, outputs = seen[model.get_submodule(weight.module)]
        assert weight.shape[weight.input_axis] == inputs
        assert weight.numel == inputs * outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_stack_without_a_head_is_the_same(family: str) -> None:
    model = BUILDERS[family]()
    inner = prunable_weights(model.base_model, SparseForgeConfig())
    prefix = f"{model.base_model_prefix}."
    assert [prefix + weight.name for weight in inner] == [w.name for w in prunable_weights(model, SparseForgeConfig())]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_alone_give_the_same(family: str) -> None:
    model = BUILDERS[family]()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert prunable_names(family, shapes, SparseForgeConfig()) == prunable_weights(model, SparseForgeConfig())


def test_old_gpt2_files_carry_the_causal_mask() -> None:
    shapes = {"h.0.attn.bias": (1, 1, 64, 64), "h.0.attn.masked_bias": (), "h.0.attn.c_proj.weight": (32, 32)}
    assert [w.name for w in prunable_names("gpt2", shapes, SparseForgeConfig())] == ["h.0.attn.c_proj.weight"]


def test_full_shapes_of_partitioned_parameters() -> None:
    model = tiny_llama()
    expected = prunable_weights(model, SparseForgeConfig())
    counted = coverage(model, expected)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert prunable_weights(model, SparseForgeConfig()) == expected
    assert coverage(model, expected) == counted


def test_real_models(assets: Path) -> None:
    for folder in sorted((assets / "models").iterdir()):
        model = AutoModelForCausalLM.from_pretrained(folder)
        weights = prunable_weights(model, SparseForgeConfig())
        of_layers = sum(w.numel for w in weights)
        assert of_layers == sum(
            m.weight.numel() for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"
        )
        assert coverage(model, weights).of_prunable == 100.0


class _Fused(nn.Module):
    """Experts the way transformers 5 stores them."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.config.model_type = "fused"
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(4, 16, 8))
        self.experts.is_transposed = transposed
        self.router = nn.Parameter(torch.zeros(4, 8))


def test_fused_experts_need_only_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Family(prunable=(Row("experts.gate_up_proj"),), dense=("router",))
    monkeypatch.setitem(FAMILIES, "fused", rows)
    (weight,) = prunable_weights(_Fused(), SparseForgeConfig())
    assert weight == families.PrunableWeight("experts.gate_up_proj", (4, 16, 8), -1, "experts")
    assert weight.numel == 512
    with pytest.raises(ValueError, match=r"experts.gate_up_proj: .* axis at -1, but Module has it at -2"):
        prunable_weights(_Fused(transposed=True), SparseForgeConfig())


def test_coverage_counts_elements() -> None:
    model = tiny_llama()
    total = sum(parameter.numel() for parameter in model.parameters())
    weights = prunable_weights(model, SparseForgeConfig(include=("*.mlp.*",)))
    counted = coverage(model, weights)
    assert (counted.weights, counted.masked, counted.total) == (6, 2 * 3 * 32 * 64, total)
    assert counted.prunable == 2 * (3 * 32 * 64 + 2 * 32 * 32 + 2 * 32 * 16)
    assert counted.of_prunable == pytest.approx(100 * 12288 / 18432)
    assert counted.of_all == pytest.approx(100 * 12288 / total)


def test_tied_parameters_count_once() -> None:
    tied, untied = tiny_qwen3(), tiny_qwen3(tie_word_embeddings=False)
    totals = [coverage(m, prunable_weights(m, SparseForgeConfig())).total for m in (tied, untied)]
    assert totals[1] - totals[0] == 64 * 32


SHAPES = {weight.name: weight.shape for weight in prunable_weights(tiny_llama(), SparseForgeConfig())}
NAMES = list(SHAPES)


@settings(deadline=None)
@given(st.lists(st.sampled_from(NAMES), unique=True), st.lists(st.sampled_from(NAMES), unique=True))
def test_include_and_exclude_are_set_algebra(include: list[str], exclude: list[str]) -> None:
    expected = [name for name in NAMES if (not include or name in include) and name not in exclude]
    config = SparseForgeConfig(include=tuple(include), exclude=tuple(exclude))
    if expected:
        assert [weight.name for weight in prunable_names("llama", SHAPES, config)] == expected
    else:
        with pytest.raises(ValueError, match="left to prune"):
            prunable_names("llama", SHAPES, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"include": ("*.nothing",)}, r"sparseforge.include: '\*.nothing' matches no weight"),
        ({"include": ("lm_head.weight",)}, r"sparseforge.include: 'lm_head.weight' matches no weight"),
        ({"exclude": ("q_proj",)}, r"sparseforge.exclude: 'q_proj' matches no weight.*'\*.q_proj.\*'"),
        ({"exclude": ("*",)}, "no weight of this llama model is left to prune"),
        ({"pattern": "5:7"}, r"q_proj.weight \(and 13 more\) of shape \(32, 32\) cannot be 5:7: its input axis has 32"),
        ({"pattern": "block64"}, r"cannot be block64:0.5: its matrix is 32 x 32.*\"exclude\": \[\"model.layers.0.self"),
    ],
)
def test_what_cannot_be_is_an_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prunable_weights(tiny_llama(), SparseForgeConfig(**config))


def test_the_cure_of_a_misfit_cures_it() -> None:
    model = tiny_llama(intermediate_size=66)
    with pytest.raises(ValueError, match=r'"exclude": \["model.layers.0.mlp.down_proj.weight"\]'):
        prunable_weights(model, SparseForgeConfig())
    assert len(prunable_weights(model, SparseForgeConfig(exclude=("*.down_proj.weight",)))) == 12


def test_an_unknown_family_lists_the_known_ones() -> None:
    model = tiny_llama()
    model.config.model_type = "opt"
    with pytest.raises(ValueError, match="'opt' has no row .* gpt2, llama, mistral, qwen2, qwen3"):
        prunable_weights(model, SparseForgeConfig())


def test_a_module_without_a_config_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no config.model_type"):
        prunable_weights(nn.Linear(4, 4), SparseForgeConfig())


def test_a_matrix_that_no_row_names_is_not_skipped() -> None:
    model = tiny_llama()
    model.model.layers[0].mlp.adapter = nn.Linear(32, 32)
    with pytest.raises(ValueError, match="no row for model.layers.0.mlp.adapter.weight of shape"):
        prunable_weights(model, SparseForgeConfig())
    assert len(prunable_weights(model, SparseForgeConfig(exclude=("*.adapter.*",)))) == 14


def test_a_layer_of_the_wrong_orientation_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.q_proj = Conv1D(32, 32)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.weight: .* at -1, but Conv1D has it at -2"):
        prunable_weights(model, SparseForgeConfig())


def test_a_weight_survives_json() -> None:
    weight = prunable_weights(tiny_gpt2(), SparseForgeConfig())[0]
    read = json.loads(json.dumps(dataclasses.asdict(weight)))
    assert families.PrunableWeight(**{**read, "shape": tuple(read["shape"])}) == weight
