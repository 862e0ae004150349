"""SLoRB by a shift, on real ranks: nothing changes until the mask moves, runs that shards cut included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import sparseforge_ds as sf
from sparseforge_ds.branches.branch_start import shift_into_branches
from sparseforge_ds.mask.shift import best_shift
from sparseforge_ds.model.branch import branches
from tests.distributed import run_distributed
from tests.reference import groups_of
from tests.zero.case import (
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

HARDENED = {"hardening": [0.0, 0.0]}
CASES: dict[str, Case] = {
    "stage 0 llama": Case(stage=0, config={"low_rank": {"k": 4}}),
    "stage 1 llama k=8": Case(stage=1, model="llama_24", config={"low_rank": {"k": 8}}),
    "stage 2 bf16 llama": Case(stage=2, dtype="bf16", config={"low_rank": {"k": 4}}),
    "stage 1 gpt2 k=20": Case(stage=1, model="gpt2", config={"low_rank": {"k": 20}}),
    "stage 3 gpt2": Case(stage=3, model="gpt2", config={"low_rank": {"k": 4}}),
    "stage 3 llama k=16, of 24 and 40 inputs": Case(stage=3, model="llama_24", config={"low_rank": {"k": 16}}),
    "stage 2 llama k=32, of 24 and 40 inputs": Case(stage=2, model="llama_24", config={"low_rank": {"k": 32}}),
    "stage 3 bf16 gpt2 k=12, of 20 and 80 inputs": Case(
        stage=3, dtype="bf16", model="gpt2", config={"low_rank": {"k": 12}}
    ),
    "fixed stage 1": Case(stage=1, config={"method": "naive_retrain", "low_rank": {"k": 4}}),
    "fixed wanda stage 3": Case(
        stage=3, model="gpt2", config={"importance": "wanda", "method": HARDENED, "low_rank": {"k": 4}}
    ),
    "sparsegpt stage 2": Case(
        stage=2, config={"method": "naive_retrain", "importance": "sparsegpt", "low_rank": {"k": 4}}
    ),
    "ast stage 3": Case(
        stage=3,
        config={"method": "ast", "max_steps": 10, "distillation": None, "low_rank": {"k": 4, "shift": True}},
    ),
}
CASES = {name: replace(case, config={"max_steps": 6, **case.config}) for name, case in CASES.items()}
NOT_STARTED = ("stage 0 llama", "fixed stage 1", "ast stage 3")
"""Cases that are also stepped without a start, one of each method."""


def out_in(flat: torch.Tensor, weight: Any) -> torch.Tensor:
    matrix = flat.view(weight.shape)
    return matrix if weight.input_axis == -1 else matrix.t()


def branch_of(engine: Any) -> dict[str, torch.Tensor]:
    weights = published(engine)
    return {name: weights[f"{name.removesuffix('weight')}low_rank_b"].float() for name in branches(engine.module)}


def shift(case: Case, not_started: bool) -> tuple[list[str], bool]:
    engine, forge = build(case)
    problems = []
    dense_before = gathered(forge, "dense")
    batch = my_part(batch_at(0))
    before = engine(**batch).logits.detach().float()
    # Without a start the first step refuses.
    if not_started:
        message = ""
        try:
            train_step(engine, case, 0)
            forge.step(probe_of(engine, case, 0))
        except sf.ForgeError as error:
            message = str(error)
        if "forge.start(probe)" not in message:
            problems.append(f"a first step without start: {message!r}")
        engine, forge = build(case)
        # A start that lacks its probe has moved nothing yet.
        if forge.needs_probe and forge.config.soft is None:
            message = ""
            try:
                forge.start()
            except ValueError as error:
                message = str(error)
            unmoved = all(torch.equal(dense_before[name], value) for name, value in gathered(forge, "dense").items())
            if "probe" not in message or not unmoved:
                problems.append(f"a start without its probe: {message!r}, weights as they were: {unmoved}")
    # After the start branches are on, and the network computes what it did.
    forge.start(probe_of(engine, case, 0))
    if not all(branch.enabled for branch in branches(engine.module).values()):
        problems.append("a branch is off")
    rounding = 1e-6 if case.dtype == "fp32" else 2e-2
    frozen = case.sparseforge.soft is None
    if not frozen:
        after = engine(**batch).logits.detach().float()
        if not torch.allclose(before, after, atol=10 * rounding):
            problems.append(f"the network computes something else, by up to {(before - after).abs().max().item()}")
    # B is the best shift of every run, and W gave up what B adds.
    dense = gathered(forge, "dense")
    b = branch_of(engine)
    pattern = forge.pattern
    target = gathered(forge, "mask")  # of a fixed mask nothing is left where it pruned
    for weight in forge.weights:
        name = weight.name
        k = case.sparseforge.low_rank.k
        was = out_in(dense_before[name], weight)
        expected = torch.stack(
            [best_shift(run, pattern.kept_count, pattern.members) for run in was.split(k, dim=1)], dim=1
        )
        if not torch.allclose(b[name], expected, atol=rounding / 4, rtol=1e-2 if case.dtype == "bf16" else 1e-5):
            problems.append(f"B of {name} is not the best shift")
        if not b[name].any():
            problems.append(f"B of {name} is 0")
        if case.sparseforge.importance == "sparsegpt":
            continue  # which updates the shifted weights as well
        rest = out_in(dense[name], weight) + b[name].repeat_interleave(k, 1)[:, : was.shape[1]]
        kept_mask = out_in(target[name], weight) != 0
        if not torch.allclose(rest[kept_mask], was[kept_mask], atol=1e-6):
            problems.append(f"{name} gave up something else than what B adds")
    # Shifting again moves all of B once more, which the network does not notice.
    if not frozen:  # nothing happens that the network would notice, whatever B held before
        for name in branches(engine.module):
            shard = forge.sharded.layout.shards[f"{name.removesuffix('weight')}low_rank_b"]
            shard.slice_of_flat(forge.sharded.layout.flats[shard.flat].data).mul_(0.7)
        republish(forge)
        expected = engine(**batch).logits.detach().float()
        shift_into_branches(engine.module, forge.sharded)
        republish(forge)
        again = engine(**batch).logits.detach().float()
        if not torch.allclose(expected, again, atol=10 * rounding):
            problems.append("a second shift changes the network")
    # Train to the end: every weight is 2:4, and B has moved.
    for step in range(case.sparseforge.max_steps):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
    forge.finish()
    weights = published(engine)
    for weight in forge.weights:
        positions = torch.tensor(groups_of(case.sparseforge.pattern, weight.shape, weight.input_axis))
        if (weights[weight.name].flatten()[positions] != 0).sum(1).unique().tolist() != [2]:
            problems.append(f"{weight.name} is not 2:4")
    if all(torch.equal(value, b[name]) for name, value in branch_of(engine).items()):
        problems.append("no B trains")
    return problems, forge.sharded.halo.any_cut


def shift_all() -> dict[str, Any]:
    return {name: shift(case, name in NOT_STARTED) for name, case in CASES.items()}


def test_weights_are_shifted_into_the_branches() -> None:
    for rank in run_distributed(shift_all, 3):
        assert {name: problems for name, (problems, _) in rank.items()} == {name: [] for name in CASES}
        assert any(cut for _, cut in rank.values())


def one_shot(low_rank: dict[str, Any] | None) -> float:
    """Return how far one-shot pruning moves the logits of a model with weights as they come."""
    case = Case(stage=2, model="llama_24", config={"method": "naive_retrain", "low_rank": low_rank})
    return moved_by_pruning(case)


def with_long_runs() -> list[tuple[float, float]]:
    """Return the same with one run of all 40 or 24 inputs of a layer, and with k far above that."""
    published_start = {"shift": False}
    return [tuple(one_shot({"k": k, **more}) for k in (40, 4 * 10**12)) for more in ({}, published_start)]


def test_a_k_above_the_inputs_of_a_layer_is_one_run_of_all_of_them() -> None:
    """It takes no memory for inputs that are not there, in a start and in the forward."""
    for inputs, far_above in run_distributed(with_long_runs, 2)[0]:
        assert far_above == pytest.approx(inputs, rel=1e-5)


def one_shots() -> list[float]:
    return [one_shot(low_rank) for low_rank in (None, {"k": 8, "shift": False}, {"k": 8}, {"k": 4})]


def test_one_shot_pruning_loses_less_the_better_the_start() -> None:
    """Squares at the logits; of the weights, the docstring of `mask/shift` has 1, 0.87, 0.43 and 0.10."""
    without, published_start, shifted, shifted_4 = run_distributed(one_shots, 2)[0]
    assert shifted_4 < 0.2 * without and shifted < 0.6 * without and published_start > 1.3 * shifted
