"""k steps, save, load, k steps equals 2k steps bit for bit; a checkpoint that does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseforge_ds.checkpoint.reader import Checkpoint
from tests.distributed import run_distributed
from tests.zero.case import Case, build, build_engine, probe_of, published, states, train_step

SAVES = (1, 2, 4, 6)
"""Before any update (at 2 and 4), after the first, between the last and the projection (at 5), frozen."""
STEPS = 7
SOONER = {"hardening": [0.2, 0.5]}
LOW_RANK = {"low_rank": {"k": 4}}
CASES: dict[str, Case] = {
    f"{stage}-{dtype}": Case(stage=stage, dtype=dtype, gas=gas, clip=0.5)
    for stage in (0, 1, 2, 3)
    for dtype, gas in (("fp32", 1), ("bf16", 2))
}
CASES["2-fp16"] = Case(stage=2, dtype="fp16")
CASES["3-low-rank"] = Case(stage=3, config=LOW_RANK)
CASES["3-learned-bf16"] = Case(stage=3, dtype="bf16", config={"low_rank": {"k": 4, "learned": True}})
CASES["1-low-rank-bf16"] = Case(stage=1, dtype="bf16", config={"low_rank": {"k": 4, "shift": False}})
# Saved between the freeze, at step 5, and the start of the branches.
CASES["2-low-rank-later"] = Case(stage=2, clip=0.1, config={"low_rank": {"k": 4, "shift": False, "start": 0.7}})
CASES["0-low-rank-conv1d"] = Case(stage=0, model="gpt2", config=LOW_RANK)
CASES["2-ragged-hutchinson"] = Case(stage=2, config={"exclude": ["*.k_proj.weight"], "importance": "hutchinson"})
CASES["3-hutchinson-weights"] = Case(stage=3, config={"importance": "hutchinson", "curvature": {"per_token": False}})
CASES["1-fp32-accumulation"] = Case(stage=1, dtype="bf16", more={"data_types": {"grad_accum_dtype": "fp32"}})
CASES["3-offload"] = Case(
    stage=3,
    dtype="bf16",
    zero={"offload_optimizer": {"device": "cpu"}},
    more={"zero_force_ds_cpu_optimizer": False},
)
# Masters and moments in bf16: our states stay fp32 beside them, through torch's cast of loaded state as well.
BF16_MASTERS = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
CASES["2-bf16-masters"] = Case(stage=2, dtype="bf16", more=BF16_MASTERS)
CASES["3-bf16-masters"] = Case(stage=3, dtype="bf16", more=BF16_MASTERS)
# The first save is between two steps that are heard.
TRAINING = {"curvature": {"source": "training"}}
CASES["0-training"] = Case(stage=0, config=TRAINING)
CASES["1-training-fp16"] = Case(stage=1, dtype="fp16", config=TRAINING)
CASES["2-training-experts"] = Case(stage=2, model="qwen3_moe", config=TRAINING)
CASES["3-training-bf16"] = Case(stage=3, dtype="bf16", gas=2, config=TRAINING)
CASES["3-experts"] = Case(stage=3, model="qwen3_moe")
CASES["1-experts-bf16"] = Case(stage=1, dtype="bf16", model="qwen3_moe", gas=2)
CASES["3-magnitude"] = Case(stage=3, config={"importance": "magnitude"})


def hardened_sooner(case: Case) -> Case:
    return replace(case, config={**case.config, "method": SOONER})


def one_step(engine: Any, forge: Any, case: Case, step: int) -> tuple[float, dict[str, float] | None]:
    loss = train_step(engine, case, step)
    updated = forge.step(probe_of(engine, case, step))
    metrics = {name: value for name, value in forge.metrics.items() if name != "mask/flip_rate"}
    return loss, metrics if updated else None


def state_of(engine: Any, forge: Any) -> dict[str, Any]:
    keys = ["dense", "mask"] + (["curvature"] if forge.curvature.is_needed else [])
    state = {
        f"{key} {name}": value for key, by_weight in states(forge, *keys).items() for name, value in by_weight.items()
    }
    state |= {f"published {name}": value for name, value in published(engine).items()}
    for index, flat in enumerate(forge.sharded.layout.flats):
        for key, value in engine.basic_optimizer.state[flat].items():
            state[f"{key} {index}"] = torch.as_tensor(value).clone()
    return state


def unbroken(case: Case, folder: str) -> tuple[list[Any], dict[str, Any]]:
    engine, forge = build(case)
    forge.start(probe_of(engine, case, 0))
    records = []
    for step in range(STEPS):
        records.append(one_step(engine, forge, case, step))
        if step + 1 in SAVES:
            engine.save_checkpoint(folder, tag=f"step{step + 1}")
    return records, state_of(engine, forge)


def resumed(case: Case, folder: str, save: int, restore: bool) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(99)
    engine, forge = build(case)
    if restore:
        forge.restore(Checkpoint(Path(folder, f"step{save}")))
    else:
        engine.load_checkpoint(folder, tag=f"step{save}")
    forge.start(None)
    assert forge.step_count == save
    return [one_step(engine, forge, case, step) for step in range(save, STEPS)], state_of(engine, forge)


def compare(cases: dict[str, Case], folder: str) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for index, (name, case) in enumerate(cases.items()):
        inside = str(Path(folder, name))
        records, state = unbroken(case, inside)
        problems = result[name] = []
        plain = name == f"{case.stage}-{case.dtype}"
        for number, save in enumerate(SAVES if plain else SAVES[index % 2 :: 2]):
            restore = (number + (plain and case.dtype == "bf16")) % 2 == 1
            seen_again, state_again = resumed(case, inside, save, restore)
            where = f"{'forge.restore' if restore else 'engine.load_checkpoint'} after {save}"
            if seen_again != records[save:]:
                problems.append(f"{where}: {seen_again} is not {records[save:]}")
            assert state.keys() == state_again.keys(), where
            problems += [f"{where}: {key}" for key in state if not torch.equal(state[key], state_again[key])]
    return result


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_is_bit_for_bit(stage: int, tmp_path: Path) -> None:
    """Resume from every save and in both ways, half of the pairs in fp32 and half in bf16.

    A case that is about something else resumes from two saves, each in one way.
    """
    cases = {name: hardened_sooner(case) for name, case in CASES.items() if case.stage == stage}
    for rank in run_distributed(compare, 2, cases, str(tmp_path)):
        assert rank == {name: [] for name in cases}


def foreign(stage: int, folder: str) -> dict[str, str]:
    """Return the message about a checkpoint of another kind of run."""
    case = Case(stage=stage)
    engine, forge = build(case)
    for step in range(3):
        one_step(engine, forge, case, step)
    engine.save_checkpoint(folder, tag="ours", client_state={"mine": [3]})
    # Checkpoints of a run, of a plain engine, and with a damaged state of the forge.
    good = forge.state_dict()
    damaged = {
        "weights": {**good, "weights": good["weights"][:-1]},
        "version": {**good, "version": 0},
        "magnitude": {**good, "config": {**good["config"], "importance": "magnitude"}},
    }
    for tag, state in damaged.items():
        engine.save_checkpoint(folder, tag=tag, client_state={"sparseforge": state})
    plain = build_engine(case)
    train_step(plain, case, 0)
    plain.save_checkpoint(folder, tag="plain", client_state={"sparseforge": good})
    plain.save_checkpoint(folder, tag="foreign")

    def refusal(other: Case, tag: str, **options: Any) -> str:
        engine, _ = build(other)
        try:
            path, client_state = engine.load_checkpoint(folder, tag=tag, **options)
        except ValueError as error:
            return str(error)
        assert Path(path) == Path(folder, tag) and client_state["mine"] == [3]
        return "accepted"

    # Between `start` and the first step nothing can be saved.
    begun = replace(case, config={"method": "sr_ste"})
    engine, forge = build(begun)
    forge.start(probe_of(engine, begun, 0))
    with pytest.raises(ValueError) as at_start:
        engine.save_checkpoint(folder, tag="start")
    # What may differ; and the user's own state, which goes through a second save.
    monitored = Case(stage=stage, config={"monitor": {"gap_every": 3}})
    engine, forge = build(case)
    _, client_state = engine.load_checkpoint(folder, tag="ours")
    for step in range(3, 5):
        one_step(engine, forge, case, step)
    engine.save_checkpoint(folder, tag="again", client_state={**client_state, "step": 5})
    engine, forge = build(case)
    _, client_state = engine.load_checkpoint(folder, tag="again")
    return {
        "again": f"{forge.step_count} {sorted(client_state)}",
        "pattern": refusal(Case(stage=stage, config={"pattern": "1:4"}), "ours"),
        "schedule": refusal(Case(stage=stage, config={"method": {"mask_rate": 0.5}}), "ours"),
        "max_steps": refusal(Case(stage=stage, config={"max_steps": 20}), "ours"),
        "at the start": str(at_start.value),
        "weights": refusal(case, "weights"),
        "version": refusal(case, "version"),
        "magnitude": refusal(case, "magnitude"),
        "plain": refusal(case, "plain"),
        "foreign": refusal(case, "foreign"),
        "module only": refusal(case, "ours", load_module_only=True),
        "no optimizer": refusal(case, "ours", load_optimizer_states=False),
        "monitor": refusal(monitored, "ours"),
        "same": refusal(case, "ours"),
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(stage: int, tmp_path: Path) -> None:
    messages = run_distributed(foreign, 2, stage, str(tmp_path))[0]
    assert 'sparseforge.pattern was "2:4", is "1:4"' in messages["pattern"]
    assert "sparseforge.method.mask_rate was 0.4, is 0.5" in messages["schedule"]
    assert "is of a run of 10 steps, and this one has 20: masks are scheduled in" in messages["max_steps"]
    # At stage 0 the list says what lies in the flats as well, and is missed before the runs are compared.
    missed = "the param groups in its client state" if stage == 0 else "was null, is"
    assert "weights" in messages["weights"] and missed in messages["weights"]
    assert messages["at the start"].endswith("save after a step, or before forge.start")
    assert "version 0" in messages["version"]
    assert 'sparseforge.importance was "magnitude"' in messages["magnitude"]
    assert "holds no" in messages["plain"] and "dense, mask" in messages["plain"]
    assert "was not saved by SparseForge" in messages["foreign"]
    assert "optimizer states" in messages["module only"]
    assert "optimizer states" in messages["no optimizer"]
    assert messages["monitor"] == messages["same"] == "accepted"
    assert messages["again"] == "5 ['mine', 'step']", (
        "what a load returns may be saved again, as DeepSpeed's examples do"
    )
