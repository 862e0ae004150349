"""Every ZeRO stage in one launch: train, save, resume at the next stage, freeze, export, verify."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.cli.main import main
from tests.distributed import run_distributed
from tests.zero.case import Case, batch_at, build, probe_of, states, train_step

pytestmark = pytest.mark.fast

SAVE, STEPS = 4, 9
"""In the middle of hardening, and after the freeze."""
CASES = (
    Case(stage=0),
    Case(stage=1, model="gpt2"),
    Case(stage=2, model="llama_odd", config={"exclude": ["*.down_proj.weight"]}),
    Case(stage=3, config={"importance": "magnitude"}),
)


def train(engine: Any, forge: Any, case: Case, first: int, last: int) -> None:
    for step in range(first, last):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))


def save(engine: Any, forge: Any, run: Path) -> None:
    engine.save_checkpoint(str(run / "checkpoints"), tag="step")


def walk(folder: Path) -> list[dict[str, Any]]:
    """Return masks and weights at the end of each case, in one go and with a change of stage."""
    results = []
    for case in CASES:
        # In one go, with a save on its way.
        engine, forge = build(case)
        forge.start(probe_of(engine, case, 0))
        train(engine, forge, case, 0, SAVE)
        save(engine, forge, folder / f"{case.stage}-half")
        train(engine, forge, case, SAVE, STEPS)
        straight = states(forge, "mask", "dense")

        # From there on at the next stage, to a finished run that tools can read.
        target = replace(case, stage=(case.stage + 1) % 4)
        engine, forge = build(target)
        forge.restore(Checkpoint(folder / f"{case.stage}-half" / "checkpoints" / "step"))
        train(engine, forge, target, SAVE, STEPS)
        forge.finish()
        run = folder / str(case.stage)
        save(engine, forge, run)
        if torch.distributed.get_rank() == 0:
            engine.module.config.save_pretrained(run / "model")
            (run / "sparseforge.json").write_text(json.dumps({"coverage": {"masked": 1}}))
        engine.eval()
        with torch.no_grad():
            logits = engine(batch_at(0)["input_ids"]).logits
        moved = states(forge, "mask", "dense")
        results.append({"straight": straight, "moved": moved, "logits": logits})
    return results


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("walk")
    return folder, run_distributed(walk, 2, folder)[0]


@pytest.mark.parametrize("stage", range(4))
def test_a_run_that_changes_its_stage_ends_where_it_would_have(walked: Any, stage: int) -> None:
    record = walked[1][stage]
    for name, mask in record["straight"]["mask"].items():
        assert torch.equal(record["moved"]["mask"][name], mask), name
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert (record["moved"]["dense"][name] - record["straight"]["dense"][name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("stage", range(4))
def test_its_export_verifies_and_computes_what_the_engine_did(walked: Any, tmp_path: Path, stage: int) -> None:
    folder, records = walked
    proof = [] if stage == 0 else ["--skip_proof"]  # in a process of its own, which takes seconds
    assert main(["export", str(folder / str(stage)), str(tmp_path / "out"), *proof]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(model(batch_at(0)["input_ids"]).logits, records[stage]["logits"])
    state = model.state_dict()
    for name, mask in records[stage]["moved"]["mask"].items():
        assert torch.equal((state[name].flatten() != 0).float(), mask), name
