"""Memory by kind against DeepSpeed's own estimators where they speak of the same thing, and against arithmetic."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.planner.activation_memory import Activations
from sparseforge_ds.extras.planner.dry_run import check_estimable
from sparseforge_ds.extras.planner.memory import Memory, memory
from sparseforge_ds.mask.kernels.fisher import EXPERT_BYTES
from sparseforge_ds.model.architecture import Architecture, architecture_of, empty_model
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.train.lasting_memory import checkpoint_bytes, lasting, model_states
from sparseforge_ds.train.memory_settings import MemorySettings, settings
from tests.unit.extras.planner.hub_configs import deepseek_moe_16b, gpt2_xl, llama2_7b, qwen3_14b

# Without curvature, teacher, bucket or read-ahead: what is left is DeepSpeed's, but for `dense`, `mask` and flip bits.
PLAIN = {"importance": "magnitude", "distillation": None}
OURS = ("dense", "mask", "curvature", "kept bits", "flip bits")
NOTHING = Activations(saved=0, logits=0, loss=0, backward=0)


def planned(
    stage: int,
    ranks: int,
    block: dict[str, Any] = PLAIN,
    config: Any = llama2_7b,
    optimizer: dict[str, Any] | None = None,
    **zero: Any,
) -> Any:
    forge = SparseForgeConfig.from_dict(block)
    content = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 10**12,
            **zero,
        },
    }
    laid_out = settings(content, forge, ranks=ranks, seq_length=128, checkpointing=False)
    model = empty_model(config(), forge, torch.bfloat16)
    return architecture_of(model, prunable_weights(model, forge)), laid_out


def total(model: Architecture, laid_out: MemorySettings, phase: str) -> int:
    """Bytes of a GPU in a phase, without what is ours."""
    planned: Memory = memory(model, laid_out, lambda *_: NOTHING)
    resident = sum(size for name, size in planned.resident.items() if name not in OURS)
    passing = {name: size for name, size in planned.phases[phase].items() if name != "mask's temporaries"}
    return resident + sum(passing.values())


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("config", [llama2_7b, qwen3_14b, gpt2_xl])
def test_zero2_takes_what_deepspeed_estimates(config: Any, ranks: int) -> None:
    """2 + 18 / N bytes a parameter: DeepSpeed counts fp32 gradients of all groups, and steps one group at a time."""
    model, laid_out = planned(2, ranks, config=config)
    _, reference = estimate_zero2_model_states_mem_needs(model.total, ranks, 1, cpu_offload=False)
    assert total(model, laid_out, "optimizer step") == pytest.approx(reference, rel=0.1)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("config", [llama2_7b, qwen3_14b, gpt2_xl])
def test_zero3_takes_what_deepspeed_estimates(config: Any, ranks: int) -> None:
    """18 / N bytes a parameter, and 4 for those of the largest layer, which are not there in the same phase.

    At stage 2 the same estimate is 2 + 18 / N: at stage 3 it leaves out the 16-bit weights, divided though they are.
    """
    model, laid_out = planned(3, ranks, config=config)
    _, reference, largest = estimate_zero3_model_states_mem_needs(
        model.total, model.largest_module, ranks, 1, cpu_offload=False, cpu_offload_params=False
    )
    weights = 2 * model.total / ranks
    assert total(model, laid_out, "optimizer step") == pytest.approx(reference - largest + weights, rel=0.1)
    passes = memory(model, laid_out, lambda *_: NOTHING).phases["forward and backward"]
    assert passes["gathered weights"] + passes["gathering"] == pytest.approx(largest, rel=0.1)


def test_offload_takes_what_deepspeed_estimates() -> None:
    model, laid_out = planned(3, 8, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    host, reference, _ = estimate_zero3_model_states_mem_needs(
        model.total, model.largest_module, 8, 1, additional_buffer_factor=1.0
    )
    assert total(model, laid_out, "forward and backward") == pytest.approx(reference, rel=0.1)
    results = memory(model, laid_out, lambda *_: NOTHING)
    ours = sum(size for name, size in results.host.items() if name in OURS)
    sixteen_bit_gradients = results.host["gradients"]  # which they leave out
    assert results.host_total - ours - sixteen_bit_gradients == pytest.approx(host / 8, rel=0.1)  # they: the whole node


def test_the_price_of_ours_is_6_bytes_and_two_bits_and_then_one_bit() -> None:
    model, laid_out = planned(3, 8, {"curvature": {"factored": False}})
    elements = model_states(model, laid_out)
    assert sum(elements[name] for name in OURS) == pytest.approx(10.25 * model.masked / 8, rel=1e-3)
    model, laid_out = planned(3, 8, {"importance": "fisher"})
    states = model_states(model, laid_out)
    assert sum(states[name] for name in OURS) == pytest.approx(6.25 * model.masked / 8, rel=1e-3)
    for item in (laid_out, planned(3, 8, {"method": "naive_retrain"})[1]):
        frozen = model_states(model, item, frozen=True)
        assert sum(frozen[name] for name in OURS) == math.ceil(model.masked / 8 / 8)
    assert 0 < states["curvature sums"] == 4 * model.rows_and_columns / 8 < 1e-3 * states["mask"]
    assert states["weights"] + states["master"] + states["moments"] == pytest.approx(14 * model.total / 8, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_divides_its_states_by_the_ranks(stage: int) -> None:
    first, eight = (model_states(*planned(stage, ranks)) for ranks in (1, 8))
    for name, since in {"weights": 3, "master": 1, "moments": 1, "dense": 1, "mask": 1, "flip bits": 1}.items():
        assert first[name] / eight[name] == pytest.approx(8 if stage >= since else 1, rel=1e-3), name


def test_a_teacher_takes_memory_by_the_way_it_is_held() -> None:
    def teacher_of(hold: str, stage: int, **more: Any) -> Memory:
        model, laid_out = planned(stage, 8, {"importance": "magnitude", "distillation": {"hold": hold}}, **more)
        return memory(model, laid_out, lambda *_: NOTHING)

    full = 2 * 6_738_415_616
    assert teacher_of("replicated", 3).resident["teacher"] == full
    stays = teacher_of("replicated", 3, offload_param={"device": "cpu"})  # the student's weights alone leave the device
    assert stays.resident["teacher"] == full and "teacher" not in stays.host
    assert teacher_of("zero3", 2).resident["teacher"] == pytest.approx(full / 8, rel=1e-3)
    offloaded = teacher_of("zero3", 3, offload_param={"device": "cpu"})
    assert "teacher" not in offloaded.resident
    assert offloaded.host["teacher"] == pytest.approx(full / 8, rel=1e-3)
    model, laid_out = planned(3, 8, {"distillation": {"hold": "zero3"}})
    other, _ = planned(3, 8, {"distillation": None}, config=qwen3_14b)
    results = memory(model, laid_out, lambda *_: NOTHING, teacher=other)
    assert results.resident["teacher"] == pytest.approx(2 * other.total / 8, rel=1e-3)


def test_masters_in_bf16_have_no_room_for_the_weights_before_a_step() -> None:
    """Step one sub-group of the optimizer at a time, as long as masks are soft and weights follow them."""

    def before(block: dict[str, Any], bf16: bool = True, **zero: Any) -> int:
        model, laid_out = planned(3, 8, {"distillation": None, **block}, **zero)
        laid_out = dataclasses.replace(laid_out, bf16_states=bf16)
        step = memory(model, laid_out, lambda *_: NOTHING).phases["optimizer step"]
        return step.get("weights before the step", 0)

    masked = planned(3, 8)[0].masked // 8
    assert before({}) == 4 * masked
    assert before({}, sub_group_size=10**8) == 4 * 10**8 < 4 * masked
    assert before({}, bf16=False) == 0
    for block in (
        {"method": {"straight_through": True}},
        {"method": "naive_retrain"},
    ):
        assert before(block) == 0, block


def test_gradients_are_flattened_before_they_are_cast() -> None:
    """6 bytes of what is stepped at a time, where the step itself, 4 bytes and its temporaries, takes less."""

    def step(stage: int, gradient_bytes: int = 2, **zero: Any) -> tuple[Architecture, dict[str, int]]:
        model, laid_out = planned(stage, 8, **zero)
        laid_out = dataclasses.replace(laid_out, gradient_bytes=gradient_bytes)
        return model, memory(model, laid_out, lambda *_: NOTHING).phases["optimizer step"]

    for stage in (1, 2, 3):
        model, result = step(stage)
        group = model.masked // 8
        assert (result["flat gradients"], result["fp32 gradients"]) == (2 * group, 4 * group), stage
        assert "mask's temporaries" not in result
        assert "flat gradients" not in step(stage, gradient_bytes=4)[1]
    small = step(3, sub_group_size=1000)[1]
    assert small["mask's temporaries"] > 2 * 1000 and "flat gradients" not in small


def test_fp32_gradients_at_stage_1_are_those_of_the_whole_model() -> None:
    model, laid_out = planned(1, 8)
    before = memory(model, laid_out, lambda *_: NOTHING)
    laid_out = dataclasses.replace(laid_out, gradient_bytes=4)
    results = memory(model, laid_out, lambda *_: NOTHING)
    assert results.resident.keys() - before.resident.keys() == {"fp32 gradients"}
    assert results.resident["fp32 gradients"] == 4 * model.total == lasting(model, laid_out)["fp32 gradients"]
    assert results.phases["forward and backward"] == {"gradients": 2 * model.total}
    assert results.phases["optimizer step"].keys() == {"gradients", "mask's temporaries"}
    # Frozen, they are masked by the bits of all ranks.
    laid_out = planned(1, 8, {"method": "naive_retrain"})[1]
    own = memory(model, laid_out, lambda *_: NOTHING).resident["kept bits"]
    laid_out = dataclasses.replace(laid_out, gradient_bytes=4)
    assert memory(model, laid_out, lambda *_: NOTHING).resident["kept bits"] == own + math.ceil(model.masked / 8)


def test_scores_by_row_and_column_sums() -> None:
    """Bytes for every row and column of every matrix, gate and up of an expert apart, on every rank."""

    def sums(block: dict[str, Any], config: Any = llama2_7b) -> int:
        model, laid_out = planned(3, 8, {"distillation": None, **block}, config=config)
        return memory(model, laid_out, lambda *_: NOTHING).phases["mask update"].get("row and column sums", 0)

    probe: dict[str, Any] = {"curvature": {"source": "probe"}}
    assert sums(probe) == 8 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert sums({"importance": "hutchinson"}) == sums({"importance": "wanda"}) == sums(probe) == sums({}) * 8 // 20
    assert sums({"curvature": {"factored": False}}) == 0
    attention = 4 * (2048 + 2048)
    expert = 3 * (2048 + 1408)
    other_values = 27 * 3 * (2048 + 2 * 1408) + 3 * (2048 + 10944)
    assert sums(probe, deepseek_moe_16b) == 8 * (28 * attention + 27 * 64 * expert + other_values)


def test_elements_of_fisher_take_a_full_matrix_and_sums_do_not() -> None:
    for block in ({}, {"curvature": {"source": "training"}}):
        phases = memory(*planned(3, 8, block), lambda *_: NOTHING).phases
        assert not any("Fisher matrix" in kinds or "new curvature" in kinds for kinds in phases.values())
    model, laid_out = planned(3, 8, {"curvature": {"factored": False}})
    update = memory(model, laid_out, lambda *_: NOTHING).phases["mask update"]
    assert update["Fisher matrix"] >= 4 * 4096 * 11008
    assert update["new curvature"] == pytest.approx(4 * model.masked / 8, rel=1e-3)
    phases = memory(*planned(3, 8), lambda *_: NOTHING).phases["mask update"]
    assert "new curvature" not in phases


def test_elements_of_fused_experts_are_formed_some_experts_at_a_time() -> None:
    model, laid_out = planned(3, 8, {"curvature": {"factored": False}}, config=deepseek_moe_16b)
    update = memory(model, laid_out, lambda *_: NOTHING).phases["mask update"]
    assert update["new curvature"] == pytest.approx(4 * model.masked / 8, rel=1e-3)
    assert 0.9 * EXPERT_BYTES <= update["Fisher matrix"] <= 1.2 * EXPERT_BYTES


def test_fused_experts_are_traced_as_they_are_heard() -> None:
    """Trace the training step while masks move, where it is listened to, or the passes of a probe by token."""

    def activations(block: dict[str, Any], config: Any = deepseek_moe_16b) -> list[int]:
        def trace(_micro: int, _checkpointing: bool, heard: bool) -> Activations:
            return dataclasses.replace(NOTHING, saved=2 if heard else 1)

        model, laid_out = planned(3, 8, {"distillation": None, **block}, config=config)
        phases = memory(model, laid_out, trace).phases
        return [phases[name].get("activations", 0) for name in ("forward and backward", "mask update")]

    assert activations({}) == [2, 0]
    assert activations({"curvature": {"source": "probe"}}) == [1, 2]
    assert activations({"importance": "wanda"}) == [1, 1]
    assert activations({}, llama2_7b) == [1, 0]


def test_checkpoints_hold_18_bytes_a_weight_under_zero3_and_then_12_and_a_bit() -> None:
    model, laid_out = planned(3, 8, {"importance": "fisher"})
    assert checkpoint_bytes(model, laid_out) == pytest.approx(12 * model.total + 6 * model.masked, rel=1e-3)
    model, laid_out = planned(3, 8, {"curvature": {"factored": False}})
    assert checkpoint_bytes(model, laid_out) == 12 * model.total + 10 * model.masked
    assert checkpoint_bytes(model, laid_out, frozen=True) == 12 * model.total + model.masked / 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "under ZeRO-3 without"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp32 masters only"),
    ],
)
def test_layouts_without_an_estimate_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_estimable(content)


@pytest.mark.parametrize(
    ("optimizer", "of_masked", "of_others"),
    [
        ({"type": "AdamW"}, 8, 8),
        ({"type": "Lion"}, 4, 4),
        ({"type": "Muon"}, 4, 8),
        ({"type": "SGD"}, 0, 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 4, 4),
    ],
)
def test_an_optimizer_keeps_its_own_moments(optimizer: dict[str, Any], of_masked: int, of_others: int) -> None:
    model, laid_out = planned(1, 1, optimizer=optimizer)
    expected = of_masked * model.masked + of_others * (model.total - model.masked)
    assert model_states(model, laid_out)["moments"] == expected
