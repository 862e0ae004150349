"""Requests to the engine's own `save_checkpoint` and `load_checkpoint` that are refused at once."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sparseforge_ds as sf
from sparseforge_ds import saved_state
from sparseforge_ds.checkpoint.folder import find_checkpoint
from tests.distributed import run_distributed
from tests.zero.case import MODELS, Case, build, build_engine, probe_of, train_step

CASE = Case(stage=1)


def said(work: Any) -> str:
    with pytest.raises(ValueError) as refused:
        work()
    return str(refused.value)


def refusals(folder: str) -> dict[str, str]:
    engine, forge = build(CASE)
    result = {
        name: said(lambda state=state: engine.save_checkpoint(folder, client_state=state))
        for name, state in {
            "numpy": {"rng": np.random.get_state()},
            "object": {"mine": {"args": argparse.Namespace(lr=1)}},
            "function": {"decay": lambda step: step},
        }.items()
    }
    # Rank 0 alone looks into the folder.
    result["folder"] = said(lambda: engine.save_checkpoint("/" + "x" * 300))
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.basic_optimizer, lambda step: np.float64(0.5))
    result["scheduler"] = said(lambda: engine.save_checkpoint(folder))
    model = MODELS["llama"]()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
    frozen, _ = build(CASE, model)
    result["frozen"] = said(lambda: frozen.save_checkpoint(folder, exclude_frozen_parameters=True))
    assert not Path(folder).exists(), "something was written"
    # A load by another kind of scheduler changes nothing.
    kinds = torch.optim.lr_scheduler
    steps = kinds.StepLR(engine.basic_optimizer, 5)
    engine.lr_scheduler = kinds.SequentialLR(engine.basic_optimizer, [steps, kinds.StepLR(steps.optimizer, 7)], [4])
    engine.save_checkpoint(folder)
    half = kinds.LambdaLR(engine.basic_optimizer, lambda step: 0.5)
    steps = kinds.StepLR(engine.basic_optimizer, 3)
    master = forge.sharded.layout.flats[0].data.fill_(7.0)
    for scheduler in (half, steps, kinds.SequentialLR(engine.basic_optimizer, [steps, half], [4])):
        engine.lr_scheduler = scheduler
        result[f"other {type(scheduler).__name__}"] = said(lambda: engine.load_checkpoint(folder))
        assert (master == 7).all() and steps.step_size == 3
    elastic = build_engine(replace(CASE, zero={"elastic_checkpoint": True}))
    result["elastic"] = said(lambda: sf.SparseForge(elastic, CASE.sparseforge))
    less = replace(CASE, stage=0, config={"exclude": ["*.k_proj.weight"]}).sparseforge
    unlike = build_engine(replace(CASE, stage=0))
    result["groups"] = said(lambda: sf.SparseForge(unlike, less))
    return result


def test_state_that_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    for result in run_distributed(refusals, 2, str(tmp_path / "saved")):
        for name, words in {
            "numpy": "client_state['rng'] could not be read again (it has a numpy._core.multiarray._reconstruct in it)",
            "object": "client_state['mine'] could not be read again (it has a argparse.Namespace in it)",
            "function": "client_state['decay'] could not be read again (Can't pickle",
            "folder": "File name too long",
            "scheduler": "the scheduler's state_dict could not be read again (it has a numpy._core.multiarray.scalar",
            "other LambdaLR": "the saved lr scheduler has no base_lrs, lr_lambdas, which LambdaLR needs; use the sched",
            "other StepLR": "the saved lr scheduler has no base_lrs, gamma, step_size, which StepLR needs",
            "other SequentialLR": "the saved lr scheduler has no lr_lambdas, which SequentialLR needs",
            "frozen": "exclude_frozen_parameters leaves out weights",
            "elastic": "zero_optimization.elastic_checkpoint: it saves states without the numbers",
            "groups": "k_proj.weight is not prunable by this config, and its param group says otherwise",
        }.items():
            assert words in result[name], result[name]


def gone_back(folder: str) -> tuple[list[str], list[str]]:
    """Return the folders that were loaded, by DeepSpeed's rule `latest`, and the warnings about other versions."""
    engine, forge = build(CASE)
    forge.start(probe_of(engine, CASE, 0))

    def step(number: int) -> None:
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = np.float64(1e-3)  # as a schedule that calls numpy computes it
        train_step(engine, CASE, number)
        forge.step(probe_of(engine, CASE, number))
        own_state = {"mine": [3, "a", torch.ones(2)], "train": 17}  # under the launcher's name too
        engine.save_checkpoint(folder, tag=f"step_{number + 1:06d}", client_state=own_state)

    # Four steps; go back to the second, and save the third again: `latest` is the third then.
    for number in range(4):
        step(number)
    engine.load_checkpoint(folder, tag="step_000002")
    step(2)
    loaded = [engine.load_checkpoint(folder)[0]]
    if dist.get_rank() == 0:
        Path(folder, "step_000009").mkdir()  # what a kill left
    dist.barrier()
    loaded.append(engine.load_checkpoint(folder)[0])
    assert forge.step_count == 3
    # A checkpoint of another version is loaded, with a warning.
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(saved_state.VERSIONS, "deepspeed", "0.99.0")
        patch.setattr(
            logging.getLogger(saved_state.__name__), "warning", lambda line, *values: messages.append(line % values)
        )
        engine.load_checkpoint(folder)
    return [Path(item).name for item in loaded], messages


def test_after_going_back_the_abandoned_steps_are_not_loaded(tmp_path: Path) -> None:
    (first, messages), (second, nothing) = run_distributed(gone_back, 2, str(tmp_path))
    assert first == second == ["step_000003"] * 2
    was = f'version.deepspeed was "{version("deepspeed")}", is "0.99.0"'
    assert messages == [f"{tmp_path / 'step_000003'} was saved by other versions: {was}"] and not nothing
    assert find_checkpoint(tmp_path).name == "step_000003", "and for the tools, too"


LOST = [Case(stage=stage) for stage in range(4)] + [Case(stage=2, dtype="fp16", more={"fp16": {"loss_scale": 1}})]


def lost(case: Case, folder: str) -> list[str]:
    """Return the message when an element is lost on the last rank: of a weight, and of the optimizer's state."""
    engine, forge = build(case)
    forge.start(probe_of(engine, case, 0))
    train_step(engine, case, 0)
    forge.step(probe_of(engine, case, 0))
    engine.save_checkpoint(folder, tag="step_000001")
    flat = engine.basic_optimizer.param_groups[-1]["params"][-1] if case.stage < 3 else forge.sharded.layout.flats[-1]
    messages = []
    for values, bad in ((flat.data, 1e5 if case.dtype == "fp16" else torch.nan), (momentum(engine, flat), torch.inf)):
        good = values.view(-1)[0].item()
        if dist.get_rank() == dist.get_world_size() - 1:
            values.view(-1)[0] = bad
        with pytest.raises(sf.ForgeError) as refused:
            engine.save_checkpoint(folder, tag="step_000002")
        messages.append(str(refused.value))
        values.view(-1)[0] = good
    engine.save_checkpoint(folder, tag="step_000003")
    return messages


def momentum(engine: Any, flat: torch.Tensor) -> torch.Tensor:
    state: torch.Tensor = engine.basic_optimizer.state[flat]["exp_avg_sq"]
    return state


def lost_all(folder: str) -> list[list[str]]:
    return [lost(case, str(Path(folder, str(number)))) for number, case in enumerate(LOST)]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    for of_rank in run_distributed(lost_all, 2, str(tmp_path)):
        for number, messages in enumerate(of_rank):
            for message in messages:
                assert "optimizer states are infinite, NaN or beyond their dtype after step 1" in message, message
                good = tmp_path / str(number) / "step_000001"
                assert f"nothing was saved; go back to {good} by engine.load_checkpoint" in message
            assert not (tmp_path / str(number) / "step_000002").exists()
            assert (tmp_path / str(number) / "step_000003").is_dir()
