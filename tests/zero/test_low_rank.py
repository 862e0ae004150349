"""Families, groups and SLoRB on real ranks: weights that are partitioned as they load, branches off and on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from sparseforge_ds.config import LowRankConfig, SparseForgeConfig
from sparseforge_ds.model.branch import branches
from sparseforge_ds.model.families import coverage, prunable_weights
from sparseforge_ds.model.low_rank import prepare
from sparseforge_ds.model.param_groups import param_groups
from tests.distributed import run_distributed
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen3, token_batch

PLAIN = SparseForgeConfig()
LOW_RANK = SparseForgeConfig(low_rank=LowRankConfig(k=4))
BUILDERS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gpt2": tiny_gpt2}
STEPS_OFF, STEPS_ON = 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family, build in BUILDERS.items():
        build().save_pretrained(path / family)
    return path


def _ds_config(stage: int, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **extra,
    }


def _load(path: Path, ds_config: dict[str, Any]) -> Any:
    """Load a model as a run does: partitioned while it loads at stage 3, in full otherwise."""
    alive = HfDeepSpeedConfig(ds_config) if ds_config["zero_optimization"]["stage"] == 3 else None
    dtype = torch.bfloat16 if "bf16" in ds_config else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    del alive
    return model


def _table(model: Any, config: SparseForgeConfig) -> dict[str, Any]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = prunable_weights(model, config)
    return {
        "weights": weights,
        "coverage": coverage(model, weights),
        "groups": {g["name"]: [name_of[id(p)] for p in g["params"]] for g in param_groups(model, config)},
        "branches": list(branches(model)),
        "b_shapes": [tuple(getattr(b.low_rank_b, "ds_shape", b.low_rank_b.shape)) for b in branches(model).values()],
    }


def _tables(path: Path, config: SparseForgeConfig) -> list[dict[str, Any]]:
    """Before and after `deepspeed.initialize`."""
    ds_config = _ds_config(3)
    model = _load(path, ds_config)
    assert all(parameter.numel() == 0 for parameter in model.parameters()), "zero.Init did not partition"
    prepare(model, config)
    before = _table(model, config)
    groups = param_groups(model, config, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    inner = engine.basic_optimizer.param_groups
    own_group = [None] if config.low_rank is not None else []
    assert [g.get("sparseforge") for g in inner] == ["prunable", None, None, *own_group]
    assert [g["weight_decay"] for g in inner] == [0.1, 0.1, 0.0, *(0.0 for _ in own_group)]
    return [before, _table(engine.module, config)]


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("config", [PLAIN, LOW_RANK], ids=["plain", "low_rank"])
def test_a_partitioned_model_reads_like_a_full_one(family: str, config: SparseForgeConfig, folder: Path) -> None:
    expected = _table(prepare(BUILDERS[family](), config), config)
    assert run_distributed(_tables, 2, folder / family, config) == [[expected, expected]] * 2


def _ids(step: int, rank: int) -> Tensor:
    return token_batch(seed=10 * step + rank)["input_ids"]


def _train(path: Path, stage: int, config: SparseForgeConfig, extra: dict[str, Any]) -> dict[str, Any]:
    ds_config = _ds_config(stage, **extra)
    model = prepare(_load(path, ds_config), config)
    groups = param_groups(model, config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config)
    device = get_accelerator().current_device_name()
    losses = []
    for step in range(STEPS_OFF + STEPS_ON):
        for branch in branches(model).values():
            branch.enabled = step >= STEPS_OFF
        ids = _ids(step, torch.distributed.get_rank()).to(device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        if step == STEPS_OFF - 1:
            assert not any(_whole(branch.low_rank_b).any() for branch in branches(model).values())
    weights = {name: _whole(branch.low_rank_b) for name, branch in branches(model).items()}
    return {"losses": torch.stack(losses), "low_rank_b": weights, "dtype": losses[0].dtype}


def _whole(parameter: torch.nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _expected(family: str, ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Train in one process and plain torch. Like DeepSpeed it gives a branch that is off a gradient of zero."""
    model = prepare(BUILDERS[family](), LOW_RANK)
    optimizer = torch.optim.AdamW(param_groups(model, LOW_RANK), lr=1e-2)
    losses = []
    for step in range(STEPS_OFF + STEPS_ON):
        for branch in branches(model).values():
            branch.enabled = step >= STEPS_OFF
            branch.low_rank_b.grad = torch.zeros_like(branch.low_rank_b)
        parts = [model(input_ids=ids, labels=ids).loss for ids in (_ids(step, rank) for rank in range(ranks))]
        (sum(parts) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).detach())
    return torch.stack(losses, dim=1), {name: b.low_rank_b.detach() for name, b in branches(model).items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_with_branches_is_plain_torch(stage: int, family: str, folder: Path) -> None:
    losses, low_rank_b = _expected(family, 2)
    results = run_distributed(_train, 2, folder / family, stage, LOW_RANK, {})
    torch.testing.assert_close(torch.stack([r["losses"] for r in results]), losses, rtol=1e-4, atol=1e-5)
    for result in results:
        assert result["low_rank_b"].keys() == low_rank_b.keys()
        for name, expected in low_rank_b.items():
            assert expected.abs().max() > 1e-2
            # Adam divides by its own noise where a gradient is nearly zero: a few entries may differ by a step.
            off = (result["low_rank_b"][name] - expected).abs() > 1e-3
            assert off.float().mean() < 0.01, name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_branches_that_are_off_change_no_bit(stage: int, folder: Path) -> None:
    steps = slice(0, STEPS_OFF + 1)  # the first step that is on still has B = 0
    # Zeros in a sum of squares change how the sum is cut into vectors: without clipping the norm has no influence.
    unclipped = {"gradient_clipping": 0.0}
    plain = run_distributed(_train, 2, folder / "llama", stage, PLAIN, unclipped)
    branched = run_distributed(_train, 2, folder / "llama", stage, LOW_RANK, unclipped)
    for a, b in zip(plain, branched, strict=True):
        assert torch.equal(a["losses"][steps], b["losses"][steps])
        assert not torch.equal(a["losses"], b["losses"])


@pytest.mark.parametrize("stage", [0, 3])
def test_branches_train_in_bf16(stage: int, folder: Path) -> None:
    losses, _ = _expected("llama", 2)
    results = run_distributed(_train, 2, folder / "llama", stage, LOW_RANK, {"bf16": {"enabled": True}})
    for rank, result in enumerate(results):
        assert {b.dtype for b in result["low_rank_b"].values()} == {torch.bfloat16}
        torch.testing.assert_close(result["losses"].float(), losses[rank], rtol=0.05, atol=0.02)
