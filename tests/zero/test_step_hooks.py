"""The norm that DeepSpeed clips by, and logs, is that of the weights that are left, once masks are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparseforge_ds.zero.deepspeed_layouts import accurate_norm
from sparseforge_ds.zero.shard import Shard
from tests.distributed import run_distributed
from tests.sparse_folders import bits
from tests.zero.case import MODELS, Case, batch_at, build, gathered, probe_of, published, train_step
from tests.zero.test_resume import BF16_MASTERS

FIXED = {"method": "naive_retrain"}
LATER = {"low_rank": {"k": 4, "shift": False, "start": 1.0}}
"""W is kept beyond frozen masks until the last step, for branches to start from."""
OFFLOAD = {
    "zero": {"offload_optimizer": {"device": "cpu"}},
    "more": {"zero_force_ds_cpu_optimizer": False},
}
CLIP = 0.05
"""Far below every norm."""
CASES: dict[str, Case] = {
    **{f"{stage}-fp32": Case(stage=stage, clip=CLIP, config=FIXED) for stage in range(4)},
    **{f"{stage}-bf16": Case(stage=stage, clip=CLIP, dtype="bf16", config=FIXED) for stage in range(4)},
    **{f"{stage}-offload": Case(stage=stage, clip=CLIP, config=FIXED, **OFFLOAD) for stage in (1, 2, 3)},
    "1-fp32-sums": Case(
        stage=1, clip=CLIP, dtype="bf16", config=FIXED, more={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "2-bf16-masters": Case(stage=2, clip=CLIP, dtype="bf16", config=FIXED, more=BF16_MASTERS),
    "0-fp16": Case(stage=0, clip=CLIP, dtype="fp16", config=FIXED),
    # A kept weight of code 0 trains.
    "0-bf16-quantized": Case(stage=0, clip=CLIP, dtype="bf16", config={**FIXED, "quantize": {"group_size": None}}),
    "3-quantized": Case(stage=3, clip=CLIP, config={**FIXED, "quantize": {"group_size": 2}}),
    "3-fp16": Case(stage=3, clip=CLIP, dtype="fp16", config=FIXED, more={"fp16": {"loss_scale": 16}}),
    "3-accumulated": Case(stage=3, clip=CLIP, gas=2, config=FIXED),
    "3-mixture": Case(stage=3, clip=CLIP, model="qwen3_moe", config={**FIXED, "importance": "magnitude"}),
    "2-default": Case(stage=2, clip=CLIP),
    "3-default-later": Case(stage=3, clip=CLIP, config=LATER),
    "1-later": Case(stage=1, clip=CLIP, config={**FIXED, **LATER}),
    "2-later-bf16-masters": Case(stage=2, clip=CLIP, dtype="bf16", config={**FIXED, **LATER}, more=BF16_MASTERS),
}


def expected_norm(weights: dict[str, Tensor], masks: dict[str, Tensor] | None, case: Case, step: int) -> float:
    """Return the norm of the mean gradient of all micro-batches over kept weights, by one process in fp32."""
    model = MODELS[case.model]()
    model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    for micro in range(case.gas):
        (model(**batch_at(step * case.gas + micro)).loss / case.gas).backward()
    squares = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mask = None if masks is None else masks.get(name)
        kept = parameter.grad if mask is None else parameter.grad * mask.view(parameter.shape)
        squares += kept.double().square().sum().item()
    return squares**0.5


def zero_one_kept_weight(forge: Any) -> list[tuple[Shard, int]]:
    """Write 0 to a kept weight of each shard of this rank, and return where."""
    at_zero = []
    for shard in forge.sharded.shards.values():
        if len(kept := forge.sharded.state.mask(shard).nonzero()):
            element = int(kept[0])
            forge.sharded.dense(shard)[element] = 0.0
            shard.slice_of_flat(forge.sharded.layout.flats[shard.flat].data)[element] = 0.0
            at_zero.append((shard, element))
    forge.sharded.layout.push()
    return at_zero


def norms(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Return the logged norm of each case's last step, that of its gradients, and what both must be."""
    results = {}
    for name, case in cases.items():
        engine, forge = build(case)
        forge.start(probe_of(engine, case, 0))
        records: list[float] = []

        # The gradients as the optimizer gets them.
        def note_squares(optimizer: Any, args: Any, kwargs: Any, records: list[float] = records) -> None:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            records.extend(grad.double().square().sum().item() for grad in grads)

        engine.basic_optimizer.register_step_pre_hook(note_squares)
        last_step = 8 if "default" in name else 2
        for step in range(last_step):
            train_step(engine, case, step)
            forge.step(probe_of(engine, case, step))
        assert forge.sharded.state.released == ("later" not in name)
        # One more step, with a kept weight that is exactly 0.
        at_zero = zero_one_kept_weight(forge)
        weights = published(engine)
        masks = gathered(forge, "mask")
        dense = gathered(forge, "dense")
        records.clear()
        train_step(engine, case, last_step)
        squares = torch.tensor(sum(records), dtype=torch.float64)
        if case.stage or case.more.get("data_types"):
            dist.all_reduce(squares)
        # The norm that is logged, that of the gradients, and those by hand with and without masks.
        results[name] = {
            "logged": engine.get_global_grad_norm(),
            "stepped": squares.item() ** 0.5,
            "kept": expected_norm(weights, masks, case, last_step),
            "all": expected_norm(weights, None, case, last_step),
        }
        # The kept weight moves away from 0; pruned ones do not move.
        forge.step(probe_of(engine, case, last_step))
        moved = gathered(forge, "dense")
        results[name]["stuck"] = [shard.name for shard, element in at_zero if not forge.sharded.dense(shard)[element]]
        results[name]["pruned moved"] = [n for n in dense if ((moved[n] != dense[n]) & (masks[n] == 0)).any()]
    return results


def test_only_kept_weights_count_in_the_norm() -> None:
    for rank in run_distributed(norms, 2, CASES):
        for name, result in rank.items():
            rough = 2e-2 if CASES[name].dtype != "fp32" else 1e-4
            assert result["pruned moved"] == [] and result["stuck"] == [], (name, result)
            assert result["all"] > 1.05 * result["kept"] > 10 * CLIP, (name, result)
            if name != "0-fp32":  # where DeepSpeed logs none
                assert float(result["logged"]) == pytest.approx(result["kept"], rel=rough), (name, result)
            assert result["stepped"] == pytest.approx(CLIP, rel=max(rough, 1e-3)), (name, result)


def stepped_gradients(engine: Any, case: Case, step: int) -> list[Any]:
    """Return what the inner optimizer is given in a step, which changes nothing."""
    inner = engine.basic_optimizer
    grads: list[Any] = []
    with mock.patch.object(
        inner, "step", lambda: grads.extend(p.grad for g in inner.param_groups for p in g["params"])
    ):
        train_step(engine, case, step)
    return grads


def gathers(case: Case, folder: str) -> dict[str, Any]:
    """Return the gathers of each step, and the pruned weights that had a gradient after another run was loaded."""
    results: dict[str, Any] = {}
    for name in ("saved", "loaded"):
        engine, forge = build(case)
        layout = forge.sharded.layout
        if name == "loaded":  # masks of other weights
            for flat in layout.flats:
                flat.data.copy_(flat.flip(0))
            layout.push()
        forge.start(probe_of(engine, case, 0))
        # Count the gathers of three steps.
        results[name] = []
        with mock.patch.object(layout, "all_gather", wraps=layout.all_gather) as gather:
            for step in range(3):
                gather.reset_mock()
                train_step(engine, case, step)
                results[name].append(gather.call_count)
                forge.step(probe_of(engine, case, step))
        if name == "saved":
            engine.save_checkpoint(folder, tag="end")
            continue
        # Load the other run's masks: gradients are masked by these from the next step on.
        results["differ"] = [gathered(forge, "mask")]
        engine.load_checkpoint(folder, tag="end")
        results["differ"].append(gathered(forge, "mask"))
        weights = published(engine)
        grads = stepped_gradients(engine, case, 3)
        results["unmasked"] = [
            shard.name
            for shard in forge.sharded.shards.values()
            if (shard.slice_of_flat(grads[shard.flat])[forge.sharded.state.mask(shard) == 0]).count_nonzero()
        ]
        results["norm"] = float(engine.get_global_grad_norm())
        results["kept"] = expected_norm(weights, results["differ"][1], case, 3)
    return results


def test_bits_of_frozen_masks_are_gathered_once_and_again_after_a_load(tmp_path: Path) -> None:
    for result in run_distributed(gathers, 2, CASES["1-fp32-sums"], str(tmp_path)):
        assert result["saved"] == result["loaded"] == [1, 0, 0]
        own, loaded = result["differ"]
        assert any(not torch.equal(own[name], loaded[name]) for name in own)
        assert result["unmasked"] == [] and result["norm"] == pytest.approx(result["kept"], rel=2e-2)


# 20 x 27 and 27 x 20 begin at elements of a partition that are no multiple of 8, and cut groups.
ODD = {**FIXED, "exclude": ["*down_proj*"]}
BOTH_WAYS: dict[str, Case] = {
    "0": Case(stage=0, clip=CLIP, dtype="bf16", config=FIXED),
    "1": Case(stage=1, clip=CLIP, model="llama_deep", config=ODD),
    **{
        f"{stage}-offload": Case(stage=stage, clip=CLIP, model="llama_deep", gas=2, config=ODD, **OFFLOAD)
        for stage in (1, 2, 3)
    },
    "1-fp32-sums": Case(
        stage=1, clip=CLIP, dtype="bf16", gas=2, config=ODD, more={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "2": Case(stage=2, clip=CLIP, model="llama_deep", dtype="bf16", gas=2, config=ODD),
    "2-fp32-sums": Case(
        stage=2, clip=CLIP, dtype="bf16", gas=2, config=FIXED, more={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "3": Case(stage=3, clip=CLIP, model="llama_deep", dtype="bf16", gas=2, config=ODD),
    "1-later": Case(stage=1, clip=CLIP, config={**FIXED, **LATER}),
    "0-unclipped": Case(stage=0, config=FIXED),
}


def both_ways(cases: dict[str, Case]) -> dict[str, list[list[Any]]]:
    """Return losses and norms, published weights and W of each case, as it is and with a hook on every weight."""
    results = {}
    for name, case in cases.items():
        results[name] = []
        for is_hooked in (False, True):
            engine, forge = build(case)
            forge.start(probe_of(engine, case, 0))
            masks = gathered(forge, "mask") if is_hooked else {}
            for weight, parameter in engine.module.named_parameters():
                if weight in masks:
                    pruned = masks[weight] == 0
                    parameter.register_hook(lambda grad, p=pruned: grad.masked_fill(p.view(grad.shape), 0.0))
            numbers: list[Any] = []
            for step in range(3):
                numbers.append(train_step(engine, case, step))
                norm = engine.get_global_grad_norm()
                numbers.append(None if norm is None or not case.clip else float(norm))
                forge.step(probe_of(engine, case, step))
            results[name].append([numbers, published(engine), gathered(forge, "dense")])
    return results


def test_the_same_bits_as_with_gradients_that_are_masked_as_they_arise() -> None:
    for rank in run_distributed(both_ways, 2, BOTH_WAYS):
        for name, ((numbers, *weights), (expected_numbers, *expected_weights)) in rank.items():
            assert numbers == expected_numbers and len(numbers) == 6, name
            for values, expected in zip(weights, expected_weights, strict=True):
                assert values.keys() == expected.keys()
                assert all(torch.equal(bits(values[key]), bits(expected[key])) for key in values), name


def test_the_norm_of_many_values_on_a_processor_is_right() -> None:
    """Take 2^26 values: `vector_norm` adds one square after the other in fp32, which is 0.5% too small."""
    values = torch.full((2**22,), 1e-3).repeat(16)
    expected = 1e-3 * 2**13
    assert accurate_norm(values).item() == pytest.approx(expected, rel=1e-6)
    assert accurate_norm(values[:0]).item() == 0
