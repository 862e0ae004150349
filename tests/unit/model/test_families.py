"""The family table against real architectures, and its errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.pattern import NM, Pattern, top_n
from sparseforge_ds.model.expert_modules import leaf_modules
from sparseforge_ds.model.families import (
    FAMILIES,
    PrunableWeight,
    coverage,
    prunable_names,
    prunable_weights,
)
from sparseforge_ds.model.family_table import Family, Row
from sparseforge_ds.model.rules import fits_row
from tests.tiny_models import BUILDERS, LEFT_DENSE, MIXTURES, ROUTERS, tiny_gpt2, tiny_llama, tiny_qwen3, token_batch

PER_MODEL = {
    "cohere2": 14,
    "deepseek": 16,
    "deepseek_v2": 18,
    "deepseek_v3": 18,
    "falcon": 8,
    "gemma2": 14,
    "gemma3_text": 14,
    "glm4": 12,
    "glm4_moe": 16,
    "gpt2": 8,
    "gpt_neo": 12,
    "gpt_neox": 8,
    "gpt_oss": 12,
    "granite": 14,
    "internlm3": 14,
    "llama": 14,
    "llama4_text": 16,
    "mistral": 14,
    "mixtral": 12,
    "olmo2": 14,
    "olmo3": 14,
    "olmoe": 12,
    "opt": 12,
    "phi3": 8,
    "qwen2": 14,
    "qwen2_moe": 16,
    "qwen3": 14,
    "qwen3_5_moe_text": 17,
    "qwen3_5_text": 13,
    "qwen3_moe": 13,
    "qwen3_next": 14,
    "smollm3": 14,
    "starcoder2": 12,
}
"""Prunable weights of the tiny model, counted by hand: two layers, and two weights for the experts of a layer."""
VARIANTS: dict[str, dict[str, Any]] = {"deepseek_v2": {"q_lora_rank": None}, "deepseek_v3": {"q_lora_rank": None}}
"""Settings that swap some matrices for others."""
OLD_ROWS = {"h.*.attn.bias", "h.*.attn.attention.bias", "layers.*.attention.bias"}
"""Rows for what present models do not have."""
DENSE_LINEAR = ("lm_head", *(end.split(".")[-2] for end in LEFT_DENSE))
"""nn.Linear modules that stay dense."""
LISTED = [name for name in MIXTURES if FAMILIES[name].saved_as]
"""Those in whose files every expert has weights of its own; others are saved as they are in memory."""
TRANSPOSED = ("gpt_oss", "llama4_text")
"""Those whose experts are stored (experts, in, out)."""


def _rows_of(name: str, family: Family) -> list[str]:
    rows = [row.names for row in family.prunable] + list(family.dense)
    return [row for row in rows if fits_row(name, row)]


def _saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors as `save_pretrained` writes them: one entry per expert."""
    return revert_weight_conversion(model, model.state_dict())


def test_the_tests_walk_the_whole_table() -> None:
    assert set(BUILDERS) == set(FAMILIES) == set(PER_MODEL)
    assert set(MIXTURES) == {name for name, family in FAMILIES.items() if family.experts}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_is_named_exactly_once(family: str) -> None:
    """Name them in memory with fused experts, and in saved files with one entry per expert."""
    used = set()
    for overrides in ({}, {"tie_word_embeddings": True}, VARIANTS.get(family, {})):
        model = BUILDERS[family](**overrides)
        for tensors in (dict(model.named_parameters()), model.state_dict(), _saved(model)):
            for name, tensor in tensors.items():
                if tensor.ndim > 1:
                    assert len(_rows_of(name, FAMILIES[family])) == 1, name
                    used.update(_rows_of(name, FAMILIES[family]))
    rows = {row.names for row in FAMILIES[family].prunable} | set(FAMILIES[family].dense)
    assert rows - used <= OLD_ROWS, "a row that names nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_prunable_is_every_matmul_but_router_and_head(family: str) -> None:
    """Found a second way: by the type of the module instead of by name."""
    model = BUILDERS[family]()
    expected = []
    for name, parameter in model.named_parameters():
        holder = name.rpartition(".")[0]
        module = model.get_submodule(holder)
        if isinstance(module, (nn.Linear, Conv1D)) and parameter.ndim > 1 and holder.split(".")[-1] not in DENSE_LINEAR:
            axis = -1 if isinstance(module, nn.Linear) else -2
            expected.append((name, tuple(parameter.shape), axis, holder, 0, 1))
        elif holder.endswith(".experts") and parameter.ndim == 3:
            transposed = getattr(module, "is_transposed", family in TRANSPOSED)
            assert transposed == (family in TRANSPOSED) and (transposed or module.is_concatenated)
            stacked = 2 if name.endswith("gate_up_proj") and not transposed else 1
            axis = -2 if transposed else -1
            expected.append((name, tuple(parameter.shape), axis, holder, module.num_experts, stacked))
    result = prunable_weights(model, SparseForgeConfig())
    assert [dataclasses.astuple(weight) for weight in result] == expected
    assert len(result) == PER_MODEL[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_routers_embeddings_and_heads_stay_dense(family: str) -> None:
    model = BUILDERS[family]()
    masked = {weight.name for weight in prunable_weights(model, SparseForgeConfig())}
    dense = {name for name, parameter in model.named_parameters() if parameter.ndim > 1 and name not in masked}
    dense = {name for name in dense if not name.endswith("_bias")}  # of all experts of a layer
    parts = ("embed_tokens", "embed_positions", "embed_in", "word_embeddings", "wte", "wpe", "lm_head")
    assert [name for name in dense if name.split(".")[-2] not in parts and not name.endswith(LEFT_DENSE)] == []
    assert (family in MIXTURES) == any(name.endswith(ROUTERS) for name in dense)


def _prune(model: nn.Module, weight: PrunableWeight, pattern: Pattern) -> None:
    """Keep the largest of every group, in place."""
    parameter = model.get_parameter(weight.name).data
    group_GM = pattern.to_groups(parameter.reshape(-1), weight.shape, weight.input_axis)
    kept_GM = group_GM * top_n(group_GM.abs(), pattern.kept_count)
    parameter.copy_(pattern.from_groups(kept_GM, weight.shape, weight.input_axis).view(weight.shape))


def _sum_of_kept(x_TI: Tensor, weight: Tensor, input_axis: int, pattern: NM) -> Tensor:
    """x W as a sparse tensor core computes it: n products for every m consecutive inputs of an output."""
    rows_OI = (weight if input_axis == -1 else weight.t()).double()
    output_TO = torch.zeros(len(x_TI), len(rows_OI), dtype=torch.float64)
    for o, row in enumerate(rows_OI):
        for start in range(0, len(row), pattern.m):
            kept = [start + i for i in range(pattern.m) if row[start + i] != 0]
            assert len(kept) == pattern.n
            for i in kept:
                output_TO[:, o] += x_TI[:, i] * row[i]
    return output_TO


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_run_along_the_axis_that_the_layer_contracts(family: str) -> None:
    model = BUILDERS[family]()
    pattern = NM(2, 4)
    generator = torch.Generator().manual_seed(0)
    weights = prunable_weights(model, SparseForgeConfig())
    for weight in weights:
        _prune(model, weight, pattern)
    for weight in weights:
        layer = model.get_submodule(weight.module)
        if weight.experts:
            continue
        x_TI = torch.randn(3, weight.shape[weight.input_axis], generator=generator)
        expected = _sum_of_kept(x_TI.double(), layer.weight.detach(), weight.input_axis, pattern)
        bias = 0.0 if layer.bias is None else layer.bias.detach().double()
        with torch.no_grad():
            torch.testing.assert_close(layer(x_TI).double(), expected + bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", MIXTURES)
def test_groups_of_fused_experts_run_along_the_contracted_axis(family: str, implementation: str) -> None:
    # Prune every expert along the axis that we say its inputs lie on.
    model = BUILDERS[family]()
    pattern = NM(2, 4)
    if family != "llama4_text":  # which has one of its own
        model.set_experts_implementation(implementation)
    weights = [weight for weight in prunable_weights(model, SparseForgeConfig()) if weight.experts]
    for weight in weights:
        _prune(model, weight, pattern)
    # The last layer's experts, and four tokens: one expert gets two, one gets none.
    up, down = weights[-2:]
    layer = model.get_submodule(up.module)
    assert layer is model.get_submodule(down.module) and down.stacked == 1
    assert up.stacked == (1 if family in TRANSPOSED else 2)
    x_TI = torch.randn(4, up.shape[up.input_axis], generator=torch.Generator().manual_seed(0))
    expert_T1 = torch.tensor([[2], [0], [3], [0]])
    bias = {}
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            bias[name] = getattr(layer, f"{name}_bias", torch.zeros(up.experts, 1)).normal_().double()
        if family == "llama4_text":  # every expert is given all tokens, zeros where they are another's
            routed_ETI = torch.zeros(up.experts, *x_TI.shape)
            routed_ETI[expert_T1[:, 0], torch.arange(4)] = x_TI
            result = 0.5 * layer(routed_ETI.flatten(0, 1)).view(up.experts, 4, -1).sum(0)
            bias = dict.fromkeys(bias, torch.zeros(up.experts, 1).double())
        else:
            result = layer(x_TI, expert_T1, torch.full((4, 1), 0.5))
            if family != "gpt_oss":
                bias = dict.fromkeys(bias, torch.zeros(up.experts, 1).double())
    # By hand: only inputs that a group kept are multiplied, so a wrong axis would give another sum.
    gate_up = layer.gate_up_proj.detach()
    down_proj = layer.down_proj.detach()
    expected = []
    for x_I, expert in zip(x_TI.double(), expert_T1[:, 0].tolist(), strict=True):
        pair = _sum_of_kept(x_I[None], gate_up[expert], up.input_axis, pattern) + bias["gate_up_proj"][expert]
        if family == "gpt_oss":
            gate = pair[:, ::2].clamp(max=7)
            value = pair[:, 1::2].clamp(-7, 7)
            inner = gate * torch.sigmoid(1.702 * gate) * (value + 1)
        else:
            gate, value = pair.chunk(2, dim=-1)
            inner = F.silu(gate) * value
        output = _sum_of_kept(inner, down_proj[expert], down.input_axis, pattern) + bias["down_proj"][expert]
        expected.append(0.5 * output)
    torch.testing.assert_close(result.double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", LISTED)
def test_the_matrices_of_fused_experts_are_consecutive(family: str) -> None:
    """Gate, up and down of every expert, as they are saved, are the runs that `matrices` promises."""
    model = BUILDERS[family]()
    saved = _saved(model)
    for weight in prunable_weights(model, SparseForgeConfig()):
        if not weight.experts:
            assert weight.matrices == 1
            continue
        runs = model.get_parameter(weight.name).detach().reshape(weight.matrices, -1)
        (row,) = (row for row in FAMILIES[family].saved_as if weight.name.endswith(row.name))
        prefix = weight.name.removesuffix(row.name)
        expected = [
            saved[prefix + part.replace("*", str(expert))] for expert in range(weight.experts) for part in row.parts
        ]
        assert len(expected) == len(runs)
        assert all(torch.equal(run, part.reshape(-1)) for run, part in zip(runs, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_names_cover_as_much(family: str) -> None:
    model = BUILDERS[family]()
    shapes = {name: tuple(tensor.shape) for name, tensor in _saved(model).items()}
    listed = prunable_names(family, shapes, SparseForgeConfig())
    fused = prunable_weights(model, SparseForgeConfig())
    assert sum(weight.numel for weight in listed) == sum(weight.numel for weight in fused)
    assert sum(weight.matrices for weight in listed) == sum(weight.matrices for weight in fused)
    of_one = 1 if family in LISTED else 4
    assert all(weight.experts == of_one * (".experts." in weight.name) for weight in listed)


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_hold_all_experts_and_nothing_that_is_not_called(family: str) -> None:
    model = BUILDERS[family]()
    leaves = leaf_modules(model)
    of_experts = {weight.module for weight in prunable_weights(model, SparseForgeConfig()) if weight.experts}
    assert set(leaves) == of_experts and (family in MIXTURES) == bool(leaves)
    called = []
    for name in leaves:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    model(**token_batch())
    assert called == leaves


def test_the_leaf_of_listed_experts_is_the_block_around_them() -> None:
    model = BUILDERS["mixtral"]()
    layer = model.model.layers[1]
    del layer.mlp
    layer.block_sparse_moe = nn.Module()
    layer.block_sparse_moe.experts = nn.ModuleList([nn.Module(), nn.Module()])
    for expert in layer.block_sparse_moe.experts:
        expert.w1 = nn.Linear(32, 16, bias=False)
    assert leaf_modules(model) == ["model.layers.0.mlp.experts", "model.layers.1.block_sparse_moe"]
    assert leaf_modules(model.model) == ["layers.0.mlp.experts", "layers.1.block_sparse_moe"]
    listed = [weight for weight in prunable_weights(model, SparseForgeConfig()) if ".w1." in weight.name]
    assert [(weight.experts, weight.matrices) for weight in listed] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_stack_without_a_head_is_the_same(family: str) -> None:
    model = BUILDERS[family]()
    stack = model.model if model.base_model is model else model.base_model  # Llama 4 has another prefix than name
    inner = prunable_weights(stack, SparseForgeConfig())
    prefix = next(f"{name}." for name, module in model.named_modules() if module is stack)
    assert [prefix + weight.name for weight in inner] == [w.name for w in prunable_weights(model, SparseForgeConfig())]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_alone_give_the_same(family: str) -> None:
    model = BUILDERS[family]()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert prunable_names(family, shapes, SparseForgeConfig()) == prunable_weights(model, SparseForgeConfig())


def test_old_gpt2_files_carry_the_causal_mask() -> None:
    shapes = {"h.0.attn.bias": (1, 1, 64, 64), "h.0.attn.masked_bias": (), "h.0.attn.c_proj.weight": (32, 32)}
    assert [w.name for w in prunable_names("gpt2", shapes, SparseForgeConfig())] == ["h.0.attn.c_proj.weight"]


def test_partitioned_parameters_have_their_full_shapes() -> None:
    model = tiny_llama()
    expected = prunable_weights(model, SparseForgeConfig())
    counted = coverage(model, expected)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert prunable_weights(model, SparseForgeConfig()) == expected
    assert coverage(model, expected) == counted


def test_all_linear_layers_of_real_models_are_prunable(assets: Path) -> None:
    for folder in sorted((assets / "models").iterdir()):
        model = AutoModelForCausalLM.from_pretrained(folder)
        weights = prunable_weights(model, SparseForgeConfig())
        of_layers = sum(w.numel for w in weights)
        assert of_layers == sum(
            m.weight.numel() for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"
        )
        assert coverage(model, weights).dense == {}


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
    rows = Family(prunable=(Row("experts.gate_up_proj", experts=True, stacked=2),), dense=("router",))
    monkeypatch.setitem(FAMILIES, "fused", rows)
    (weight,) = prunable_weights(_Fused(), SparseForgeConfig())
    assert weight == PrunableWeight("experts.gate_up_proj", (4, 16, 8), -1, "experts", 4, 2)
    assert (weight.numel, weight.matrices) == (512, 8)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj: .* axis at -1, but Module has it at -2"):
        prunable_weights(_Fused(transposed=True), SparseForgeConfig())


def test_coverage_counts_elements() -> None:
    model = tiny_llama()
    total = sum(parameter.numel() for parameter in model.parameters())
    weights = prunable_weights(model, SparseForgeConfig(include=("*.mlp.*",)))
    counted = coverage(model, weights)
    assert (counted.weights, counted.masked, counted.total) == (6, 2 * 3 * 32 * 64, total)
    assert counted.linear == 2 * (3 * 32 * 64 + 2 * 32 * 32 + 2 * 32 * 16)


def test_tied_parameters_count_once() -> None:
    tied = tiny_qwen3()
    untied = tiny_qwen3(tie_word_embeddings=False)
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
        (
            {"include": ("lm_head.weight",)},
            r"sparseforge.include: 'lm_head.weight' matches no weight that .* stays dense",
        ),
        (
            {"exclude": ("q_proj",)},
            r"sparseforge.exclude: 'q_proj' matches no weight.*'model.layers.\*.self_attn.q_proj.weight'",
        ),
        ({"exclude": ("*",)}, "no weight of this llama model is left to prune"),
        ({"pattern": "5:7"}, r"q_proj.weight \(and 13 more\) of shape \(32, 32\) cannot be 5:7: its input axis has 32"),
        (
            {"pattern": "block64"},
            r"cannot be block64:0.5: its matrix is 32 x 32.*\"exclude\": \[\"model.layers.\*.self",
        ),
    ],
)
def test_globs_and_patterns_that_do_not_fit_are_errors(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prunable_weights(tiny_llama(), SparseForgeConfig(**config))


def test_the_cure_of_a_misfit_cures_it() -> None:
    model = tiny_llama(intermediate_size=66)
    with pytest.raises(ValueError, match=r'"exclude": \["model.layers.\*.mlp.down_proj.weight"\]'):
        prunable_weights(model, SparseForgeConfig())
    cure = ("model.layers.*.mlp.down_proj.weight",)
    assert len(prunable_weights(model, SparseForgeConfig(exclude=cure))) == 12


def test_names_of_an_unknown_family_are_refused() -> None:
    with pytest.raises(ValueError, match="'bloom' has no row .* gpt2, gpt_neo, gpt_neox, gpt_oss, granite, "):
        prunable_names("bloom", SHAPES, SparseForgeConfig())


def test_a_module_without_a_config_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no config.model_type"):
        prunable_weights(nn.Linear(4, 4), SparseForgeConfig())


def test_a_layer_of_the_wrong_orientation_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.q_proj = Conv1D(32, 32)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.weight: .* at -1, but Conv1D has it at -2"):
        prunable_weights(model, SparseForgeConfig())


def test_a_weight_survives_json() -> None:
    weight = prunable_weights(tiny_gpt2(), SparseForgeConfig())[0]
    read = json.loads(json.dumps(dataclasses.asdict(weight)))
    assert PrunableWeight(**{**read, "shape": tuple(read["shape"])}) == weight


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_has_a_place(family: str) -> None:
    """Fused and listed weights of one expert are at the same place, in the module that is a leaf (or its list)."""
    model = BUILDERS[family]()
    shapes = {name: tuple(tensor.shape) for name, tensor in _saved(model).items()}
    fused = [weight for weight in prunable_weights(model, SparseForgeConfig()) if weight.experts]
    listed = [weight for weight in prunable_names(family, shapes, SparseForgeConfig()) if weight.experts]
    assert {weight.first_expert for weight in fused} == {(name, 0) for name in leaf_modules(model)}
    of_fused = {(weight.first_expert[0], number) for weight in fused for number in range(weight.experts)}
    assert {
        (weight.first_expert[0].replace(".block_sparse_moe.", ".mlp."), weight.first_expert[1] + number)
        for weight in listed
        for number in range(weight.experts)
    } == of_fused


def test_tiles_lie_in_one_matrix() -> None:
    """Refuse a tile over the last rows of gate and the first of up, which would be in no saved tensor."""
    model = BUILDERS["qwen3_moe"](moe_intermediate_size=24)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj .*cannot be block16:0.5: its matrix is 24 x 32"):
        prunable_weights(model, SparseForgeConfig(pattern="block16", exclude=("*.experts.down_proj",)))
    assert prunable_weights(BUILDERS["qwen3_moe"](), SparseForgeConfig(pattern="block16"))
