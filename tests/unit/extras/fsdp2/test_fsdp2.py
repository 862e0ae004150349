"""A model under FSDP2 gets the masks of one DeepSpeed process, on 2 and 3 gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sparseforge_ds as sf
from sparseforge_ds.cli.main import main
from sparseforge_ds.extras.fsdp2 import Fsdp2Engine
from tests.distributed import run_distributed
from tests.zero.case import MODELS, Case, StepText, run_all, states, train_step

ODD = {"exclude": ["*.down_proj.weight"]}
CASES = [
    Case(config={"curvature": {"source": "training"}}, clip=0.1, steps=9),
    Case(model="llama_odd", config=ODD, gas=2, steps=9),
    # Rows of a Conv1D are inputs: ranks cut its groups.
    Case(model="gpt2", steps=9),
]


def engine_of(case: Case) -> Fsdp2Engine:
    model = sf.prepare(MODELS[case.model](), case.sparseforge)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dtype = torch.bfloat16 if case.dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.transformer.h if case.model == "gpt2" else model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    param_groups = sf.param_groups(model, case.sparseforge, weight_decay=case.weight_decay)
    adamw = lambda param_groups: torch.optim.AdamW(param_groups, lr=case.lr, eps=case.eps)  # noqa: E731
    return Fsdp2Engine(model, param_groups, adamw, case.gas, case.clip)


def run_fsdp2(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """`tests.zero.case.run` on FSDP2, with each model saved at the end."""
    records = []
    for number, case in enumerate(cases):
        engine = engine_of(case)
        forge = sf.SparseForge(engine, case.sparseforge)
        forge.start(StepText(engine, case, 0))
        record: dict[str, Any] = {"losses": [], "updates": []}
        for step in range(case.steps):
            record["losses"].append(train_step(engine, case, step))
            if forge.step(StepText(engine, case, step)):
                record["updates"].append(states(forge, "mask"))
        forge.finish()
        record |= states(forge, "mask", "dense") | {"cut": forge.sharded.halo.any_cut}
        record["dtype"] = forge.sharded.layout.compute_dtype
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        record["published"] = get_model_state_dict(engine.module, options=options)
        if dist.get_rank() == 0:
            emptied = dict(record["published"])  # by save_pretrained
            engine.module.save_pretrained(folder / str(number), state_dict=emptied)
        records.append(record)
    # What cannot be done is one sentence.
    for refused in (lambda: engine.save_checkpoint(str(folder)), lambda: sf.SparseForge(engine, case.sparseforge)):
        with pytest.raises(ValueError) as error:
            refused()
        records[-1].setdefault("refused", []).append(str(error.value))
    return records


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    return run_distributed(run_all, 1, CASES)[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_masks_are_those_of_one_process(world_size: int, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    in_bf16 = Case(dtype="bf16", steps=9)
    *of_ranks, half = run_distributed(run_fsdp2, world_size, [*CASES, in_bf16], tmp_path)[0]
    for single, divided in zip(expected, of_ranks, strict=True):
        assert divided["losses"] == pytest.approx(single["losses"], abs=1e-4)
        for first, second in zip(single["updates"], divided["updates"], strict=True):
            for name, mask in first["mask"].items():
                assert (second["mask"][name] - mask).abs().max() < 2e-5, name
        for name, mask in single["mask"].items():
            assert torch.equal(divided["mask"][name], mask), name
            # What the order of sums does to 9 steps of Adam.
            assert (divided["dense"][name] - single["dense"][name]).abs().max() < 1e-4, name
    for record in (*of_ranks, half):
        for name, mask in record["mask"].items():
            assert set(mask.unique().tolist()) == {0.0, 1.0}
            assert torch.equal((record["published"][name].flatten() != 0).float(), mask), name
    assert [record["cut"] for record in of_ranks] == [False, False, True]
    assert [record["dtype"] for record in (*of_ranks, half)] == [torch.float32] * 3 + [torch.bfloat16]
    assert main(["verify", str(tmp_path / "0")]) == 0
    assert "cannot be saved for a resume yet" in half["refused"][0] and "attached to it already" in half["refused"][1]


def policies(dtypes: list[Any]) -> str:
    """Attach to a model whose MLP, layer, head and rest have such policies; return the dtype, or what is refused."""
    case = CASES[0]
    model = sf.prepare(MODELS[case.model](), case.sparseforge)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    (layer,) = model.model.layers
    modules = [layer.mlp, layer, model.lm_head, model]
    for module, dtype in zip(modules, dtypes, strict=True):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    param_groups = sf.param_groups(model, case.sparseforge)
    try:
        forge = sf.SparseForge(Fsdp2Engine(model, param_groups, torch.optim.AdamW), case.sparseforge)
    except ValueError as error:
        return str(error)
    return str(forge.sharded.layout.compute_dtype)


def test_the_policy_of_pruned_weights_decides_what_is_computed_in() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert run_distributed(policies, 2, [bf16, bf16, fp32, None])[0] == "torch.bfloat16"
    assert run_distributed(policies, 2, [None, None, bf16, None])[0] == "torch.float32"
    refused = run_distributed(policies, 2, [bf16, None, fp32, None])[0]
    assert "was given torch.bfloat16 and torch.float32 as MixedPrecisionPolicy.param_dtype" in refused


def test_weights_that_are_no_rows_of_fp32_are_refused() -> None:
    case = CASES[0]
    model = MODELS["llama"]()
    param_groups = sf.param_groups(model, case.sparseforge)
    with pytest.raises(ValueError, match="not divided along dimension 0: call fully_shard on the whole model"):
        Fsdp2Engine(model, param_groups, torch.optim.AdamW)
