"""Runs cases on fake CUDA tensors in a process of its own, and writes what was seen as JSON: see `cases`.

python -m tests.fake_cuda.worker FILE [NAME ...]      all cases, or those that are named
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.fake_cuda import shim

if __name__ == "__main__":
    shim.load()

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

import sparseforge_ds as sf
from benchmarks.fake_cuda.counting import Cost, Counter, DeviceMixingError
from benchmarks.fake_cuda.engine import CUDA, BareEngine, Rank, attach, model_of, process_group
from tests.fake_cuda import training_loop
from tests.fake_cuda.cases import CASES, FAULTS, Case
from tests.zero.case import MODELS

MODE = FakeTensorMode()  # one for all: the package may keep small tensors from one run to the next
_BROKEN = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that the package, torch or transformers raises where a run cannot go on."""
TWO_LAYERS = ["*q_proj*", "*down_proj*"]


def run(case: Case) -> dict[str, Any]:
    """Return a run's moments with their waits, the operations that a device would refuse, and other faults."""
    records: dict[str, Any] = {"moments": [], "faults": [], "error": None}
    rank = Rank(3, 1, case.stage, 1000, getattr(torch, case.master), case.offload, loss_scale=case.loss_scale)
    config = sf.SparseForgeConfig.from_dict({"include": TWO_LAYERS, **case.block, "max_steps": case.steps})
    model_config = MODELS[case.model]().config
    with process_group(rank), MODE:
        model = sf.prepare(model_of(model_config, getattr(torch, case.weights)), config)
        with Counter() as counter:
            try:
                _run(case, config, model, rank, counter, records)
            except (DeviceMixingError, FakeTensorDeviceMismatchError) as error:
                records["faults"].append(f"device mixing: {error}")
            except _BROKEN:  # of one case, told by its test, while the others go on
                records["error"] = traceback.format_exc()[-4000:]
    return records


def _run(
    case: Case, config: sf.SparseForgeConfig, model: nn.Module, rank: Rank, counter: Counter, records: dict[str, Any]
) -> None:
    def note(moment: str, cost: Cost, ours: bool = False) -> None:
        """`ours`: without what the model itself waits for in its passes."""
        waits = {
            kind: {
                position: count for position, count in tally.items() if not ours or not position.startswith("elsewhere")
            }
            for kind, tally in (("syncs", cost.syncs), ("uploads", cost.uploads))
        }
        records["moments"].append({"moment": moment, **waits})
        records["faults"].extend(cost.faults)

    ids = torch.zeros((2, 6), dtype=torch.int64, device=CUDA)

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    # Attach and start, each counted by itself.
    with counter.phase() as cost:
        forge, engine = attach(model, config, rank, counter)
    note("attach", cost)
    _plant(case.fault, engine)
    with counter.phase() as cost:
        forge.start(loss)
    note("start", cost, ours=True)
    # Each step: a pass, the engine's step, and the forge's, each with its own count.
    for step in range(1, case.steps + 1):
        with counter.phase() as passed:
            engine.backward(loss())
        with counter.phase() as stepped:
            engine.step()
        with counter.phase() as cost:
            updated = forge.step(probe=loss)
        frozen = updated and step == config.resolved_schedule.freeze_step
        update = "probed update" if forge.needs_probe else "update"
        moment = "projection" if frozen else update if updated else "first" if step == 1 else "ordinary"
        note("first" if step == 1 else "ordinary", stepped)
        note("ordinary", passed, ours=True)
        note(moment, cost, ours=True)


def _plant(fault: str | None, engine: BareEngine) -> None:
    """Seed a fault into every step."""
    flat = engine.optimizer.flats[0]

    def faulty(*_: Any) -> None:
        if fault == "a CPU tensor into a CUDA operation":
            flat.data.mul_(torch.ones(flat.numel()))
        elif fault == "a CPU tensor into a collective":
            dist.all_reduce(torch.ones(3))
        elif fault == "bool":
            dist.all_reduce(torch.ones(3, dtype=torch.bool, device=CUDA))
        elif fault == "not contiguous":
            dist.all_reduce(torch.ones(3, 2, device=CUDA).t())
        elif fault == "item":
            flat.detach().sum().item()
        elif fault == "upload":
            flat.detach()[:1].copy_(torch.ones(1))

    if fault is not None:
        engine.basic_optimizer.register_step_post_hook(faulty)


if __name__ == "__main__":
    names = sys.argv[2:] or [*CASES, *FAULTS]
    records = {name: run({**CASES, **FAULTS}[name]) for name in names}
    if find_spec("triton"):
        with MODE:
            records["packed products"] = import_module("tests.fake_cuda.packed_products").products()
    if not sys.argv[2:]:
        with MODE:
            records["training loop"] = training_loop.waits()
    Path(sys.argv[1]).write_text(json.dumps(records), encoding="utf-8")
    os._exit(0)  # as in benchmarks/device_cost.py
