"""A run that was interrupted equals one that was not, bit for bit; and it may go on in another layout of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparseforge_ds.checkpoint.manifest import fingerprint
from sparseforge_ds.train import trainer
from tests.distributed import run_distributed
from tests.end_to_end.test_train import differences, flags_of, run_trainer, states, train
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_model, write_text
from tests.tiny_models import tiny_gpt2

STEPS = 12
LAST = "step_000012"
PLACES = {2: "heating", 6: "hardening", 10: "frozen finetune"}
"""Steps of a run that hardens from step 3 to step 9. An epoch is six steps and a bit, the second place near its end:
from there stages 0 and 1 go on, of which tests/zero/test_resume.py has every phase."""


def inputs(folder: Path, stage: int, **block: Any) -> list[str]:
    """Flags of a run on a model that draws random numbers in every forward pass."""
    model = tiny_gpt2(
        vocab_size=BYTE_VOCABULARY,
        bos_token_id=256,
        eos_token_id=257,
        resid_pdrop=0.2,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    write_model(folder / "model", model)
    write_text(folder / "text.jsonl", documents=20)
    method = {"update_every": 1, "hardening": [0.25, 0.75]}
    block = {"max_steps": STEPS, "method": method, "distillation": {"hidden": {"until": 1.0}}, **block}
    content = deepspeed_json(stage, batch=8, **block)
    content["gradient_accumulation_steps"] = 2
    return flags_of(folder, content, max_steps=STEPS, save_every=2, keep_checkpoints=0, log_every=1)


def continued(flags: list[str], run: Path, step: int) -> Path:
    """Copy the run, taken back to `step`, without its log and without what it came to later."""
    copy = run.with_name(f"from_{step}")
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "tensorboard")
    for path in (copy / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    train(*(flag for flag in flags if not flag.startswith("--output_dir")), f"--output_dir={copy}", "--resume")
    return copy


def log(run: Path, after: int) -> dict[str, list[tuple[int, float]]]:
    """Return the log of the training without the flip rate, which compares with an update that is not saved."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    left_out = ("train/tokens_per_second", "train/memory_gib", "checkpoint/seconds", "checkpoint/gib", "mask/flip_rate")
    tags = [tag for tag in events.Tags()["scalars"] if tag not in left_out]
    result = {tag: [(e.step, e.value) for e in events.Scalars(tag) if e.step > after] for tag in tags}
    return {tag: values for tag, values in result.items() if values}


def generators(run: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted((run / "checkpoints" / LAST).glob("random_*.json"))]


def _main_beside_a_run_that_ends(flags: list[str], saved: str) -> int:
    """Run the launcher's body; just before it locks the folder, the run that had the lock saves and ends."""
    lock_folder = trainer.lock_folder

    def lock(folder: Path) -> int:
        Path(saved).mkdir(parents=True)
        return lock_folder(folder)

    with mock.patch.object(trainer, "lock_folder", lock):
        return run_trainer(flags)


def test_a_run_that_was_decided_on_before_another_one_saved_is_not_begun(tmp_path, capfd):
    saved = tmp_path / "run" / "checkpoints" / "step_000001"
    flags = [*inputs(tmp_path, 1), "--resume", "auto"]
    assert run_distributed(_main_beside_a_run_that_ends, 1, flags, str(saved)) == [1]
    output = capfd.readouterr()
    assert "already holds a run with checkpoints; continue it with --resume" in output.out + output.err
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_goes_on_from_any_phase_as_if_it_had_not_stopped(tmp_path, stage):
    """Weights, masks, curvature, moments, loss scale, schedules, data position, dropout, and the log of the losses."""
    flags = inputs(tmp_path, stage)
    train(*flags)
    run = tmp_path / "run"
    straight = states(run / "checkpoints" / LAST)
    assert generators(run)[0] != generators(run)[1]
    for step in PLACES if stage >= 2 else (6,):
        copy = continued(flags, run, step)
        assert differences(straight, states(copy / "checkpoints" / LAST)) == []
        assert generators(copy) == generators(run)
        assert log(copy, 0) == log(run, step) != {}
    state = next(content for name, content in straight.items() if "model_states" in name)
    assert state["train"]["step"] == state["sparseforge"]["step"] == STEPS
    assert state["train"]["data"]["position"] == STEPS * 8
    assert "rng" not in state["train"]


def test_the_random_numbers_matter(tmp_path):
    """Were they not restored, the test above would fail: here two ranks get each other's."""
    flags = inputs(tmp_path, 2)
    train(*flags)
    run = tmp_path / "run"
    folder = run / "checkpoints" / "step_000006"
    ranks = [(folder / f"random_0000{rank}.json") for rank in range(2)]
    contents = [path.read_bytes() for path in ranks]
    record = json.loads((folder / "checkpoint.json").read_text())
    for path, content in zip(ranks, reversed(contents), strict=True):
        path.write_bytes(content)
        record["files"][path.name] = len(content)
        record["fingerprints"][path.name] = fingerprint(path)
    (folder / "checkpoint.json").write_text(json.dumps(record))
    copy = continued(flags, run, 6)
    assert differences(states(run / "checkpoints" / LAST), states(copy / "checkpoints" / LAST)) != []


@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 0)), ((1, 0), (2, 2)), ((2, 2), (3, 3))])
def test_a_run_goes_on_with_other_ranks_and_another_stage(tmp_path, capsys, before, after):
    """Compare losses of the same global batches, by magnitude, as a probe is one micro-batch of the layout."""
    results = []
    for ranks, stage in (before, after):
        content = deepspeed_json(stage, batch=6, importance="magnitude")
        flags = flags_of(tmp_path, content, save_every=4, keep_checkpoints=0)
        if not results:
            train(*flags, ranks=ranks)
            shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000008")
            capsys.readouterr()
        else:
            train(*flags, "--resume", ranks=ranks)
        results.append(json.loads((tmp_path / "run" / "result.json").read_text())["last_step"])
    output = capsys.readouterr().out
    assert (
        f"(saved by {before[0]} ranks at ZeRO stage {before[1]}, going on with {after[0]} at stage {after[1]})"
        in output
    )
    assert "random numbers start anew from seed 0, step and rank" in output
    assert results[1]["loss/total"] == pytest.approx(results[0]["loss/total"], rel=1e-4)
    record = json.loads((tmp_path / "run" / "checkpoints" / "step_000008" / "checkpoint.json").read_text())
    assert (record["world_size"], record["zero_stage"]) == after
