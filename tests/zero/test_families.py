"""Every family on real ranks: heated, hardened and frozen, and mixtures whose ranks route to different experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import sparseforge_ds as sf
from sparseforge_ds.model.distill import distillation_loss
from sparseforge_ds.model.expert_modules import leaf_modules
from sparseforge_ds.model.families import PrunableWeight, prunable_weights
from sparseforge_ds.model.measurable import refuse_unmeasurable
from sparseforge_ds.model.teacher import Teacher
from sparseforge_ds.transformers_internals import checkpoint_activations
from tests.distributed import run_distributed
from tests.tiny_models import BUILDERS, LEFT_DENSE, MIXTURES
from tests.zero.case import Case, build, gathered, published, short, states

ROWS, LENGTH = 8, 12
"""Sequences of a batch over all ranks, and their tokens."""
ZERO3 = Case(stage=3, zero={"stage3_param_persistence_threshold": 0})
ALONE = Case(stage=0)


@dataclass(frozen=True)
class Family:
    """A tiny model and the text that it is fed. Pickled to the ranks."""

    name: str
    implementation: str = "grouped_mm"
    listed: bool = False
    """Experts as a list of modules, of which only those with tokens are called."""
    text: str = "mixed"
    """mixed: many tokens everywhere; apart: a single token in each half batch, and they have no expert in common;
    uneven: a single token in the first half, many in the second, so that one rank calls more experts than the other."""
    seed: int = 0
    taught: bool = False
    """True to train by a teacher under ZeRO-3, and with activations recomputed."""

    def model(self) -> PreTrainedModel:
        model = BUILDERS[self.name](seed=self.seed)
        if self.name in MIXTURES and self.name != "llama4_text":  # which computes experts in its own way
            model.set_experts_implementation(self.implementation)
        if self.listed:
            for layer in model.model.layers:
                layer.mlp = _Listed(layer.mlp)
        return model

    @cached_property
    def tokens(self) -> tuple[int, int]:
        """Two that go to different experts in every mixture, before training."""
        return _apart(self.model())

    def batch(self, step: int) -> dict[str, Tensor]:
        """(ROWS, LENGTH) ids; no token of the first half, which is the first of two ranks', is in the second."""
        half = (ROWS // 2, LENGTH)
        generator = torch.Generator().manual_seed(step)
        many = [torch.randint(low, low + 30, half, generator=generator) for low in (3, 33)]
        single = [torch.full(half, token) for token in (self.tokens if self.text == "apart" else (3, 33))]
        ids = torch.cat({"mixed": many, "apart": single, "uneven": [single[0], many[1]]}[self.text])
        return {"input_ids": ids, "labels": ids.clone()}


class _Expert(nn.Module):
    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight.data.copy_(weight)
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Listed(nn.Module):
    """A mixture as transformers 4 and published code have it."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.gate = fused.gate
        pairs = zip(fused.experts.gate_up_proj, fused.experts.down_proj, strict=True)
        self.experts = nn.ModuleList([_Expert(*gate_up.chunk(2), down) for gate_up, down in pairs])

    def forward(self, hidden: Tensor) -> Tensor:
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        _, routing_TK, expert_TK = self.gate(x_TH)
        output = torch.zeros_like(x_TH)
        for number, expert in enumerate(self.experts):
            token, position = (expert_TK == number).nonzero(as_tuple=True)
            if len(token):
                output.index_add_(0, token, expert(x_TH[token]) * routing_TK[token, position, None])
        return output.view_as(hidden)


def _record(model: nn.Module) -> list[list[int]]:
    """Fills up with the experts that are called, one entry per mixture and forward."""
    calls: list[list[int]] = []
    for module in _routers(model):
        module.register_forward_hook(lambda _module, _args, output: calls.append(output[2].unique().tolist()))
    return calls


def _routers(model: nn.Module) -> list[nn.Module]:
    kinds = {module: type(module).__name__ for module in model.modules()}
    return [module for module, kind in kinds.items() if kind.lower().endswith("topkrouter") or kind == "DeepseekRouter"]


def _apart(model: PreTrainedModel) -> tuple[int, int]:
    chosen: list[Tensor] = []
    for module in _routers(model):
        module.register_forward_hook(lambda _module, _args, output: chosen.append(output[2].view(60, -1)))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 63)[:, None].expand(-1, LENGTH))
    of_token = {token: [set(layer[token - 3].tolist()) for layer in chosen] for token in range(3, 63)}
    return next(
        (a, b)
        for a, x in of_token.items()
        for b, y in of_token.items()
        if not any(p & q for p, q in zip(x, y, strict=True))
    )


def _train(case: Case, family: Family) -> dict[str, Any]:
    """Train through the whole life of a mask: updates after 2, 4 and 6 of eight steps, frozen from 7 on, or `short`."""
    model = family.model()
    deepspeed.utils.set_z3_leaf_modules_by_name(model, leaf_modules(model))
    calls = _record(model)
    # All ranks together have `ROWS` sequences a step, whatever their number.
    size = ROWS // dist.get_world_size()
    more = {"train_micro_batch_size_per_gpu": size, **case.more}
    if family.taught:
        checkpoint_activations(model)
    engine, forge = build(replace(case, more=more), model)
    distillation = case.sparseforge.distillation
    teacher = None
    if family.taught:
        assert distillation is not None
        teacher = Teacher(family.model(), distillation, {**case.deepspeed(), **more})

    # The loss of this rank's sequences, with or without a teacher.
    def loss_of(step: int) -> Tensor:
        own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        device = get_accelerator().current_device_name()
        batch = {key: value[own].to(device) for key, value in family.batch(step).items()}
        if teacher is None or distillation is None:
            return engine(**batch).loss
        logits = engine(input_ids=batch["input_ids"]).logits
        return distillation_loss(logits, teacher(batch["input_ids"]), batch["labels"], distillation).total

    # Train, and keep the curvature of the first update.
    losses = []
    updates = 0
    first_curvature = {}
    for step in range(case.steps):
        loss = loss_of(step)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        updated = forge.step(lambda step=step: loss_of(step))
        updates += updated
        if updated and updates == 1 and forge.curvature.is_needed:
            first_curvature = gathered(forge, "curvature")
    forge.finish()
    return {
        "losses": losses,
        "updates": updates,
        "weights": forge.weights,
        "left_dense": [*forge.coverage.dense],
        **states(forge, "mask", "dense"),
        "curvature": first_curvature,
        "experts": forge.state_dict().get("experts"),
        "unseen": forge.curvature.expert_load.unseen,
        "metrics": forge.metrics,
        "published": published(engine),
        "calls": calls,
    }


def _train_all(case: Case, families: list[Family]) -> list[dict[str, Any]]:
    return [_train(case, family) for family in families]


def _check_frozen(result: dict[str, Any]) -> None:
    """Check that every prunable weight is 2:4 along its input axis, and the dense weight where it is kept."""
    assert [name for name in result["left_dense"] if not name.endswith(LEFT_DENSE)] == []
    for weight in result["weights"]:
        value = result["published"][weight.name]
        group_GM = _input_last(value, weight).reshape(-1, 4)
        assert torch.equal((group_GM != 0).sum(dim=1), torch.full((len(group_GM),), 2)), weight.name
        mask = result["mask"][weight.name].view(weight.shape)
        assert torch.equal(mask, (value != 0).float())
        assert torch.equal(value.float(), result["dense"][weight.name].view(weight.shape) * mask)


def _input_last(value: Tensor, weight: PrunableWeight) -> Tensor:
    return value.transpose(-1, weight.input_axis)


def _check_same(results: dict[str, Any], expected: dict[str, Any], differing: float = 0.0) -> None:
    """Losses, the first curvature, and masks up to a share of `differing` in every weight."""
    assert results["losses"] == pytest.approx(expected["losses"], rel=1e-3 if differing else 1e-4)
    assert results["updates"] == expected["updates"] == 4
    assert results["curvature"].keys() == expected["curvature"].keys()
    for name, curvature in expected["curvature"].items():
        atol = 1e-4 * curvature.abs().max().item()
        torch.testing.assert_close(results["curvature"][name], curvature, rtol=1e-3, atol=atol)
    for name, mask in expected["mask"].items():
        assert (results["mask"][name] != mask).float().mean() <= differing, name


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[dict[str, Any], ...]]:
    """Train every family with the default importance: on both of two ranks, and on one alone."""
    # With seed 0, two scores of one of Mixtral's groups agree in five digits, and rounding decides between them.
    families = [Family(name, seed=int(name == "mixtral")) for name in BUILDERS]
    pair = run_distributed(_train_all, 2, short(ZERO3), families)
    alone = run_distributed(_train_all, 1, short(ALONE), families)
    return dict(zip(BUILDERS, zip(*pair, *alone, strict=True), strict=True))


@pytest.mark.parametrize("family", BUILDERS)
def test_two_ranks_heat_harden_and_freeze(family: str, results: dict[str, tuple[dict[str, Any], ...]]) -> None:
    """Curvature is per token, also in fused experts; the ranks are fed different words."""
    first, second, alone = results[family]
    for result in (first, second):
        _check_frozen(result)
    _check_same(first, alone)


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_has_a_mask_of_its_own(family: str, results: dict[str, tuple[dict[str, Any], ...]]) -> None:
    first = results[family][0]
    for weight in first["weights"]:
        if weight.experts:
            masks = first["mask"][weight.name].view(weight.experts, -1)
            for single, other in combinations(masks, 2):
                assert (single != other).float().mean() > 0.1


@pytest.mark.parametrize("family", MIXTURES)
def test_tokens_of_experts_are_counted(family: str, results: dict[str, tuple[dict[str, Any], ...]]) -> None:
    first, second, alone = results[family]
    counts = first["experts"]["layers"]
    layers = leaf_modules(BUILDERS[family]())
    assert list(counts) == layers and first["unseen"] == [] == first["experts"]["unseen"]
    for layer in layers:
        # Three refreshes measure the one micro-batch of a closure once each; every token goes to two experts.
        assert sum(counts[layer]["tokens"]) == 3 * ROWS * LENGTH * 2
        assert all(recent > 0 for recent in counts[layer]["recent"])
    assert second["experts"] == first["experts"] == alone["experts"]
    assert first["metrics"]["experts/unseen"] == 0.0


def test_dense_models_count_nothing(results: dict[str, tuple[dict[str, Any], ...]]) -> None:
    assert results["llama"][0]["experts"] is None
    assert not any(name.startswith("experts/") for name in results["llama"][0]["metrics"])


@pytest.mark.parametrize(
    "config",
    [
        {"importance": "magnitude"},
        {"importance": "wanda"},
        {"importance": "fisher", "curvature": {"factored": False}, "pattern": "4:8"},
    ],
    ids=["magnitude", "wanda", "fisher-4:8"],
)
def test_experts_by_other_importances_do_not_depend_on_ranks(config: dict[str, Any]) -> None:
    pair = run_distributed(_train, 2, replace(ZERO3, config=config), Family("deepseek"))
    (alone,) = run_distributed(_train, 1, replace(ALONE, config=config), Family("deepseek"))
    _check_same(pair[0], alone)
    if "pattern" not in config:
        _check_frozen(pair[0])


# Two members of a group of gate_up_proj have scores that are one number in fp32 (H W^2 of 3.00e-11 and 2.85e-11 where
# others have 1e-5), and rounding decides at step 4. The neuron behind them then has another activation, and its column
# in down_proj another curvature, which groups with a member there may follow: one of 512 here, and four there.
TIES = {("apart", "qwen3_moe"): 0.001, ("apart", "qwen2_moe"): 0.004}


@pytest.mark.parametrize(
    ("text", "implementation"), [("apart", "eager"), ("uneven", "eager"), ("uneven", "grouped_mm")]
)
def test_curvature_is_exact_if_ranks_call_different_experts(text: str, implementation: str) -> None:
    """Equal tokens give many weights no gradient but rounding, of which Adam makes a full step: W stays where it is."""
    case = replace(ZERO3, lr=0.0, config={"exclude": ["*.q_proj.weight", "*.k_proj.weight"]})
    names = ("deepseek", "qwen3_moe", "mixtral", *(("olmoe", "qwen2_moe") if text == "apart" else ()))
    families = [Family(name, implementation, text=text) for name in names]
    pair = run_distributed(_train_all, 2, case, families)
    alone = run_distributed(_train_all, 1, replace(case, stage=0), families)
    for name, first, second, expected in zip(names, *pair, *alone, strict=True):
        assert first["experts"] == second["experts"]
        assert any(not all(numbers["tokens"]) for numbers in first["experts"]["layers"].values()) == bool(
            first["unseen"]
        )
        _check_same(first, expected, differing=TIES.get((text, name), 0.0))


def test_experts_train_by_hutchinson() -> None:
    """Allow for a difference of gradients, whose rounding moves some scores."""
    config = {"importance": "hutchinson", "curvature": {"per_token": False, "radius": 0.1, "damping": 0.05}}
    pair = run_distributed(_train, 2, replace(ZERO3, config=config), Family("deepseek"))
    (alone,) = run_distributed(_train, 1, replace(ALONE, config=config), Family("deepseek"))
    _check_frozen(pair[0])
    assert pair[0]["losses"] == pytest.approx(alone["losses"], rel=1e-2)
    for name, mask in alone["mask"].items():
        assert (pair[0]["mask"][name] != mask).float().mean() < 0.05, name


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_train_in_bf16(implementation: str) -> None:
    pair = run_distributed(_train, 2, replace(ZERO3, dtype="bf16"), Family("deepseek", implementation))
    for result in pair:
        _check_frozen_in_bf16(result)
        assert result["losses"][-1] < result["losses"][0]


def _check_frozen_in_bf16(result: dict[str, Any]) -> None:
    for weight in result["weights"]:
        value = result["published"][weight.name]
        mask, dense = (result[key][weight.name].view(weight.shape) for key in ("mask", "dense"))
        assert value.dtype == torch.bfloat16
        kept_GM = _input_last(mask, weight).reshape(-1, 4)
        assert torch.equal(kept_GM.sum(dim=1), torch.full((len(kept_GM),), 2.0)), weight.name
        assert torch.equal(value, (dense * mask).bfloat16()), weight.name


@pytest.mark.parametrize(
    ("text", "implementation"),
    [("apart", "eager"), ("uneven", "eager"), ("apart", "batched_mm"), ("uneven", "grouped_mm")],
)
def test_ranks_that_call_different_experts_train_alike(text: str, implementation: str) -> None:
    """Wait for no other rank, and end where one rank does that sees everything."""
    case = replace(ZERO3, eps=1e-6, config={"importance": "magnitude"})  # see the last line
    alike = ("glm4_moe", "llama4_text", "qwen3_next", "qwen3_5_moe_text")  # as DeepSeek; calls all; as Qwen2-MoE
    every = [name for name in MIXTURES if name not in alike]
    names = every if (text, implementation) == ("apart", "eager") else ("deepseek", "qwen3_moe", "mixtral")
    families = [Family(name, implementation, text=text) for name in names]
    pair = run_distributed(_train_all, 2, case, families)
    alone = run_distributed(_train_all, 1, replace(case, stage=0), families)
    for family, first, second, expected in zip(families, *pair, *alone, strict=True):
        mixtures = len(leaf_modules(family.model()))
        for actual, reference in zip(first["calls"][:mixtures], second["calls"][:mixtures], strict=True):
            assert actual and reference
            assert len(actual) < len(reference) if text == "uneven" else not set(actual) & set(reference)
        _check_frozen(first)
        # Where all tokens are equal, attention has no gradient for queries and keys: rounding decides where they go.
        _check_same(first, expected, differing=0.02)


def _taken_apart(values: dict[str, Tensor], weights: list[PrunableWeight]) -> dict[str, Tensor]:
    """Flat tensors of fused experts by the names that listed ones have; all else as it is."""
    result = {}
    for weight in weights:
        value = values[weight.name]
        if not weight.experts:
            result[weight.name] = value
            continue
        names = ("gate_proj", "up_proj") if weight.stacked == 2 else ("down_proj",)
        parts = iter(value.view(weight.matrices, -1))
        for number in range(weight.experts):
            result |= {f"{weight.module}.{number}.{name}.weight": next(parts) for name in names}
    return result


def test_ranks_that_call_different_experts_distil_alike() -> None:
    """Gather and route in the teacher, and again in the backward pass."""
    case = replace(ZERO3, config={"importance": "magnitude", "distillation": {"hold": "zero3"}})
    families = [
        Family(name, "eager", text=text, taught=True) for name in ("deepseek", "olmoe") for text in ("apart", "uneven")
    ]
    pair = run_distributed(_train_all, 2, case, families)
    alone = run_distributed(_train_all, 1, replace(case, stage=0), families)
    for first, second, expected in zip(*pair, *alone, strict=True):
        assert set(first["calls"][0]) != set(second["calls"][0])
        _check_frozen(first)
        _check_same(first, expected, differing=0.02)


@pytest.mark.parametrize("stage", [3, 1])
def test_experts_in_a_list_are_measured_as_fused_ones(stage: int) -> None:
    """Per token and weighted by tokens; one rank calls more experts than the other, and no rank waits."""
    config = {"exclude": ["*.q_proj.weight", "*.k_proj.weight"]}
    case = replace(ZERO3 if stage == 3 else Case(stage=stage), lr=0.0, config=config)
    families = [Family("olmoe", listed=listed, text=text) for text in ("mixed", "uneven") for listed in (False, True)]
    first, second = run_distributed(_train_all, 2, case, families)
    for fused, listed, other in zip(first[::2], first[1::2], second[1::2], strict=True):
        assert listed["losses"] == pytest.approx(fused["losses"], rel=1e-4)
        assert listed["experts"] == fused["experts"] == other["experts"] and listed["unseen"] == fused["unseen"]
        expected = _taken_apart(fused["curvature"], fused["weights"])
        assert expected.keys() == listed["curvature"].keys()
        for name, curvature in expected.items():
            atol = 1e-5 * curvature.max().item()
            torch.testing.assert_close(listed["curvature"][name], curvature.view(-1), rtol=1e-3, atol=atol)
        for name, mask in _taken_apart(fused["mask"], fused["weights"]).items():
            assert (listed["mask"][name] != mask).float().mean() <= 0.002, name
    assert all(
        len(actual) < len(reference) for actual, reference in zip(first[3]["calls"], second[3]["calls"], strict=True)
    )


@pytest.mark.parametrize(("text", "stage"), [("mixed", 3), ("apart", 3), ("uneven", 3), ("apart", 1)])
def test_experts_in_a_list_train_like_fused_ones(text: str, stage: int) -> None:
    """Experts without tokens are not called at all, and ranks disagree on which."""
    importance = "fisher" if text == "mixed" else "magnitude"
    case = replace(ZERO3, stage=stage, config={"importance": importance})
    family = Family("olmoe", listed=True, text=text)
    pair = run_distributed(_train, 2, case, family)
    for result in pair:
        _check_frozen(result)
        assert sum(weight.experts for weight in result["weights"]) == 2 * 4 * 3
    (alone,) = run_distributed(_train, 1, replace(case, stage=0), family)
    _check_same(pair[0], alone, differing=0.0 if text == "mixed" else 0.02)
    (fused,) = run_distributed(_train, 1, replace(case, stage=0), replace(family, listed=False))
    assert pair[0]["losses"][:2] == pytest.approx(fused["losses"][:2], rel=1e-5)  # until the first mask update


def test_elements_per_token_of_experts_in_a_list_are_refused() -> None:
    model = Family("olmoe", listed=True).model()
    config = sf.SparseForgeConfig.from_dict({"curvature": {"factored": False}})
    with pytest.raises(ValueError, match='experts.0.gate_proj.weight .*by elements; use .*"factored": null'):
        refuse_unmeasurable(model, prunable_weights(model, config), config)
