"""Advice that makes a run fit, all of it needed."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.planning.activations import Activations, trace
from sparseforge_ds.planning.architecture import describe, empty_model
from sparseforge_ds.planning.memory import Memory, memory
from sparseforge_ds.planning.recommend import advise, fewest_ranks
from sparseforge_ds.planning.settings import Settings, settings
from tests.unit.planning.published_configs import qwen3_14b

GIB = 2**30
FORGE = SparseForgeConfig.from_dict({"distillation": {"hold": "replicated"}})
LAYERS = 8


def laid_out(stage: int = 3, ranks: int = 8, micro_batch: int = 4, **zero: Any) -> Settings:
    content = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **zero},
    }
    return settings(content, FORGE, ranks=ranks, seq_length=2048, checkpointing=False)


@cache
def activations(micro_batch: int, checkpointing: bool) -> Activations:
    config = qwen3_14b(num_hidden_layers=LAYERS)
    return trace(
        config,
        FORGE,
        dtype=torch.bfloat16,
        micro_batch=micro_batch,
        seq_length=2048,
        checkpointing=checkpointing,
        teacher=config,
    )


EMPTY = empty_model(qwen3_14b(num_hidden_layers=LAYERS), FORGE, torch.bfloat16)
MODEL = describe(EMPTY, prunable_weights(EMPTY, FORGE))


@cache
def estimate(changed: Settings) -> Memory:
    return memory(MODEL, changed, activations)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gib", [16, 24, 32, 40])
def test_advice_fits_and_nothing_of_it_is_needless(stage: int, gib: int) -> None:
    start = laid_out(stage)
    assert estimate(start).peak > gib * GIB
    found = advise(start, estimate, gib * GIB)
    assert found.fits and found.lines
    assert found.memory == estimate(found.settings)
    assert found.memory.peak <= gib * GIB
    assert found.settings.tokens_per_step == start.tokens_per_step
    for change in ("checkpointing", "stage", "optimizer_on_host", "weights_on_host"):
        if getattr(found.settings, change) != getattr(start, change):
            fewer = dataclasses.replace(found.settings, **{change: getattr(start, change)})
            possible = fewer.stage == 3 or not fewer.weights_on_host and (fewer.stage or not fewer.optimizer_on_host)
            assert not possible or estimate(fewer).peak > gib * GIB, change
    if found.settings.micro_batch < start.micro_batch:
        larger = dataclasses.replace(found.settings, micro_batch=2 * found.settings.micro_batch)
        assert estimate(larger).peak > gib * GIB


def test_cheap_settings_come_first() -> None:
    start = laid_out(3)
    assert advise(start, estimate, estimate(start).peak - GIB // 2).lines == ["--activation_checkpointing"]
    tight = estimate(dataclasses.replace(start, checkpointing=True)).peak - 1
    assert advise(start, estimate, tight).lines[1].startswith('"train_micro_batch_size_per_gpu": 2 and')


def test_a_gpu_that_is_too_small() -> None:
    found = advise(laid_out(3), estimate, 4 * GIB)
    assert not found.fits
    assert found.memory.peak > 4 * GIB
    assert '"offload_param": {"device": "cpu"} in zero_optimization' in found.lines
    assert found.settings.weights_on_host and found.settings.micro_batch == 1


def test_the_host_may_be_too_small_to_offload_to() -> None:
    device = 16 * GIB
    free = advise(laid_out(3), estimate, device)
    assert free.fits and free.memory.host_total > 0
    bounded = advise(laid_out(3), estimate, device, host=free.memory.host_total // 8)
    assert not bounded.fits


def test_more_ranks() -> None:
    start = dataclasses.replace(laid_out(3, ranks=1), checkpointing=True)
    ranks = fewest_ranks(start, estimate, 40 * GIB)
    assert ranks is not None and ranks > 1
    assert estimate(dataclasses.replace(start, ranks=ranks)).peak <= 40 * GIB
    assert estimate(dataclasses.replace(start, ranks=ranks // 2)).peak > 40 * GIB
    assert fewest_ranks(start, estimate, 4 * GIB) is None
