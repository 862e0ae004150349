"""State that is left once masks are frozen: one bit a weight, also in checkpoints, and masters that train."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseforge_ds.checkpoint.reader import Checkpoint
from tests.distributed import run_distributed
from tests.zero.case import Case, build, build_engine, gathered, probe_of, published, republish, train_step
from tests.zero.test_resume import BF16_MASTERS

FREEZE = 7
ODD = {"exclude": ["*.down_proj.weight", "*.up_proj.weight", "*.k_proj.weight"]}
CASES: dict[str, Case] = {
    **{f"{stage}-fp32": Case(stage=stage, model="llama_odd", config=ODD, clip=0.5) for stage in range(4)},
    "3-bf16-elements": Case(stage=3, dtype="bf16", config={"curvature": {"factored": False}}),
    "1-offload": Case(
        stage=1,
        zero={"offload_optimizer": {"device": "cpu"}},
        more={"zero_force_ds_cpu_optimizer": False},
        config={"importance": "magnitude"},
    ),
    "2-bf16-masters": Case(stage=2, dtype="bf16", more=BF16_MASTERS),
    "3-fixed": Case(stage=3, config={"method": "naive_retrain"}),
    "2-branches-later": Case(stage=2, config={"low_rank": {"k": 4, "shift": False, "start": 0.8}}),
    "1-maskllm": Case(stage=1, config={"method": {"name": "maskllm", "frozen": 0.3}}),
    "3-maskllm-cut": Case(stage=3, model="llama_odd", config={**ODD, "method": {"name": "maskllm", "frozen": 0.3}}),
    "2-maskllm-bf16-masters": Case(
        stage=2, dtype="bf16", more=BF16_MASTERS, config={"method": {"name": "maskllm", "frozen": 0.3}}
    ),
    "3-ast": Case(stage=3, config={"method": {"name": "ast", "every": 2, "decay": 0.01, "frozen": 0.3}}),
    # Groups of scales are 4 inputs or all 20, which shards cut.
    "0-quantized": Case(stage=0, clip=0.5, config={"quantize": {"group_size": None}}),
    "3-quantized": Case(stage=3, model="llama_odd", config={**ODD, "quantize": {"group_size": 2, "from": 0.2}}),
    "2-bf16-quantized-bf16-masters": Case(
        stage=2, dtype="bf16", more=BF16_MASTERS, config={"quantize": {"group_size": None, "bits": 3}}
    ),
}


class Drifting(torch.optim.SGD):
    """Moves weights that have no gradient as well."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """SGD, and a drift."""
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1e-3)


def states_of(engine: Any, forge: Any) -> list[str]:
    """List the states of a forge in the optimizer's state, and those that DeepSpeed has views of."""
    state = engine.basic_optimizer.state
    keys = {key for flat in forge.sharded.layout.flats for key in state.get(flat, {})}
    for parameter in engine.module.parameters():
        mapping = getattr(parameter, "_hp_mapping", None)
        keys |= set() if mapping is None or mapping.optim_fragment is None else mapping.optim_fragment.keys()
    return sorted(keys & {"dense", "mask", "curvature"})


def strange_zeros(forge: Any) -> list[str]:
    """Pruned weights that are not +0.0 bit for bit, or have a moment."""
    problems = []
    for shard in forge.sharded.shards.values():
        if not shard.numel:
            continue
        pruned = ~forge.sharded.state.read_kept(shard)
        flat = forge.sharded.layout.flats[shard.flat]
        tensors = {"master": flat.data, "trained": forge.sharded.state.weights_being_trained(shard.flat)}
        tensors |= {k: v for k, v in forge.sharded.layout.inner.state[flat].items() if k.startswith("exp_avg")}
        for key, value in tensors.items():
            pruned_values = shard.slice_of_flat(value)[pruned]
            if pruned_values.count_nonzero() or (key in ("master", "trained") and pruned_values.signbit().any()):
                problems.append(f"{key} of {shard.name}")
    return problems


def go_on(engine: Any, forge: Any, case: Case, start: int, stop: int) -> list[str]:
    problems = []
    for step in range(start, stop):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
        if forge.sharded.state.released:
            problems += [f"step {step + 1}: {problem}" for problem in strange_zeros(forge)]
    return problems


def released(cases: dict[str, Case], folder: str) -> dict[str, dict[str, Any]]:
    results = {}
    for name, case in cases.items():
        engine, forge = build(case)
        forge.start(probe_of(engine, case, 0))
        before = states_of(engine, forge)
        release = case.sparseforge.release_step
        problems = go_on(engine, forge, case, 0, max(release, 1))
        after = states_of(engine, forge)
        mask = gathered(forge, "mask")
        problems += go_on(engine, forge, case, max(release, 1), 9)
        same = all(torch.equal(mask[weight], value) for weight, value in gathered(forge, "mask").items())
        bits = sum(value.numel() for value in forge.sharded.state.kept.values())
        numel = sum(forge.sharded.layout.flats[index].numel() for index in forge.sharded.state.shards_in)
        # One kept weight becomes 0 by accident, on the last rank that has one.
        shard = next((s for s in reversed(forge.sharded.shards.values()) if s.numel), None)
        if shard is not None:
            position = int(forge.sharded.state.read_kept(shard).nonzero()[0])
            for weights in (
                forge.sharded.state.weights_being_trained(shard.flat),
                forge.sharded.layout.flats[shard.flat].data,
            ):
                shard.slice_of_flat(weights)[position] = 0.0
        republish(forge)
        engine.save_checkpoint(str(Path(folder, name)), tag="end")
        results[name] = {
            "before": before,
            "after": after,
            "problems": problems,
            "same": same,
            "bits": bits / numel,
            "mask": gathered(forge, "mask"),
            "published": published(engine),
        }
    return results


def resumed(cases: dict[str, Case], folder: str) -> dict[str, dict[str, Any]]:
    results = {}
    for name, case in cases.items():
        case = replace(case, stage=1 + case.stage % 3 if not case.zero else case.stage)
        engine, forge = build(case)
        forge.restore(Checkpoint(Path(folder, name, "end")))
        mask = gathered(forge, "mask")
        weights = published(engine)
        gap = forge.soft_to_hard_gap(probe_of(engine, case, 9))
        problems = go_on(engine, forge, case, 9, 10) + ([] if gap == 0 else [f"a gap of {gap} behind the freeze"])
        results[name] = {"mask": mask, "published": weights, "problems": problems}
    return results


def test_one_bit_is_left_of_a_frozen_mask(tmp_path: Path) -> None:
    saved = run_distributed(released, 2, CASES, str(tmp_path))
    for rank in saved:
        for name, results in rank.items():
            elements = ["curvature"] if name == "3-bf16-elements" else []
            fixed = CASES[name].sparseforge.release_step == 0
            coarse = name.endswith(("bf16-masters", "quantized"))
            assert results["before"] == [], name  # they wait for the first step
            assert results["after"] == (["dense"] if coarse else []), (name, elements, fixed)
            assert results["problems"] == [] and results["same"], (name, results["problems"][:3])
            assert results["bits"] == pytest.approx(1 / 8, rel=0.02), name
    moved = run_distributed(resumed, 3, CASES, str(tmp_path))[0]
    for name, results in moved.items():
        first = saved[0][name]
        assert results["problems"] == [], (name, results["problems"][:3])
        for weight, mask in first["mask"].items():
            assert torch.equal(results["mask"][weight], mask), (name, weight)
        for weight, value in first["published"].items():
            if value.shape == results["published"][weight].shape:
                assert torch.equal(results["published"][weight], value), (name, weight)


def drifted() -> list[str]:
    import deepspeed

    import sparseforge_ds as sf
    from tests.zero.case import MODELS

    case = Case(stage=2, client=True, config={"importance": "magnitude"})
    model = sf.prepare(MODELS[case.model](), case.sparseforge)
    param_groups = sf.param_groups(model, case.sparseforge)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups, optimizer=Drifting(param_groups, lr=1e-2), config=case.deepspeed()
    )
    forge = sf.SparseForge(engine, case.sparseforge)
    return go_on(engine, forge, case, 0, 9) if forge.step_count == 0 else ["begun"]


def test_pruned_weights_stay_zero_under_optimizers_that_move_them_without_gradients() -> None:
    assert run_distributed(drifted, 2)[0] == []


def foreign(folder: str) -> list[str]:
    """Return the messages about a checkpoint of plain DeepSpeed, one with other bits than its weights, and with fewer.

    The last one is about the optimizer's own loading.
    """
    case = Case(stage=2)
    engine, forge = build(case)
    go_on(engine, forge, case, 0, FREEZE + 1)
    engine.save_checkpoint(folder, tag="damaged")
    if engine.global_rank == 0:
        (file,) = Path(folder, "damaged").glob("*_rank_0_*optim_states.pt")
        content = torch.load(file, weights_only=False)
        # The first two groups keep the other two of their members.
        content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["kept"][0] ^= 0xFF
        torch.save(content, file)
    engine.save_checkpoint(folder, tag="cut")
    if engine.global_rank == 1:
        (file,) = Path(folder, "cut").glob("*_rank_1_*optim_states.pt")
        content = torch.load(file, weights_only=False)
        kept_state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        kept_state["kept"] = kept_state["kept"][:-3].clone()
        torch.save(content, file)
    state = forge.state_dict()
    plain = build_engine(case)
    train_step(plain, case, 0)
    plain.save_checkpoint(folder, tag="plain", client_state={"sparseforge": state})
    messages = []
    for tag in ("plain", "damaged", "cut", None):
        engine, forge = build(case)
        try:
            if tag is None:
                engine.basic_optimizer.load_state_dict(engine.basic_optimizer.state_dict())
            else:
                engine.load_checkpoint(folder, tag=tag)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_weights_that_are_not_sparse_are_not_taken_for_frozen(tmp_path: Path) -> None:
    for plain, damaged, cut, alone in run_distributed(foreign, 2, str(tmp_path)):
        assert "holds no kept of " in plain and "it was not saved by a run whose masks are frozen" in plain
        assert "masks are frozen, but groups of its weights are not 2:4" in damaged
        assert re.fullmatch(r".*cut: the mask bits of \S+ are damaged; use another checkpoint", cut)
        assert alone.startswith("AdamW.load_state_dict loads a part") and alone.endswith("or forge.restore")


def first_published(cases: list[Case]) -> list[dict[str, int]]:
    """Return the number of values in the first output of each weight, as the first forward sees it."""
    results = []
    for case in cases:
        engine, forge = build(case)
        if not forge.ready:
            forge.start(probe_of(engine, case, 0))
        weights = published(engine)
        results.append({name: len(weights[name][0].unique()) for name in forge.sharded.prunable})
    return results


def test_weights_that_are_quantized_from_the_beginning_are_so_in_the_first_step() -> None:
    quantize = {"quantize": {"from": 0.0, "group_size": None, "bits": 3}}
    cases = [
        *(Case(stage=stage, config=quantize) for stage in range(4)),
        Case(stage=2, dtype="bf16", more=BF16_MASTERS, config=quantize),
        Case(stage=1, config={**quantize, "method": "naive_retrain"}),
    ]
    for counts in run_distributed(first_published, 2, cases)[0]:
        assert all(count <= 8 for count in counts.values()), counts
