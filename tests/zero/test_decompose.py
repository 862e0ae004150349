"""Branches with a learned P, on real ranks: the start of a whole matrix, however shards cut it, and what it gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.branches.decompose import ROUNDS, WARM_UP, decompose_into_branches
from sparseforge_ds.mask.pattern import top_n
from sparseforge_ds.model.branch import branch_rank, branches
from sparseforge_ds.model.families import BRANCH, prunable_weights
from tests.distributed import run_distributed
from tests.reference import groups_of
from tests.zero.case import (
    MODELS,
    Case,
    batch_at,
    build,
    gathered,
    moved_by_pruning,
    my_part,
    probe_of,
    published,
    republish,
    train_step,
)

K4 = {"low_rank": {"k": 4, "learned": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES: dict[str, Case] = {
    "stage 0 llama": Case(stage=0, config=K4),
    "stage 1 gpt2 k=3": Case(stage=1, model="gpt2", config={"low_rank": {"k": 3, "learned": True}}),
    "stage 2 bf16 llama": Case(stage=2, dtype="bf16", config=K4),
    "stage 1 pairs": Case(stage=1, model="llama_24", config={**K4, "pattern": "4:8 pairs"}),
    "stage 2 tiles": Case(stage=2, model="llama_tiles", config={**K4, "pattern": "block16"}),
    "stage 3 gpt2 offload": Case(
        stage=3, model="gpt2", config=K4, zero=OFFLOAD, more={"zero_force_ds_cpu_optimizer": False}
    ),
    "stage 3 llama, rank 1": Case(stage=3, config={"low_rank": {"k": 16, "learned": True}}),
    "fixed wanda stage 3": Case(stage=3, config={**K4, "importance": "wanda", "method": "naive_retrain"}),
    "sparsegpt stage 2": Case(stage=2, config={**K4, "importance": "sparsegpt", "method": "naive_retrain"}),
    "ast stage 1": Case(stage=1, config={**K4, "method": "ast", "max_steps": 10}),
}
CASES = {name: replace(case, config={"max_steps": 6, **case.config}) for name, case in CASES.items()}


def of_branches(engine: Any) -> dict[str, Tensor]:
    """B P of every branch as the forward sees it, in the orientation of its weight, (out, in)."""
    weights = published(engine)
    module = {name: name.removesuffix("weight") for name in branches(engine.module)}
    return {n: weights[f"{m}low_rank_b"].float() @ weights[f"{m}low_rank_p"].float() for n, m in module.items()}


def scale_branches(engine: Any, forge: Any, factor: float) -> None:
    for name in branches(engine.module):
        shard = forge.sharded.layout.shards[f"{name.removesuffix('weight')}low_rank_b"]
        shard.slice_of_flat(forge.sharded.layout.flats[shard.flat].data).mul_(factor)
    republish(forge)


def learned(engine: Any) -> dict[str, Tensor]:
    return {name: value for name, value in published(engine).items() if name.endswith(BRANCH)}


def expected_part(matrix: Tensor, rank: int, case: Case, name: str, forge: Any) -> Tensor:
    """Compute the low-rank part of a complete weight as it is stored, by the iteration of `branches/decompose`."""
    weight = next(w for w in forge.weights if w.name == name)

    def removed(product: Tensor) -> Tensor:
        rest_GM = forge.pattern.to_groups((matrix - product).flatten(), weight.shape, weight.input_axis)
        gone_GM = torch.where(top_n(forge.pattern.pooled(rest_GM.square()), forge.pattern.kept_count), 0.0, rest_GM)
        return forge.pattern.from_groups(gone_GM, weight.shape, weight.input_axis).view(matrix.shape)

    right = torch.randn(matrix.shape[1], rank, generator=torch.Generator().manual_seed(0))
    target = removed(torch.zeros_like(matrix))
    for _ in range(WARM_UP):
        left = torch.linalg.qr(target @ right).Q
        right = target.T @ left
    for _ in range(ROUNDS):
        product = left @ right.T
        target = product + 2 * removed(product)
        left = torch.linalg.qr(target @ right).Q
        right = target.T @ left
    return left @ right.T


def decompose(case: Case) -> tuple[list[str], bool]:
    engine, forge = build(case)
    problems = []
    full = gathered(forge, "dense")
    batch = my_part(batch_at(0))
    before = engine(**batch).logits.detach().float()
    forge.start(probe_of(engine, case, 0))
    rounding = 1e-5 if case.dtype == "fp32" else 2e-2
    part = of_branches(engine)
    frozen = case.sparseforge.soft is None
    if not frozen:
        after = engine(**batch).logits.detach().float()
        if not torch.allclose(before, after, atol=10 * rounding):
            problems.append(f"the network computes something else, by up to {(before - after).abs().max().item()}")
    dense = gathered(forge, "dense")
    target = gathered(forge, "mask")
    for weight in forge.weights:
        name = weight.name
        stored = full[weight.name].view(weight.shape)
        as_stored = part[name] if weight.input_axis == -1 else part[name].T
        outputs = weight.numel // weight.shape[weight.input_axis]
        rank = branch_rank(outputs, weight.shape[weight.input_axis], case.sparseforge.low_rank.k, learned=True)
        expected = expected_part(stored, rank, case, name, forge)
        # 20 rounds of thresholds: a near tie may fall the other way, and a few entries differ.
        off = (as_stored - expected).norm() / expected.norm()
        if off > (1e-3 if case.dtype == "fp32" else 2e-2):
            problems.append(f"B P of {name} is not the part of the whole weight: {off}")
        if torch.linalg.matrix_rank(as_stored, rtol=1e-3) != rank:
            problems.append(f"B P of {name} has not rank {rank}")
        if case.sparseforge.importance == "sparsegpt":
            continue  # which updates the weights as well
        rest = dense[name].view(weight.shape) + as_stored
        kept_mask = target[name].view(weight.shape) != 0
        if not torch.allclose(rest[kept_mask], stored[kept_mask], atol=1e-6):
            problems.append(f"{name} gave up something else than what the branch adds")
    if not frozen:  # a second time: what the branch adds is given back first
        scale_branches(engine, forge, 0.7)
        expected = engine(**batch).logits.detach().float()
        decompose_into_branches(engine.module, forge.sharded)
        republish(forge)
        again = engine(**batch).logits.detach().float()
        if not torch.allclose(expected, again, atol=10 * rounding):
            problems.append(f"a second start changes the network, by up to {(expected - again).abs().max().item()}")
    started = learned(engine)
    for step in range(case.sparseforge.max_steps):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
    forge.finish()
    if still := [name for name, value in learned(engine).items() if torch.equal(value, started[name])]:
        problems.append(f"{still} do not train")
    weights = published(engine)
    for weight in forge.weights:
        positions = torch.tensor(groups_of(case.sparseforge.pattern, weight.shape, weight.input_axis))
        kept = (weights[weight.name].flatten()[positions] != 0).sum(1).unique().tolist()
        if kept != [forge.pattern.kept_count]:
            problems.append(f"{weight.name} is not {forge.pattern}: {kept}")
    return problems, forge.sharded.halo.any_cut


def decompose_all() -> dict[str, Any]:
    return {name: decompose(case) for name, case in CASES.items()}


def test_weights_give_up_a_low_rank_part() -> None:
    for rank in run_distributed(decompose_all, 3):
        assert {name: problems for name, (problems, _) in rank.items()} == {name: [] for name in CASES}
        assert any(cut for _, cut in rank.values())


def one_shot(low_rank: dict[str, Any] | None) -> float:
    """Return how far one-shot pruning moves the logits; weights are large in 2 directions of 24 and 40."""
    case = Case(stage=2, model="llama_24", config={"method": "naive_retrain", "low_rank": low_rank})
    model = MODELS[case.model]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in prunable_weights(model, case.sparseforge):
            value = model.get_parameter(weight.name)
            outputs, inputs = value.shape
            u, v = (torch.randn(size, 2, generator=generator) for size in (outputs, inputs))
            value.add_(value.std() * u @ v.T)
    return moved_by_pruning(case, model)


def one_shots() -> list[float]:
    return [one_shot(low_rank) for low_rank in (None, {"k": 8}, {"k": 8, "learned": True})]


def test_one_shot_pruning_loses_less_where_weights_are_large_in_a_few_directions() -> None:
    """Compare with the shift at equal numbers."""
    without, shifted, learned_p = run_distributed(one_shots, 2)[0]
    assert shifted < without and learned_p < 0.7 * shifted


def nothing_to_remove() -> list[str]:
    """Return the parts of branches that do not train, of a model that is 2:4 already."""
    case = Case(stage=2, config={**K4, "method": "naive_retrain", "importance": "magnitude", "max_steps": 4})
    model = MODELS[case.model]()
    with torch.no_grad():
        for weight in prunable_weights(model, case.sparseforge):
            value = model.get_parameter(weight.name)
            value.mul_(top_n(value.abs().view(-1, 4), 2).view(value.shape))
    before = {name: value.clone() for name, value in model.named_parameters()}
    engine, forge = build(case, model)
    forge.start(None)
    start = published(engine)
    assert all(torch.equal(start[weight.name], before[weight.name]) for weight in forge.weights)
    for step in range(4):
        train_step(engine, case, step)
        forge.step(None)
    return [name for name, value in learned(engine).items() if torch.equal(value, start[name])]


def test_a_branch_with_nothing_to_take_learns_all_the_same() -> None:
    assert run_distributed(nothing_to_remove, 2) == [[], []]
