"""Engines that no mask is trained on: DeepSpeed's own expert parallelism, and a model prepared otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers.utils import output_capturing

import sparseforge_ds as sf
from sparseforge_ds import sharded_weights
from tests.distributed import run_distributed
from tests.tiny_models import BUILDERS, token_batch
from tests.zero.case import Case, build, build_engine


def attach(stage: int) -> dict[str, Any]:
    """Train a mixture under AutoEP, then try to prune it."""
    import deepspeed

    # DeepSpeed 0.19 asks transformers' registry as if it were a plain dict.
    registry = type(output_capturing._CAN_RECORD_REGISTRY)
    if registry is not dict:
        plain = registry.get
        registry.get = lambda self, key, _default=None: plain(self, key)
    case = Case(stage=stage, config={"importance": "magnitude"})
    model = BUILDERS["qwen3_moe"]()
    named = {name for name, _ in model.named_parameters()}
    param_groups = sf.param_groups(sf.prepare(model, case.sparseforge), case.sparseforge)
    settings = {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe", "use_grouped_mm": False}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups, config={**case.deepspeed(), "expert_parallel": settings}
    )
    loss = engine(**token_batch(2, 8, seed=dist.get_rank())).loss
    engine.backward(loss)
    engine.step()
    new = {name: p for name, p in engine.module.named_parameters() if name not in named and ".experts." in name}
    result: dict[str, Any] = {
        "experts": {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in new.items()},
        "alike": True,
    }
    sums = [None] * dist.get_world_size()
    dist.all_gather_object(sums, [float(getattr(p, "ds_tensor", p).detach().sum()) for p in new.values()])
    result["alike"] = sums[0] == sums[1]
    try:
        sf.SparseForge(engine, case.sparseforge)
    except ValueError as error:
        result["refusal"] = str(error)
    return result


@pytest.mark.parametrize("stage", [2, 3])
def test_expert_parallelism_trains_and_is_refused(stage: int) -> None:
    for rank in run_distributed(attach, 2, stage):
        # Both ranks hold 2 of the 4 experts, under one name: a mask by name would be a mask of neither.
        assert rank["experts"] and all(shape[0] == 2 for shape in rank["experts"].values())
        assert not rank["alike"]
        assert rank["refusal"].startswith("cannot train a mask with this engine: expert_parallel")
        assert "remove it: ZeRO stage 3" in rank["refusal"]


def what_is_no_engine() -> dict[str, str]:
    """accelerate without a DeepSpeed plugin wraps the model in DDP, and says nothing."""
    import deepspeed
    from accelerate import Accelerator

    case = Case(stage=1, config={"importance": "magnitude"})
    model = sf.prepare(BUILDERS["llama"](), case.sparseforge)
    arguments: dict[str, Any] = {"bare": model, "accelerate": Accelerator(cpu=True).prepare(model)}
    param_groups = sf.param_groups(model, case.sparseforge)
    arguments["tuple"] = deepspeed.initialize(model=model, model_parameters=param_groups, config=case.deepspeed())
    messages = {}
    for name, subject in arguments.items():
        with pytest.raises(ValueError) as refused:
            sf.SparseForge(subject, case.sparseforge)
        messages[name] = str(refused.value)
    # An engine that has loaded a checkpoint, or made a step, has a run behind it that a forge would not know.
    engine = arguments["tuple"][0]
    engine.backward(engine(**token_batch(2, 8)).loss)
    engine.step()
    with pytest.raises(ValueError) as refused:
        sf.SparseForge(engine, case.sparseforge)
    messages["late"] = str(refused.value)
    # Nothing makes masters of a model that was loaded in float16.
    halves = build_engine(Case(stage=0), BUILDERS["llama"]().half())
    with pytest.raises(ValueError) as refused:
        sf.SparseForge(halves, case.sparseforge)
    messages["halves"] = str(refused.value)
    # A rate that is too low is a warning, a low one before a warm-up is none.
    lines: list[str] = []
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 4}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(sharded_weights.__name__), "warning", lambda *words: lines.append(words[0]))
        build(Case(lr=1e-7, more={"scheduler": scheduler}))
        messages["warm-up"] = " ".join(lines)
        build(Case(lr=1e-7))
    messages["slow"] = " ".join(lines)
    return messages


def test_what_deepspeed_did_not_make_is_refused_by_name() -> None:
    messages = run_distributed(what_is_no_engine, 2)[0]
    assert messages["bare"].startswith(
        "not a DeepSpeed engine, but a transformers.models.llama.modeling_llama.LlamaForCau"
    )
    assert "DistributedDataParallel around a LlamaForCausalLM: pass the first thing" in messages["accelerate"]
    assert "accelerate launch --use_deepspeed" in messages["accelerate"] and "DeepSpeed plugin" in messages["bare"]
    assert messages["tuple"].startswith("not a DeepSpeed engine, but a tuple of 4: pass the first thing")
    assert messages["late"].startswith("the engine is at step 1 already") and "load_state" in messages["late"]
    assert messages["slow"].startswith("learning rate %g: in %d steps weights") and not messages["warm-up"]
    assert "weights in float16 at ZeRO stage 0" in messages["halves"] and "float32" in messages["halves"]


def attach_to_another_preparation(folder: str) -> list[str]:
    """Return what a forge says whose config has other branches or factors than the model was prepared with."""
    low_rank = {"low_rank": {"k": 8, "shift": False}}
    factors: dict[str, Any] = {"method": {"name": "cast", "scaling": True, "every": 2}}
    without_factors: dict[str, Any] = {"method": {"name": "cast", "scaling": False, "every": 2}}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (low_rank, {}),
        ({}, low_rank),
        (low_rank, {"low_rank": {"k": 16, "shift": False}}),
        (factors, without_factors),
        (without_factors, factors),
    ]
    messages = []
    for prepared, forged in pairs:
        engine = build_engine(Case(stage=2, config=prepared))
        try:
            sf.SparseForge(engine, Case(stage=2, config=forged).sparseforge)
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
        # The refusal has left the engine alone: the right config attaches, and a checkpoint is loaded.
        forge = sf.SparseForge(engine, Case(stage=2, config=prepared).sparseforge)
        tag: Any = len(messages)  # DeepSpeed takes any tag that is a name
        engine.save_checkpoint(folder, tag=tag)
        engine.load_checkpoint(folder, tag=tag)
        assert forge.step_count == 0
    return messages


def test_a_forge_with_another_config_than_its_model_is_refused(tmp_path: Path) -> None:
    for messages in run_distributed(attach_to_another_preparation, 2, str(tmp_path)):
        keys = ["low_rank"] * 3 + ["method.scaling"] * 2
        for message, key in zip(messages, keys, strict=True):
            assert message.startswith(f"sparseforge.{key}: the model was prepared with another value"), messages
