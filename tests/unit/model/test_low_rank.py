"""SLoRB: nothing changes while it is off, equation 13 when it is on, and the start that its derivation promises."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import LowRankConfig, SparseForgeConfig
from sparseforge_ds.mask.pattern import top_n
from sparseforge_ds.model.branch import Branch, add_branch, branch_rank, branches
from sparseforge_ds.model.families import BRANCH, FAMILIES, prunable_weights
from sparseforge_ds.model.low_rank import prepare, saves_allowed
from sparseforge_ds.model.param_groups import param_groups
from sparseforge_ds.model.weight_scale import scaled_layers
from tests.reference import branch_start
from tests.tiny_models import BUILDERS, MIXTURES, tiny_llama, token_batch

CONFIG = SparseForgeConfig(low_rank=LowRankConfig(k=4))
EXPERTS_DENSE = SparseForgeConfig(low_rank=LowRankConfig(k=4), exclude=("*.experts.*",))


def _config(family: str) -> SparseForgeConfig:
    return EXPERTS_DENSE if family in MIXTURES else CONFIG


def _out_in(weight: Tensor, layer: nn.Module) -> Tensor:
    return weight.T if isinstance(layer, Conv1D) else weight


def _projection(runs: int, k: int) -> Tensor:
    """P of equation 13 as a matrix, (runs, runs * k)."""
    return torch.eye(runs).repeat_interleave(k, dim=1)


BRANCHED = [family for family in FAMILIES if family != "falcon"]
"""Families all of whose layers are plain ones."""


@pytest.mark.parametrize("family", BRANCHED)
def test_a_disabled_branch_changes_no_bit(family: str) -> None:
    model = BUILDERS[family]()
    batch = token_batch()
    plain = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    objects = {name: id(parameter) for name, parameter in model.named_parameters()}
    random_state = torch.get_rng_state()

    assert prepare(model, _config(family)) is model

    assert torch.equal(torch.get_rng_state(), random_state)
    assert [name for name, _ in model.named_parameters() if "low_rank_b" not in name] == names
    assert all(id(model.get_parameter(name)) == objects[name] for name in names)
    outputs = [m(**batch) for m in (plain, model)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    for output in outputs:
        output.loss.backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, model.get_parameter(name).grad), name
    assert all(branch.low_rank_b.grad is None for branch in branches(model).values())


@pytest.mark.parametrize("family", BRANCHED)
def test_every_masked_weight_has_a_branch(family: str) -> None:
    model = BUILDERS[family]()
    before = prunable_weights(model, _config(family))
    prepare(model, _config(family))
    assert prunable_weights(model, _config(family)) == before
    result = branches(model)
    assert list(result) == [weight.name for weight in before]
    for weight in before:
        branch = result[weight.name]
        inputs = weight.shape[weight.input_axis]
        assert branch.low_rank_b.shape == (weight.numel // inputs, inputs // 4)
        assert branch is model.get_submodule(weight.module)
        assert branch.enabled is False


def test_layers_with_a_forward_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match=r"query_key_value.weight belongs to a FalconLinear, which has no low-rank"):
        prepare(BUILDERS["falcon"](), CONFIG)


@pytest.mark.parametrize("family", MIXTURES)
def test_fused_experts_have_no_branch(family: str) -> None:
    with pytest.raises(ValueError, match=r"experts.gate_up_proj belongs to a \w+Experts, which has no low-rank branch"):
        prepare(BUILDERS[family](), CONFIG)


def test_listed_experts_have_no_branch() -> None:
    model = BUILDERS["mixtral"]()
    for layer in model.model.layers:
        del layer.mlp
        layer.block_sparse_moe = nn.Module()
        layer.block_sparse_moe.experts = nn.ModuleList([nn.Module(), nn.Module()])
        for expert in layer.block_sparse_moe.experts:
            expert.w1 = nn.Linear(32, 16, bias=False)
    with pytest.raises(ValueError, match=r"experts.0.w1.weight belongs to a routed expert, which low_rank does not"):
        prepare(model, CONFIG)
    assert "model.layers.0.self_attn.q_proj.weight" in branches(prepare(model, EXPERTS_DENSE))


def test_only_what_is_masked_has_a_branch() -> None:
    config = SparseForgeConfig(low_rank=LowRankConfig(k=4), include=("*.q_proj.*",))
    model = prepare(tiny_llama(), config)
    assert list(branches(model)) == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]


def test_a_compiled_model_is_refused() -> None:
    """Its names are of no checkpoint and no export, whether all of it is compiled or a part."""
    for model, name in ((torch.compile(tiny_llama()), "OptimizedModule"), (tiny_llama(), "model.layers.1")):
        if name == "model.layers.1":
            model.model.layers[1] = torch.compile(model.model.layers[1])
        with pytest.raises(ValueError, match=rf"^{name} is compiled already, .* by engine.compile\(\)"):
            prepare(model, SparseForgeConfig())


def test_without_low_rank_nothing_happens() -> None:
    model = tiny_llama()
    layer = model.model.layers[0].mlp.up_proj
    assert prepare(model, SparseForgeConfig()) is model
    assert model.model.layers[0].mlp.up_proj is layer
    assert branches(model) == {}


def _layers(bias: bool = True, k: int = 3) -> list[Branch]:
    return [add_branch(nn.Linear(12, 6, bias=bias), k), add_branch(Conv1D(6, 12), k)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("k", [3, 5, 12, 16])
@pytest.mark.parametrize("leading", [(5,), (2, 3), (0, 7)])
def test_an_enabled_branch_is_equation_13(which: int, k: int, leading: tuple[int, ...]) -> None:
    """Also where the last run of inputs is shorter than k."""
    layer = _layers(k=k)[which].double()
    with torch.no_grad():
        layer.low_rank_b.normal_()
    layer.enabled = True
    x = torch.randn(*leading, 12, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    w = _out_in(layer.weight, layer)
    b = layer.low_rank_b
    expected = x @ (w.T + _projection(math.ceil(12 / k), k)[:, :12].double().T @ b.T) + layer.bias
    torch.testing.assert_close(y, expected)

    parameters = [x, layer.weight, layer.bias, layer.low_rank_b]
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad(y, parameters, upstream)
    references = torch.autograd.grad(expected, parameters, upstream)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference)


def test_a_layer_without_bias_can_have_a_branch() -> None:
    layer = _layers(bias=False)[0]
    layer.enabled = True
    assert layer.bias is None
    assert layer(torch.ones(2, 12)).shape == (2, 6)


def test_a_strided_input_gives_the_same() -> None:
    layer = _layers()[0]
    layer.enabled = True
    nn.init.normal_(layer.low_rank_b)
    x = torch.randn(12, 5).T
    torch.testing.assert_close(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_block_sums_accumulate_in_fp32(dtype: torch.dtype) -> None:
    """Round once a sum: 1 + 63 small terms, each of which a 16-bit accumulator would drop."""
    layer = add_branch(nn.Linear(64, 1, bias=False), 64).to(dtype)
    layer.enabled = True
    nn.init.zeros_(layer.weight)
    nn.init.ones_(layer.low_rank_b)
    x = torch.full((1, 64), torch.finfo(dtype).eps / 4, dtype=dtype)
    x[0, 0] = 1
    assert layer(x).item() == x.double().sum().to(dtype).item() != 1


def test_a_branch_computes_in_the_dtype_of_autocast() -> None:
    layer = _layers()[0]
    layer.enabled = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 12)).dtype == torch.bfloat16


def test_new_parameters_follow_their_weight() -> None:
    model = prepare(tiny_llama().to(torch.bfloat16), CONFIG)
    assert {branch.low_rank_b.dtype for branch in branches(model).values()} == {torch.bfloat16}
    assert all(not branch.low_rank_b.any() for branch in branches(model).values())
    layer = nn.Linear(8, 8).eval()
    assert add_branch(layer, 4).training is False


sizes = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(2, 6), st.integers(0, 2**31))


@settings(deadline=None)
@given(sizes)
def test_the_start_is_exact_for_equal_inputs_in_a_run(case: tuple[int, int, int, int]) -> None:
    outputs, runs, k, seed = case
    generator = torch.Generator().manual_seed(seed)
    removed = torch.randn(outputs, runs * k, generator=generator, dtype=torch.float64)
    b = branch_start(removed, k)
    assert b.shape == (outputs, runs)
    x = torch.randn(7, runs, generator=generator, dtype=torch.float64).repeat_interleave(k, dim=1)
    torch.testing.assert_close(x @ removed.T, x @ _projection(runs, k).double().T @ b.T)


@settings(deadline=None)
@given(sizes, st.floats(0.0, 0.95))
def test_the_start_is_the_least_squares_solution(case: tuple[int, int, int, int], correlation: float) -> None:
    """Compare with the normal equations of the expected error, for inputs that are correlated inside runs."""
    outputs, runs, k, seed = case
    removed = torch.randn(outputs, runs * k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    run = torch.full((k, k), correlation, dtype=torch.float64).fill_diagonal_(1.0)
    covariance = torch.block_diag(*[run] * runs)
    p = _projection(runs, k).double()
    solution = torch.linalg.solve(p @ covariance @ p.T, p @ covariance @ removed.T).T
    torch.testing.assert_close(branch_start(removed, k), solution)


def _mask_by_magnitude(branch: Branch) -> None:
    """One-shot 2:4, and B started from what that removes."""
    w = _out_in(branch.weight, branch)
    mask = top_n(w.abs().reshape(-1, 4), 2).view(w.shape)
    branch.low_rank_b.copy_(branch_start(w * ~mask, branch.k))
    w.mul_(mask)


@pytest.mark.parametrize("which", [0, 1])
@torch.no_grad()
def test_the_start_brings_a_masked_layer_nearer_to_dense(which: int) -> None:
    layer = [add_branch(nn.Linear(64, 32), 4), add_branch(Conv1D(32, 64), 4)][which]
    layer.weight.normal_()
    x = torch.randn(500, 16).repeat_interleave(4, dim=1) + torch.randn(500, 64)  # correlation 0.5 inside a run
    dense = layer(x)
    _mask_by_magnitude(layer)
    without = (layer(x) - dense).square().mean()
    layer.enabled = True
    assert (layer(x) - dense).square().mean() < 0.75 * without


@torch.no_grad()
def test_the_start_repairs_a_real_model(assets: Path) -> None:
    """stories260K: one-shot 2:4 has a perplexity of 130 on held-out text, with started branches (k = 4) half of it."""
    folder = assets / "models" / "stories260K"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    lines = (assets / "text" / "tinystories" / "heldout.jsonl").read_text().splitlines()[:20]
    tokens = [token for line in lines for token in tokenizer(json.loads(line)["text"])["input_ids"]]
    batch = torch.tensor(tokens[: 8 * 256]).view(8, 256)
    prepare(model, CONFIG)
    for branch in branches(model).values():
        _mask_by_magnitude(branch)
    losses = []
    for enabled in (False, True):
        for branch in branches(model).values():
            branch.enabled = enabled
        losses.append(model(input_ids=batch, labels=batch).loss.item())
    assert losses[1] < losses[0] - 0.5


def test_a_k_that_does_not_divide_the_inputs_has_a_shorter_run_at_the_end() -> None:
    model = prepare(tiny_llama(intermediate_size=72), SparseForgeConfig(low_rank=LowRankConfig(k=16)))
    ranks = {name.split(".")[-2]: branch.low_rank_b.shape[1] for name, branch in branches(model).items()}
    assert ranks["down_proj"] == 5 and ranks["up_proj"] == 2


def test_transformers_does_not_save_a_model_whose_branches_it_would_lose(tmp_path: Path) -> None:
    model = copy.deepcopy(prepare(tiny_llama(), CONFIG))
    with pytest.raises(ValueError, match="save_pretrained: .* without its low-rank branches .* sparseforge consol"):
        model.save_pretrained(tmp_path / "lost")
    assert not (tmp_path / "lost").exists()
    with saves_allowed(model):
        model.save_pretrained(tmp_path / "whole")
    assert any(name.endswith(BRANCH) for name in load_file(tmp_path / "whole" / "model.safetensors"))
    with pytest.raises(ValueError, match="save_pretrained"):
        model.save_pretrained(tmp_path / "lost")


def test_transformers_does_not_save_a_model_whose_factors_it_would_lose(tmp_path: Path) -> None:
    model = prepare(tiny_llama(), SparseForgeConfig.from_dict({"method": "cast"}))
    with pytest.raises(ValueError, match=r"save_pretrained: .* without its factors of outputs \(sparseforge\.method"):
        model.save_pretrained(tmp_path / "lost")
    assert not (tmp_path / "lost").exists()
    # Folded into the weights they are no part of the model; it is copied and pickled with its save.
    for layer in scaled_layers(model).values():
        layer.enabled = False
    torch.save(copy.deepcopy(model), tmp_path / "model.pt")
    torch.load(tmp_path / "model.pt", weights_only=False).save_pretrained(tmp_path / "folded", True, model.state_dict())
    assert not [name for name in load_file(tmp_path / "folded" / "model.safetensors") if "weight_scale" in name]
    prepare(tiny_llama(), SparseForgeConfig.from_dict({"method": {"name": "cast", "scaling": False}})).save_pretrained(
        tmp_path / "plain"
    )


def test_preparing_twice_is_an_error() -> None:
    model = prepare(tiny_llama(), CONFIG)
    with pytest.raises(ValueError, match="q_proj has its low_rank_b already"):
        prepare(model, CONFIG)


def test_hooks_of_a_layer_stay() -> None:
    model = tiny_llama()
    records = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda layer, *_: records.append(layer))
    prepare(model, CONFIG)(**token_batch())
    assert records == [model.model.layers[1].mlp.up_proj] and isinstance(records[0], Branch)


def test_a_forward_of_its_own_would_be_lost() -> None:
    model = tiny_llama()
    layer = model.model.layers[1].mlp.up_proj
    layer.forward = layer.forward
    with pytest.raises(ValueError, match=r"belongs to a Linear, which has no low-rank branch beside a forward"):
        prepare(model, CONFIG)


def test_another_kind_of_layer_is_refused() -> None:
    class Special(nn.Linear):
        pass

    model = tiny_llama()
    model.model.layers[0].mlp.up_proj = Special(32, 64, bias=False)
    with pytest.raises(ValueError, match="mlp.up_proj.weight belongs to a Special, which has no low-rank branch"):
        prepare(model, CONFIG)


def test_a_layer_of_another_class_keeps_its_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer = Doubled(8, 3)
    x = torch.randn(2, 8)
    expected = layer(x)
    branch = add_branch(layer, 4)
    assert torch.equal(branch(x), expected) and isinstance(branch, Doubled)
    branch.enabled = True
    with torch.no_grad():
        branch.low_rank_b.fill_(1.0)
    torch.testing.assert_close(branch(x), expected + x.sum(-1, keepdim=True))
    successor = add_branch(nn.Linear(8, 3, bias=False), branch.k, like=branch)
    assert successor.low_rank_b is branch.low_rank_b and not successor.enabled


@pytest.mark.parametrize("which", [0, 1])
def test_a_learned_projection_is_lora(which: int) -> None:
    layer = [add_branch(nn.Linear(12, 6), 2, learned=True), add_branch(Conv1D(6, 12), 2, learned=True)][which]
    assert layer.low_rank_b.shape == (6, 2) and layer.low_rank_p is not None and layer.low_rank_p.shape == (2, 12)
    assert not layer.low_rank_b.any() and not layer.low_rank_p.any()
    with torch.no_grad():
        layer.low_rank_b.normal_()
        layer.low_rank_p.normal_()
    x = torch.randn(3, 5, 12)
    off = layer(x)
    layer.enabled = True
    torch.testing.assert_close(layer(x), off + x @ (layer.low_rank_b @ layer.low_rank_p).T)
    assert which or "learned=True" in repr(layer)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(2, 64))
def test_a_learned_branch_has_a_number_for_k_weights(outputs: int, inputs: int, k: int) -> None:
    """Round to the nearest rank, and never to none."""
    numbers = branch_rank(outputs, inputs, k, learned=True) * (outputs + inputs)
    assert abs(numbers - outputs * inputs / k) <= (outputs + inputs) / 2 or numbers == outputs + inputs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_learned_branches_are_prepared(family: str) -> None:
    config = SparseForgeConfig(low_rank=LowRankConfig(k=4, learned=True))
    model = BUILDERS[family]()
    batch = token_batch()
    expected = model(**batch).logits
    before = prunable_weights(model, config)
    prepare(model, config)
    assert prunable_weights(model, config) == before and torch.equal(model(**batch).logits, expected)
    groups = {group["name"]: group["params"] for group in param_groups(model, config)}
    of_branches = {id(b.low_rank_b) for b in branches(model).values()}
    of_branches |= {id(b.low_rank_p) for b in branches(model).values()}
    assert {id(parameter) for parameter in groups["low_rank"]} == of_branches and len(of_branches) == 2 * len(before)
