"""Statistics of fused experts: squared gradients token by token, experts without tokens, weights by tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import JetMoeConfig, JetMoeForCausalLM, PreTrainedModel, Qwen3MoeConfig

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.mask.curvature import token_fisher
from sparseforge_ds.mask.kernels.fisher import expert_fisher
from sparseforge_ds.model.expert_modules import leaf_modules
from sparseforge_ds.transformers_internals import checkpoint_activations
from sparseforge_ds.zero.expert_hooks import expert_tokens
from sparseforge_ds.zero.layer_hooks import block_entries
from tests.distributed import run_distributed
from tests.tiny_models import BUILDERS, tiny_mixture, token_batch
from tests.zero.case import Case, build, gathered, probe_of, short, train_step

FAMILIES = ("deepseek", "mixtral", "qwen3_moe")
STEPS = 9
"""Updates after 2, 4 and 6."""


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Return the modules with fused experts."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_transposed")}


def literal(model: PreTrainedModel, experts: Any, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Squared gradients of one product of a token and an expert at a time, and the experts' token counts."""
    records: dict[str, Tensor] = {}
    handle = experts.register_forward_hook(
        lambda _module, args, output: records.update(zip("xiwo", (*args, output), strict=True))
    )
    loss = model(input_ids=ids, labels=ids).loss
    handle.remove()
    (of_output,) = torch.autograd.grad(loss, records["o"])
    total = {name: torch.zeros_like(getattr(experts, name)) for name in ("gate_up_proj", "down_proj")}
    for token, chosen in enumerate(records["i"].tolist()):
        for position, number in enumerate(chosen):
            gate_up, down = (getattr(experts, name)[number].detach().clone().requires_grad_() for name in total)
            gate, up = F.linear(records["x"][token].detach(), gate_up).chunk(2)
            output = records["w"][token, position].detach() * F.linear(experts.act_fn(gate) * up, down)
            gradients = torch.autograd.grad((output * of_output[token]).sum(), (gate_up, down))
            for name, gradient in zip(total, gradients, strict=True):
                total[name][number] += gradient.detach().square()
    return total, records["i"].reshape(-1).bincount(minlength=experts.num_experts)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_squared_gradients_are_those_of_single_products(family: str, implementation: str) -> None:
    model = BUILDERS[family]().train()
    model.config.aux_loss_alpha = 0.0
    model.set_experts_implementation(implementation)
    ids = token_batch(1, 8)["input_ids"]
    plain = model(input_ids=ids).logits
    results: dict[tuple[str, str], Tensor] = {}
    counts: dict[str, list[int]] = {}

    def hook(layer: str, parameter: str, grad_SO: Tensor | None, x_SI: Tensor, stop_E: Tensor, tokens: int) -> None:
        assert grad_SO is not None and tokens == 8
        results[layer, parameter] = torch.cat([full for _, full in expert_fisher(grad_SO, x_SI, stop_E, 2.0)])
        counts[layer] = stop_E.diff(prepend=stop_E.new_zeros(1)).tolist()

    with expert_tokens(experts_of(model), hook):
        output = model(input_ids=ids, labels=ids)
        (output.loss * 2).backward()
    torch.testing.assert_close(output.logits, plain, rtol=1e-4, atol=1e-5)
    assert model.config._experts_implementation == implementation
    for layer, experts in experts_of(model).items():
        expected, tokens = literal(model, experts, ids)
        assert counts[layer] == tokens.tolist()
        for parameter, value in expected.items():
            assert value.any()
            torch.testing.assert_close(results[layer, parameter], value, rtol=1e-3, atol=1e-5 * value.max().item())


def test_hooks_change_no_gradient_and_survive_checkpointing() -> None:
    ids = token_batch(2, 8)["input_ids"]
    gradients = []
    calls = []

    def hook(layer: str, parameter: str, *_: Any) -> None:
        calls.append((layer, parameter))

    for hooked in (False, True):
        model = BUILDERS["qwen3_moe"]().train()
        checkpoint_activations(model)
        with expert_tokens(experts_of(model) if hooked else {}, hook):
            model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-7)
    assert calls == [("model.layers.1.mlp.experts", name) for name in ("down_proj", "gate_up_proj")]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_tokens_of_a_block_are_counted(reentrant: bool | None) -> None:
    """Also when a checkpointed block is run again."""
    from tests.zero.test_families import Family

    model = Family("olmoe", listed=True).model().train()
    if reentrant is not None:
        checkpoint_activations(model, reentrant)
    blocks = {str(number): layer.mlp for number, layer in enumerate(model.model.layers)}
    entered: dict[str, int] = {}
    with block_entries(blocks, entered.__setitem__):
        model(**token_batch(2, 8)).loss.backward()
    assert entered == {"0": 16, "1": 16}


def test_a_block_without_hidden_states_is_refused() -> None:
    block = nn.Identity()
    with (
        block_entries({"here": block}, lambda *_: None),
        pytest.raises(ValueError, match="here: Identity is called without a tensor of hidden states"),
    ):
        block(torch.ones(2, dtype=torch.long))


def test_inputs_are_seen_without_a_gradient() -> None:
    model = BUILDERS["mixtral"]()
    rows = []

    def hook(*call: Any) -> None:
        rows.append((call[1], len(call[3]), call[2]))

    with expert_tokens(experts_of(model), hook, gradients=False), torch.no_grad():
        model(**token_batch(1, 8))
    assert rows == [("gate_up_proj", 16, None), ("down_proj", 16, None)] * 2


def test_the_implementation_is_put_back_after_an_error() -> None:
    model = BUILDERS["olmoe"]()
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="stop"), expert_tokens(experts_of(model), lambda *_: None):
        raise RuntimeError("stop")
    assert model.config._experts_implementation == "eager"
    with expert_tokens(experts_of(model), lambda *_: None):
        pass


def test_experts_that_nobody_listens_to_are_computed_as_before() -> None:
    """Compute by single products, which demand nothing of sizes: 18 numbers of 16 bits are no multiple of 16 bytes."""
    model = tiny_mixture(Qwen3MoeConfig, moe_intermediate_size=18, mlp_only_layers=[]).to(torch.bfloat16)
    model.set_experts_implementation("eager")
    probed, not_probed = experts_of(model)
    calls = []
    plain = model(**token_batch(1, 8)).logits
    with expert_tokens({probed: model.get_submodule(probed)}, lambda *call: calls.append(call[0])):
        output = model(**token_batch(1, 8))
        assert not_probed not in calls and torch.equal(output.logits, plain)
        output.loss.backward()
    assert calls == [probed] * 2
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize("together", [1, 2, 3])
def test_expert_fisher_is_token_fisher_of_each_run(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseforge_ds.mask.kernels.fisher.EXPERT_BYTES", together * 4 * 3 * 5 + 1)
    torch.manual_seed(0)
    grad_SO = torch.randn(7, 3)
    x_SI = torch.randn(7, 5)
    parts = list(expert_fisher(grad_SO, x_SI, torch.tensor([2, 2, 7]), 4.0))
    assert [first for first, _ in parts] == list(range(0, 3, together))
    assert all(len(part) <= together for _, part in parts)
    full = torch.cat([part for _, part in parts])
    torch.testing.assert_close(full[0], token_fisher(grad_SO[:2], x_SI[:2], 4.0))
    assert not full[1].any()
    torch.testing.assert_close(full[2], token_fisher(grad_SO[2:], x_SI[2:], 4.0))


@dataclass(frozen=True)
class Detour:
    """Gate that sends tokens of the last expert to the first one from an optimizer step on."""

    step: int
    family: str = "qwen3_moe"


def train(case: Case, detour: Detour) -> dict[str, Any]:
    model = BUILDERS[detour.family]()
    current_step = [0]
    last = 3

    # From the detour's step on no token is sent to the last expert.
    def reroute(_module: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, routing_TK, expert_TK = output
        if current_step[0] >= detour.step:
            expert_TK = torch.where(expert_TK == last, 0, expert_TK)
        return logits, routing_TK, expert_TK

    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(reroute)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, forge = build(case, model)
    # What each update leaves.
    curvature = []
    idle = []
    metrics = []
    for step in range(STEPS):
        current_step[0] = step
        train_step(engine, case, step)
        if forge.step(probe_of(engine, case, step)):
            curvature.append(gathered(forge, "curvature"))
            idle.append(forge.curvature.expert_load.idle)
            metrics.append(forge.metrics)
    forge.finish()
    return {
        "initial": {weight.name: initial[weight.name] for weight in forge.weights} if case.stage == 0 else {},
        "weights": forge.weights,
        "mask": gathered(forge, "mask"),
        "curvature": curvature,
        "idle": idle,
        "metrics": metrics,
        "unseen": forge.curvature.expert_load.unseen,
        "state": forge.state_dict()["experts"],
    }


@pytest.mark.parametrize("config", [{}, {"importance": "wanda"}], ids=str)
def test_an_expert_that_never_sees_a_token_goes_by_magnitude(config: dict[str, Any]) -> None:
    case = Case(stage=0, config=config)
    (alone,) = run_distributed(train, 1, case, Detour(0))
    pair = run_distributed(train, 2, replace(case, stage=3), Detour(0))
    never = ["model.layers.1.mlp.experts[3]"]
    for result in (alone, *pair):
        assert result["unseen"] == never == result["state"]["unseen"]
        assert result["idle"][:3] == [never] * 3
        assert result["metrics"][0]["experts/unseen"] == result["metrics"][0]["experts/idle"] == 1.0
        assert result["metrics"][0]["experts/load_min/model.layers.1.mlp.experts"] == 0.0
        assert result["metrics"][0]["experts/load_max/model.layers.1.mlp.experts"] > 1.0
        counts = result["state"]["layers"]["model.layers.1.mlp.experts"]
        assert counts["tokens"][3] == counts["recent"][3] == 0 and all(counts["tokens"][:3])
        for weight in result["weights"]:
            if weight.experts:
                # Nothing but weight decay, which keeps the order, changes an expert without tokens.
                group_GM = alone["initial"][weight.name][3].reshape(-1, 4).abs()
                kept = torch.zeros_like(group_GM).scatter_(1, group_GM.topk(2).indices, 1.0)
                assert torch.equal(result["mask"][weight.name].view(weight.shape)[3].reshape(-1, 4), kept)
    for name, mask in alone["mask"].items():
        assert torch.equal(pair[0]["mask"][name], mask), name


def test_an_expert_whose_tokens_stay_away_keeps_its_curvature() -> None:
    for result in run_distributed(train, 2, Case(stage=3), Detour(3)):
        first, second, third = result["curvature"][:3]
        assert result["idle"][0] == [] and result["idle"][1] == ["model.layers.1.mlp.experts[3]"]
        assert result["unseen"] == []
        for weight in result["weights"]:
            views = [value[weight.name].view(weight.shape) for value in (first, second, third)]
            if weight.experts:
                assert views[0][3].any() and torch.equal(views[0][3], views[1][3])
                assert torch.equal(views[0][3], views[2][3])
                assert not torch.equal(views[0][2], views[1][2])
            else:
                assert not torch.equal(views[0], views[1])


def save_and_go_on(case: Case, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    engine, forge = build(case)
    for step in range(STEPS):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
        if step == 2:
            saved = forge.state_dict()["experts"]
            engine.save_checkpoint(folder, tag="middle")
    return saved, forge.state_dict()["experts"]


def go_on(case: Case, folder: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    engine, forge = build(case)
    forge.restore(Checkpoint(Path(folder, "middle")))
    restored = forge.state_dict()["experts"]
    assert forge.curvature.expert_load.idle == []  # not known any more
    for step in range(3, STEPS):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
    without = {key: value for key, value in forge.state_dict().items() if key != "experts"}
    continued = forge.state_dict()["experts"]
    engine.save_checkpoint(folder, tag="without", client_state={"sparseforge": without})
    try:
        engine.load_checkpoint(folder, tag="without")
    except ValueError as error:
        return restored, continued, str(error)
    return restored, continued, "accepted"


def test_counts_continue_in_another_layout(tmp_path: Path) -> None:
    case = Case(stage=3, model="qwen3_moe")
    (saved, final), other = run_distributed(save_and_go_on, 2, case, str(tmp_path))
    assert other == (saved, final)
    ((restored, continued, refusal),) = run_distributed(go_on, 1, replace(case, stage=1), str(tmp_path))
    assert restored == saved
    assert "token counts of the experts" in refusal
    for layer, numbers in final["layers"].items():
        before, after = (sum(state["layers"][layer]["tokens"]) for state in (saved, continued))
        assert 0 < before < after == sum(numbers["tokens"])
        # Rounding may send a token elsewhere.
        assert continued["layers"][layer]["recent"] == pytest.approx(numbers["recent"], rel=0.05)


def refused(case: Case, change: Callable[[PreTrainedModel], None]) -> str:
    model = BUILDERS["olmoe"]()
    change(model)
    try:
        build(case, model)
    except ValueError as error:
        return str(error)
    return "accepted"


def forget_where_it_is_from(model: PreTrainedModel) -> None:
    for experts in experts_of(model).values():
        experts.has_post_expert_norm = True


def test_experts_that_cannot_be_measured_are_refused() -> None:
    (text,) = run_distributed(refused, 1, Case(stage=0), forget_where_it_is_from)
    assert (
        "model.layers.0.mlp.experts" in text
        and "has norms behind its experts" in text
        and '"importance": "magnitude"' in text
    )
    magnitude = Case(stage=0, config={"importance": "magnitude"})
    assert run_distributed(refused, 1, magnitude, forget_where_it_is_from) == ["accepted"]


def train_experts_of_attention() -> dict[int, tuple[list[float], int]]:
    """Return the losses of JetMoE and its leaves at two stages. Its attention has parts alone that are called."""
    results = {}
    for stage in (2, 3):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        torch.manual_seed(0)
        config = JetMoeConfig(vocab_size=40, **sizes, kv_channels=8, intermediate_size=64, num_local_experts=4)
        model = JetMoeForCausalLM(config)
        included = {"include": ["model.layers.*.self_attention.kv_proj.weight"], "allow_dense": ["*"]}
        case = short(Case(stage=stage, config={**included, "importance": "magnitude"}))
        engine, forge = build(case, model)
        losses = []
        for step in range(case.steps):
            losses.append(train_step(engine, case, step))
            forge.step()
        forge.finish()
        results[stage] = losses, len(leaf_modules(model))
    return results


def test_experts_whose_parts_alone_are_called_are_trained_at_every_stage() -> None:
    """Gradients of their parts would never be reduced if they were a leaf of ZeRO-3."""
    results = run_distributed(train_experts_of_attention, 2)[0]
    assert results[3][0] == pytest.approx(results[2][0], abs=1e-5) and not results[3][1]
