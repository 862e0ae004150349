"""The forge on real DeepSpeed engines against the paper as literal loops (tests/reference.py).

Two layers. In fp32 the whole trajectory is compared: masks, latent weights, curvature, published weights. In bf16 a
trajectory forks on rounding, so there every mask update is repeated by the reference from the forge's own weights and
curvature, which must give the same mask to fp32 rounding, and the trajectory is compared loosely.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseforge_ds.model.families import prunable_weights
from tests.distributed import run_distributed
from tests.reference import ReferenceForge, groups_of, harden, kept_of, scored_curvature, updated_mask
from tests.zero.case import MODELS, Case, batch_at, run_all

# Bounds of what fp32 reduction order does to 8 steps of Adam at lr 3e-3 (1e-6 is typical, both for weights and masks).
FP32_WEIGHT, FP32_MASK, FP32_CURVATURE = 2e-5, 2e-5, 1e-4
# bf16 gradients have 8 bits, and Adam's first steps depend on their signs alone: a step of lr may go the other way.
BF16_MEAN_WEIGHT, BF16_MEAN_MASK, BF16_SAME_TARGET = 2e-3, 3e-2, 0.9

EXCLUDE_K = {"exclude": ["*.k_proj.weight"]}
BY_WEIGHTS = {"per_token": False}
TRAINING = {"curvature": {"source": "training"}}
ODD = {"exclude": ["*.down_proj.weight", "*.up_proj.weight", "*.k_proj.weight"]}

FP32: dict[str, Case] = {
    "2:4": Case(),
    "2:4-ragged": Case(config=EXCLUDE_K),
    "2:4-training": Case(config={**TRAINING, **EXCLUDE_K}, gas=2),
    "2:4-training-odd": Case(model="llama_odd", config={**TRAINING, **ODD}),
    "conv1d-training": Case(model="gpt2", config=TRAINING, clip=0.1),
    "2:4-training-3-of-5-and-2": Case(
        config={"curvature": {"source": "training", "first_probes": 3, "probes": 2}, "max_steps": 20}
        | {"method": {"update_every": 5}, **EXCLUDE_K},
        gas=2,
        steps=16,
    ),
    "2:4-gas": Case(config=EXCLUDE_K, gas=2),
    "2:4-odd": Case(model="llama_odd", config=ODD),
    "1:4-passes": Case(config={"pattern": "1:4", "curvature": {"source": "probe"}, **EXCLUDE_K}),
    "4:8-magnitude-nth": Case(
        model="llama_24", config={"pattern": "4:8", "importance": "magnitude", "method": {"threshold": "nth"}}
    ),
    "4:8-pairs": Case(model="llama_24", config={"pattern": "4:8 pairs", **TRAINING}),
    "4:8-pairs-conv1d": Case(
        model="gpt2", config={"pattern": "2:4 pairs", "importance": "wanda", "curvature": {"source": "probe"}}
    ),
    "block16": Case(model="llama_tiles", config={"pattern": "block16"}),
    "conv1d": Case(model="gpt2"),
    "conv1d-wanda-gas-clip": Case(model="gpt2", config={"importance": "wanda"}, gas=2, clip=0.1),
    "2:4-hardening-from-0": Case(config={"method": {"hardening": [0.0, 0.6], "update_every": 3}, **EXCLUDE_K}),
    "2:4-hard": Case(config={"method": {"hard": True}, **EXCLUDE_K}),
    "2:4-fixed": Case(config={"method": {"hardening": [0.0, 0.0]}, **EXCLUDE_K}, steps=4),
    # A large radius and damping, the same on both sides: the smaller they are, the more of the difference is fp32
    # rounding, which decides where curvature is near 0. The second update comes while x falls.
    "2:4-hutchinson": Case(
        config={"importance": "hutchinson", "curvature": {**BY_WEIGHTS, "radius": 0.1, "damping": 0.05}, **EXCLUDE_K},
        steps=5,
    ),
    # The same at the outputs, whose steps are as large by default, and where fp32 rounding decides about negative sums.
    "2:4-outputs": Case(model="llama_odd", config={"importance": "hutchinson", "curvature": {"damping": 0.05}, **ODD}),
    "conv1d-outputs-gas": Case(
        model="gpt2", config={"importance": "hutchinson", "curvature": {"damping": 0.05}}, gas=2, steps=5
    ),
    "2:4-fisher-elements": Case(model="llama_odd", config={"curvature": {"factored": False}, **ODD}),
    "2:4-straight-through": Case(config={"method": {"straight_through": True}, **EXCLUDE_K}),
    "2:4-clipped": Case(config=EXCLUDE_K, clip=0.1),
    "conv1d-straight-through": Case(model="gpt2", config={"method": {"straight_through": True}}, gas=2),
}
BF16: dict[str, Case] = {
    "2:4": Case(dtype="bf16", config=EXCLUDE_K),
    "conv1d-hutchinson-gas-clip": Case(
        dtype="bf16", model="gpt2", config={"importance": "hutchinson", "curvature": BY_WEIGHTS}, gas=2, clip=0.1
    ),
    "block16-outputs": Case(
        dtype="bf16", model="llama_tiles", config={"pattern": "block16", "importance": "hutchinson"}
    ),
    "block16": Case(dtype="bf16", model="llama_tiles", config={"pattern": "block16"}),
}

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
NO_CPU_ADAM = {"zero_force_ds_cpu_optimizer": False}
# Settings that change where tensors live or who steps them, and none of which may change a number.
SETTINGS: dict[str, Case] = {
    "client-optimizer-0": Case(stage=0, client=True),
    "client-optimizer-3": Case(stage=3, client=True),
    "offload-2": Case(stage=2, zero=OFFLOAD, more=NO_CPU_ADAM),
    "offload-3": Case(stage=3, zero={**OFFLOAD, "offload_param": {"device": "cpu"}}, more=NO_CPU_ADAM),
    "client-offload-2": Case(stage=2, zero=OFFLOAD, client=True),
    "small-sub-groups": Case(stage=3, zero={"sub_group_size": 300}),
    "nothing-persistent": Case(stage=3, zero={"stage3_param_persistence_threshold": 0}),
    "all-persistent": Case(stage=3, zero={"stage3_param_persistence_threshold": 10**6}),
    "second-partition": Case(stage=3, zero={"zero_hpz_partition_size": 2}),  # hpZ of ZeRO++
    "round-robin": Case(stage=2, zero={"round_robin_gradients": True}),
    "all-reduce": Case(stage=2, zero={"reduce_scatter": False, "overlap_comm": True}),
}

# An epsilon far above gradients that are rounding noise, of which Adam would make whole steps: processors differ in it.
FP32, BF16, SETTINGS = ({n: replace(case, eps=1e-6) for n, case in cases.items()} for cases in (FP32, BF16, SETTINGS))


def reference_of(case: Case, step_at_init: bool = False) -> dict[str, Any]:
    """Return the same run in one process; a micro-batch is one part, as the mean over ranks is the mean over rows."""
    # The same model, in the dtype of the passes.
    model = MODELS[case.model]()
    input_axes = {weight.name: weight.input_axis for weight in prunable_weights(model, case.sparseforge)}
    model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype])
    reference = ReferenceForge(
        model,
        input_axes,
        case.sparseforge.to_dict(),
        lr=case.lr,
        eps=case.eps,
        weight_decay=case.weight_decay,
        clip=case.clip,
        step_at_init=step_at_init,
    )
    reference.start([batch_at(i) for i in range(case.gas)])
    # Every update with all that decides it, and the end.
    record: dict[str, Any] = {"losses": [], "updates": []}
    for step in range(case.steps):
        micro = [batch_at(step * case.gas + i) for i in range(case.gas)]
        record["losses"].append(reference.train_step(micro))
        if reference.forge_step(micro):
            update = {
                "step": step + 1,
                "mask": {name: torch.tensor(mask) for name, mask in reference.mask.items()},
                "dense": {name: reference.master[name].detach().flatten().clone() for name in reference.mask},
                "target": {name: torch.tensor(target) for name, target in reference.target.items()},
                "curvature": {name: as_kept(reference, name) for name in reference.curvature},
            }
            record["updates"].append(update)
    record["mask"] = {name: torch.tensor(mask) for name, mask in reference.mask.items()}
    record["dense"] = {name: reference.master[name].detach().flatten() for name in reference.mask}
    record["published"] = {name: value.detach() for name, value in reference.model.named_parameters()}
    return record


def as_kept(reference: ReferenceForge, name: str) -> Tensor:
    """Return the curvature of a weight as the forge keeps it: elements, or the product of row and column sums."""
    part = reference.config["curvature"]
    if not part["per_token"] or part["factored"] is False or reference.config["importance"] == "magnitude":
        return reference.curvature[name].clone()
    return torch.tensor(reference.score_takes(name), dtype=torch.float64)


_references: dict[str, dict[str, Any]] = {}


def cached_reference(key: str, case: Case) -> dict[str, Any]:
    if key not in _references:
        _references[key] = reference_of(case)
    return _references[key]


def farthest(left: dict[str, Tensor], right: dict[str, Tensor], relative: bool = False) -> float:
    assert left.keys() == right.keys()
    return max(
        ((a.double() - b.double()).abs().max() / (b.abs().max() if relative else 1.0)).item()
        for a, b in ((left[name], right[name]) for name in left)
    )


def assert_same_trajectory(record: dict[str, Any], expected: dict[str, Any], case: Case, where: str) -> None:
    assert record["losses"] == pytest.approx(expected["losses"], rel=1e-5), where
    assert [u["step"] for u in record["updates"]] == [u["step"] for u in expected["updates"]], where
    for actual, reference in zip(record["updates"], expected["updates"], strict=True):
        at = f"{where}, step {actual['step']}"
        if "curvature" in actual:
            scale = {
                name: ratio(actual["curvature"][name], reference["curvature"][name]) for name in actual["curvature"]
            }
            assert all(abs(s - 1) < FP32_CURVATURE for s in scale.values()), (at, scale)
            assert farthest(actual["curvature"], reference["curvature"], relative=True) < FP32_CURVATURE, at
        assert farthest(actual["dense"], reference["dense"]) < FP32_WEIGHT, at
        assert farthest(actual["mask"], reference["mask"]) < FP32_MASK, at
    assert farthest(record["mask"], expected["mask"]) < FP32_MASK, where
    assert farthest(record["dense"], expected["dense"]) < FP32_WEIGHT, where
    # The keys' bias moves every score of a row alike, so its gradient is rounding noise, which Adam makes a full step.
    published_weights = [
        {n: v for n, v in r["published"].items() if "c_attn.bias" not in n} for r in (record, expected)
    ]
    assert farthest(*published_weights) < max(FP32_WEIGHT, FP32_MASK), where


def ratio(actual: Tensor, reference: Tensor) -> float:
    """Least-squares factor between two tensors: a wrong constant shows here."""
    return (actual.double() @ reference.double() / reference.double().square().sum()).item()


def assert_updates_repeat(record: dict[str, Any], case: Case, where: str) -> None:
    """Repeat each mask update by the reference, from the forge's own weights, curvature and mask before."""
    from tests.reference import dials_at

    block = case.sparseforge.to_dict()
    weights = prunable_weights(MODELS[case.model](), case.sparseforge)
    before = {weight.name: [1.0] * weight.numel for weight in weights}
    for update in record["updates"]:
        # The dials of the literal schedule, not ours.
        dials = dials_at(update["step"], block["method"], block["max_steps"])
        for weight in weights:
            groups = groups_of(block["pattern"], weight.shape, weight.input_axis)
            if update["step"] == dials["freeze"]:
                expected = harden(before[weight.name], groups, kept_of(block["pattern"]))
            else:
                curvature = update["curvature"][weight.name].tolist()
                if not case.sparseforge.keeps_sums:  # else it is the product already
                    curvature = scored_curvature(curvature, weight.shape, block)
                expected, _ = updated_mask(
                    before[weight.name],
                    update["dense"][weight.name].tolist(),
                    curvature,
                    groups,
                    kept_of(block["pattern"]),
                    dials,
                    block["method"]["threshold"],
                    block["curvature"]["damping"],
                    block["pattern"].endswith("pairs"),
                )
            # A stored mask is rounded; the next update starts from what is stored.
            worst = (update["mask"][weight.name] - torch.tensor(expected)).abs().max().item()
            rounding = 0.5 / 65535  # of a mask in fixed point
            assert worst < 2e-6 + rounding, (where, update["step"], weight.name, worst)
            before[weight.name] = update["mask"][weight.name].tolist()


def assert_published_from_states(record: dict[str, Any], case: Case, where: str) -> None:
    """After the freeze: what the network sees is the rounded product of the states, to the last bit."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    for name, mask in record["mask"].items():
        assert set(mask.unique().tolist()) == {0.0, 1.0}, where
        expected = (mask * record["dense"][name] + 0.0).to(dtype)
        assert torch.equal(record["published"][name].flatten(), expected), (where, name)


EVERYWHERE = ("2:4-ragged", "2:4-odd", "4:8-pairs-conv1d", "block16", "conv1d", "2:4-clipped")
"""On every stage where ranks can cut groups: all six on two ranks, 2 and 3 on three (stage 1: test_invariance). The
others at ZeRO-3 on three ranks, and at another stage on two; every third one on one rank, all stages in turn."""


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fp32_is_the_reference(world_size: int) -> None:
    names = []
    for i, name in enumerate(FP32):
        own_stages = {1: [] if i % 3 else [i % 4], 2: [i % 3], 3: [3]}[world_size]
        all_stages = {1: own_stages, 2: [0, 1, 2, 3], 3: [2, 3]}[world_size]
        names += [(name, stage) for stage in (all_stages if name in EVERYWHERE else own_stages)]
    records = run_distributed(run_all, world_size, [replace(FP32[name], stage=stage) for name, stage in names])[0]
    for (name, stage), record in zip(names, records, strict=True):
        where = f"{name}, stage {stage}, world {world_size}"
        assert_same_trajectory(record, cached_reference(name, FP32[name]), FP32[name], where)
        if FP32[name].steps == 8:
            assert_published_from_states(record, FP32[name], where)
    cut = {(name, stage) for (name, stage), record in zip(names, records, strict=True) if record["cut"]}
    if world_size == 2:
        assert {("2:4-odd", 1), ("2:4-odd", 2), ("2:4-odd", 3), ("block16", 2), ("conv1d", 2)} <= cut
    if world_size == 3:
        assert {("2:4-ragged", 2), ("2:4-ragged", 3), ("block16", 3), ("conv1d", 3)} <= cut


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bf16_is_the_reference_up_to_rounding(world_size: int) -> None:
    stages = {1: [1], 2: [0, 2, 3], 3: [3]}[world_size]
    names = [(name, stage) for name in BF16 for stage in stages]
    records = run_distributed(run_all, world_size, [replace(BF16[name], stage=stage) for name, stage in names])[0]
    for (name, stage), record in zip(names, records, strict=True):
        case = BF16[name]
        where = f"{name}, stage {stage}, world {world_size}"
        assert_updates_repeat(record, case, where)
        assert_published_from_states(record, case, where)
        # DeepSpeed's 16-bit stage-0 constructor steps the optimizer once before the first batch.
        key = f"bf16 {name} {stage == 0}"
        if key not in _references:
            _references[key] = reference_of(case, step_at_init=stage == 0)
        expected = _references[key]
        actual, reference = record["updates"][0], expected["updates"][0]
        for kind, bound in (("dense", BF16_MEAN_WEIGHT), ("mask", BF16_MEAN_MASK)):
            apart = [(actual[kind][n] - value).abs().mean() for n, value in reference[kind].items()]
            assert torch.stack(apart).mean().item() < bound, (where, kind)
        same = [((actual["mask"][n] > 0.8) == (value > 0.8)).float().mean() for n, value in reference["mask"].items()]
        if case.sparseforge.importance != "hutchinson":
            assert torch.stack(same).mean().item() > BF16_SAME_TARGET, where


def test_settings_that_change_no_number() -> None:
    records = run_distributed(run_all, 2, list(SETTINGS.values()))[0]
    for (name, case), record in zip(SETTINGS.items(), records, strict=True):
        assert_same_trajectory(record, cached_reference("2:4", FP32["2:4"]), case, name)


def test_updates_repeat_for_every_importance() -> None:
    cases = [
        Case(stage=stage, config={"importance": importance, **EXCLUDE_K})
        for stage, importance in ((1, "hutchinson"), (3, "fisher"), (0, "wanda"))
    ]
    for case, record in zip(cases, run_distributed(run_all, 2, cases)[0], strict=True):
        assert_updates_repeat(record, case, case.sparseforge.importance)
