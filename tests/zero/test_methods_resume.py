"""Every method's run goes on bit for bit after a restart, and with the same states on another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.reader import Checkpoint
from tests.distributed import run_distributed
from tests.zero.case import Case, build, probe_of, published, states, train_step

STEPS, SAVE = 6, 3
ODD = {"exclude": ["*.down_proj.weight", "*.up_proj.weight", "*.k_proj.weight"], "max_steps": STEPS}
REFRESH = {"every": 2, "decay": 0.01, "frozen": 0.17}
CASES: dict[str, Case] = {
    "sr_ste": Case(stage=1, dtype="bf16", config={"method": "sr_ste"}),
    "ast": Case(stage=2, config={"method": {"name": "ast", **REFRESH}, "low_rank": {"k": 4}}),
    "cast": Case(stage=2, dtype="bf16", config={"method": {"name": "cast", **REFRESH}, "importance": "wanda"}),
    "cast-0": Case(stage=0, config={"method": {"name": "cast", **REFRESH}}),
    "folded cast": Case(stage=3, clip=0.1, config={"method": {"name": "cast", **REFRESH, "frozen": 0.5}}),
    "elsa": Case(stage=3, config={"method": {"name": "elsa", "every": 2, "decay": 0.1}}),
    "elsa-bf16": Case(stage=1, dtype="bf16", config={"method": {"name": "elsa", "every": 2, "decay": 0.1}}),
    "pat": Case(stage=2, config={"method": {"name": "pat", "warmup": 0.5}}),
    "maskllm": Case(stage=3, config={"method": {"name": "maskllm", "scale": [2.0, 5.0], "reward": 0.01}}),
    "maskllm-bf16": Case(stage=1, dtype="bf16", config={"method": "maskllm"}),
}
CASES |= {
    "sr_ste-quantized": Case(stage=3, config={"method": "sr_ste", "quantize": {"group_size": 2, "from": 0.3}}),
    "ast-quantized": Case(
        stage=1,
        dtype="bf16",
        config={"method": {"name": "ast", **REFRESH, "frozen": 0.5}, "quantize": {"group_size": None}},
    ),
}
CASES = {name: replace(case, model="llama_odd", config={**ODD, **case.config}) for name, case in CASES.items()}


def everything(engine: Any, forge: Any) -> dict[str, Tensor]:
    """Return all states of prunable weights, complete, and the weights that the network sees."""
    partition = forge.sharded.state.partition(min(forge.sharded.state.shards_in))
    keys = {"dense", "mask"} | {key for key, value in partition.items() if torch.is_tensor(value) and value.dim()}
    by_key = states(forge, *sorted(keys))
    by_name = {f"{key} {name}": value for key, by_weight in by_key.items() for name, value in by_weight.items()}
    return by_name | {f"published {name}": value for name, value in published(engine).items()}


def go_on(engine: Any, forge: Any, case: Case, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        losses.append(train_step(engine, case, step))
        forge.step(probe_of(engine, case, step))
    return losses


def unbroken_and_resumed(folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, case in CASES.items():
        saved_in = str(Path(folder, name))
        # One run without a break, which saves on its way.
        engine, forge = build(case)
        forge.start(probe_of(engine, case, 0))
        losses = go_on(engine, forge, case, 0, SAVE)
        engine.save_checkpoint(saved_in, tag="middle")
        middle = everything(engine, forge)
        losses += go_on(engine, forge, case, SAVE, STEPS)
        forge.finish()
        end = everything(engine, forge)
        # Both ways back go on with the same losses, and end with the same bits.
        problems = []
        for way in ("engine.load_checkpoint", "forge.restore"):
            engine, forge = build(case)
            if way == "forge.restore":
                forge.restore(Checkpoint(Path(saved_in, "middle")))
            else:
                engine.load_checkpoint(saved_in, tag="middle")
            if go_on(engine, forge, case, SAVE, STEPS) != losses[SAVE:]:
                problems.append(f"{way}: losses differ")
            again = everything(engine, forge)
            assert again.keys() == end.keys(), (name, way, again.keys() ^ end.keys())
            problems += [f"{way}: {key}" for key in end if not torch.equal(end[key], again[key])]
        result[name] = {"problems": problems, "middle": middle, "end": end, "losses": losses}
    return result


def elsewhere(folder: str) -> dict[str, Any]:
    """Continue the same runs on these ranks at another ZeRO stage."""
    result = {}
    for name, case in CASES.items():
        engine, forge = build(replace(case, stage=2 if case.stage == 3 else 3))
        forge.restore(Checkpoint(Path(folder, name, "middle")))
        middle = everything(engine, forge)
        losses = go_on(engine, forge, case, SAVE, STEPS)
        forge.finish()
        result[name] = {"middle": middle, "losses": losses, "end": everything(engine, forge)}
    return result


def test_methods_resume_and_move_to_other_ranks(tmp_path: Path) -> None:
    first = run_distributed(unbroken_and_resumed, 2, str(tmp_path))[0]
    assert {name: of_run["problems"] for name, of_run in first.items()} == {name: [] for name in CASES}
    moved = run_distributed(elsewhere, 3, str(tmp_path))[0]
    for name, case in CASES.items():
        of_moved, of_first = moved[name], first[name]
        states = {key for key in of_first["middle"] if not key.startswith("published")}
        assert states == {key for key in of_moved["middle"] if not key.startswith("published")}, name
        assert [key for key in states if not torch.equal(of_moved["middle"][key], of_first["middle"][key])] == [], name
        # Equal weights are rounded alike, wherever shards cut the groups that share a scale.
        if "quantized" in name:
            network_keys = [key.replace("dense ", "published ") for key in states if key.startswith("dense ")]
            assert [
                key for key in network_keys if not torch.equal(of_moved["middle"][key], of_first["middle"][key])
            ] == [], name
        bound = 1e-4 if case.dtype == "fp32" else 0.05
        apart = [abs(a - b) for a, b in zip(of_moved["losses"], of_first["losses"][SAVE:], strict=True)]
        assert max(apart) < bound, (name, apart)
        masks = [key for key in states if key.startswith("mask ")]
        differing = [(of_moved["end"][key] != of_first["end"][key]).float().mean().item() for key in masks]
        assert max(differing) < (0.01 if case.dtype == "fp32" else 0.2), (name, differing)
        if name.startswith("cast"):
            scales = [key for key in of_first["middle"] if "weight_scale" in key]
            assert len(scales) == 4 and any((of_first["middle"][key] != 1).any() for key in scales)
            assert all(torch.equal(of_moved["middle"][key], of_first["middle"][key]) for key in scales)
        if name.startswith("maskllm"):
            assert {"logit_0", "logit_1", "logit_sq_1"} <= {key.split()[0] for key in states}
            dense = [key for key in states if key.startswith("dense ")]
            kept = {key: of_first["end"][key.replace("dense ", "mask ")] for key in dense}
            assert all(torch.equal(of_first["end"][key], of_first["middle"][key] * kept[key]) for key in dense)
