"""A mask of one everywhere is plain DeepSpeed AdamW, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.zero.case import Case, build_engine, probe_of, published, train_step

NOTHING_HAPPENS = {"max_steps": 1000, "method": {"update_every": 50, "hardening": [0.1, 0.3]}}
CASES: dict[str, Case] = {
    f"{stage}-{dtype}": Case(stage=stage, dtype=dtype, config=NOTHING_HAPPENS, gas=2, clip=0.2, steps=4)
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16", "fp16")
}
CASES["1-bf16-fp32-accumulation"] = Case(
    stage=1, dtype="bf16", config=NOTHING_HAPPENS, more={"data_types": {"grad_accum_dtype": "fp32"}}, steps=4
)
CASES["2-bf16-offload"] = Case(
    stage=2,
    dtype="bf16",
    config=NOTHING_HAPPENS,
    zero={"offload_optimizer": {"device": "cpu"}},
    more={"zero_force_ds_cpu_optimizer": False},
    steps=4,
)
CASES["3-fp32-client-small-sub-groups"] = Case(
    stage=3, config=NOTHING_HAPPENS, client=True, zero={"sub_group_size": 300}, steps=4
)


def train(case: Case, forged: bool) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    import sparseforge_ds as sf

    engine = build_engine(case)
    forge = sf.SparseForge(engine, case.sparseforge) if forged else None
    losses = []
    for step in range(case.steps):
        losses.append(train_step(engine, case, step))
        if forge is not None:
            assert not forge.step(probe_of(engine, case, step))
    moments = [
        value.detach().clone()
        for group in engine.basic_optimizer.param_groups
        for flat in group["params"]
        for key, value in engine.basic_optimizer.state[flat].items()
        if key.startswith("exp_avg")
    ]
    return losses, published(engine), {"moments": moments}


def both(case: Case) -> list[str]:
    plain = train(case, forged=False)
    forged = train(case, forged=True)
    problems = []
    if plain[0] != forged[0]:
        problems.append(f"losses {plain[0]} {forged[0]}")
    problems += [name for name, value in plain[1].items() if not torch.equal(value, forged[1][name])]
    if not all(torch.equal(a, b) for a, b in zip(plain[2]["moments"], forged[2]["moments"], strict=True)):
        problems.append("moments")
    return problems


def both_all(cases: dict[str, Case]) -> dict[str, list[str]]:
    return {name: both(case) for name, case in cases.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_mask_of_one_is_plain_deepspeed(world_size: int) -> None:
    chosen = CASES if world_size == 2 else {name: CASES[name] for name in ("0-fp32", "0-bf16", "2-fp16", "3-bf16")}
    for rank in run_distributed(both_all, world_size, chosen):
        assert rank == {name: [] for name in chosen}
