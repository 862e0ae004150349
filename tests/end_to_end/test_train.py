"""The shipped command, from the command line to the run folder."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from sparseforge_ds.cli.main import main as command
from sparseforge_ds.export.stored import StoredWeights
from sparseforge_ds.train import step_log
from sparseforge_ds.train.launcher import free_port
from tests.distributed import PATIENCE, run_distributed
from tests.tiny_folders import deepspeed_json, write_json, write_model, write_text

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "ds_configs"


def launch(*flags: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """`deepspeed --num_gpus RANKS launch/train.py FLAGS`, as a user types it."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(ranks)]
    command += ["--master_port", str(free_port())]
    return subprocess.run(
        [*command, "launch/train.py", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def run_trainer(command_line: list[str]) -> int:
    from sparseforge_ds.train.trainer import main

    return main(command_line)


def train(*flags: str, ranks: int = 2) -> None:
    """Run the trainer without the launcher's seconds."""
    assert run_distributed(run_trainer, ranks, list(flags)) == [0] * ranks


def flags_of(folder: Path, content: dict[str, Any], **more: Any) -> list[str]:
    """Return the flags of a run on tiny inputs in `folder`."""
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_text(folder / "text.jsonl", documents=200)
    flags = {
        "deepspeed": write_json(folder / "ds.json", content),
        "model": folder / "model",
        "dataset": folder / "text.jsonl",
        "output_dir": folder / "run",
        "seq_length": 32,
        "log_every": 2,
        "learning_rate": 1e-3,
        "save_every": 4,
        **more,
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def states(checkpoint: Path) -> dict[str, Any]:
    """Everything in the .pt files of a checkpoint, by file."""
    return {file.name: torch.load(file, weights_only=False) for file in sorted(checkpoint.glob("*.pt"))}


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """Places where two nested structures differ in a bit."""
    if isinstance(first, torch.Tensor):
        return [] if torch.equal(first, second) else [where]
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{where}: keys"]
        return [result for key in first for result in differences(first[key], second[key], f"{where}/{key}")]
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return [f"{where}: length"]
        return [result for i in range(len(first)) for result in differences(first[i], second[i], f"{where}/{i}")]
    if hasattr(first, "__dict__") and not callable(first):
        return differences(vars(first), vars(second), where)
    return [] if first == second or (first != first and second != second) else [where]


def test_the_shipped_command_writes_a_complete_run(tmp_path):
    """Train with the launcher, the shipped JSON, the embedded model and its text, on two ranks."""
    run = tmp_path / "run"
    process = launch("--deepspeed", str(SHIPPED / "zero3.json"), "--max_steps", "2", "--output_dir", str(run))
    assert process.returncode == 0, process.stdout + process.stderr
    # It says what it trains, how it starts and what it has done.
    for part in (
        "stdlib_llama (llama",
        "100.0% of the linear weights",
        "frozen",
        "start: 4,096 tokens, 64 steps of each of 5 blocks",
        "step 2/2",
        "done: 2 steps, 4,096 tokens",
    ):
        assert part in process.stdout
    assert "WARNING" not in process.stdout.split("done:")[0].split("  model ")[1], "the run itself says nothing else"

    # The folder describes the run, and is complete.
    record = json.loads((run / "sparseforge.json").read_text())
    assert record["model_type"] == "llama"
    assert record["run"]["dataset"] == ["stdlib"]
    assert record["weights"][0].keys() == {"name", "shape", "input_axis"}
    assert json.loads((run / "ds_config.json").read_text())["sparseforge"] == record["config"]
    assert (run / "model" / "config.json").is_file()
    assert (run / "checkpoints" / "latest").read_text() == "step_000002"
    assert not list(run.rglob("*.tmp"))
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["tokens"]) == (2, 4_096)
    assert math.isfinite(result["last_step"]["loss/total"])


def test_an_error_ends_the_launcher(tmp_path):
    """Real processes: a non-zero exit code and one message, here about a flag that wins over the file of a run."""
    outcome = launch("--config", str(ROOT / "examples" / "run.yaml"), "--model", str(tmp_path / "none"))
    assert outcome.returncode != 0
    assert outcome.stderr.count("error: --model") == 1
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("name", ["zero1.json", "zero2.json", "zero3.json", "zero3_offload.json"])
def test_every_shipped_configuration_trains(tmp_path, name):
    content = json.loads((SHIPPED / name).read_text())
    content["sparseforge"]["method"] = {"update_every": 2, "hardening": [0.25, 0.75]}
    # The launched run above has a start of the length that the files ask for: half a thousand steps of a block.
    content["sparseforge"]["start"] = {**content["sparseforge"]["start"], "epochs": 1, "batch": 8}
    train(*flags_of(tmp_path, content, max_steps=8))
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_000008"


@pytest.mark.parametrize(
    ("rate", "block", "warns"),
    [
        ("1e-7", {}, True),
        ("1e-3", {}, False),
        ("1e-7", {"start": {"epochs": 1}}, False),
        ("1e-7", {"start": {"epochs": 0}}, True),
    ],
)
def test_a_rate_too_small_to_recover_from_masks_is_warned_about(tmp_path, capfd, rate, block, warns):
    train(*flags_of(tmp_path, deepspeed_json(batch=8, **block), learning_rate=rate), ranks=1)
    said = capfd.readouterr()
    warning = "learning rate 1e-07: in 8 steps weights of size "
    assert (warning in said.out + said.err) == warns


@pytest.mark.parametrize("importance", ["sparsegpt", "wanda"])
def test_a_mask_of_inputs_alone_reads_batches_without_trained_tokens(tmp_path, importance):
    content = deepspeed_json(2, batch=2)
    content["sparseforge"] = {"max_steps": 2, "method": "naive_retrain", "importance": importance}
    records = [{"prompt": f"{n:03} " * 40, "completion": f"{n:03}"} for n in range(100)]
    text = tmp_path / "pairs.jsonl"
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
    train(*flags_of(tmp_path, content, dataset=text, loss_on="completion", max_steps=2, seed=2))


def test_batches_without_trained_tokens_are_passed_over_also_by_a_resumed_run(tmp_path, capfd):
    """Most sequences of long prompts have no token of a short completion."""
    content = deepspeed_json(2, batch=2, method={"update_every": 2, "hardening": [0.25, 0.75]})
    records = [{"prompt": f"{n:03} " * 40, "completion": f"{n:03}"} for n in range(100)]
    text = tmp_path / "pairs.jsonl"
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
    more = {"dataset": text, "loss_on": "completion", "max_steps": 8, "keep_checkpoints": 0, "seed": 2}
    flags = flags_of(tmp_path, content, **more)
    train(*flags)
    log = "".join(capfd.readouterr())
    assert "is trained on: passed over" in log and "done: 8 steps" in log
    ends = tmp_path / "run" / "checkpoints" / "step_000008"
    unbroken = states(ends)
    shutil.rmtree(ends)
    (ends.parent / "latest").write_text("step_000004")
    (tmp_path / "run" / "result.json").unlink()
    train(*flags, "--resume")
    assert differences(states(ends), unbroken) == []


def test_a_complete_run_has_nothing_to_resume(tmp_path):
    flags = flags_of(tmp_path, deepspeed_json(batch=8))
    train(*flags)
    before = (tmp_path / "run" / "result.json").read_bytes()
    # The printed run is the same run: it goes on from there.
    with open(tmp_path / "run.yaml", "w") as file:
        command = [sys.executable, "-m", "sparseforge_ds", "train", *flags, "--print_config"]
        subprocess.run(command, cwd=ROOT, stdout=file, check=True, timeout=PATIENCE)
    train("--config", str(tmp_path / "run.yaml"), "--resume")
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_world_size_and_accumulation_do_not_change_the_run(tmp_path):
    """Compare the losses of the same global batches on one rank, on two, and accumulated.

    The importance is one that needs no probe, because a probe is one micro-batch, which accumulation makes smaller.
    """
    losses = []
    for name, ranks, accumulation in (("one", 1, 1), ("two", 2, 1), ("accumulated", 2, 2)):
        content = deepspeed_json(batch=8, importance="magnitude")
        content["gradient_accumulation_steps"] = accumulation
        train(*flags_of(tmp_path, content, output_dir=tmp_path / name, max_steps=8), ranks=ranks)
        losses.append(json.loads((tmp_path / name / "result.json").read_text())["last_step"]["loss/total"])
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-4)] * 2


def test_old_checkpoints_are_removed_and_extras_are_logged(tmp_path):
    distillation = {"hidden": {"every": 2}}
    content = deepspeed_json(batch=8, monitor={"histograms_every": 4, "gap_every": 3}, distillation=distillation)
    train(*flags_of(tmp_path, content, save_every=2, keep_checkpoints=2), "--activation_checkpointing")
    # Of four checkpoints the last two are there.
    run = tmp_path / "run"
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == ["step_000006", "step_000008"]
    # Every number that a run can log has a tag.
    log = EventAccumulator(str(run / "tensorboard"))
    log.Reload()
    scalars = set(log.Tags()["scalars"])
    for tag in (
        "loss/cross_entropy",
        "loss/kl",
        "loss/hidden",
        "train/grad_norm",
        "train/tokens_per_second",
        "train/memory_gib",
        "dials/x",
        "mask/undecided",
        "mask/flip_rate",
        "mask/disagreement",
        "mask/soft_to_hard_gap",
        "curvature/mean",
        "curvature/negative_share",
        "curvature/signal",
    ):
        assert tag in scalars
    assert any(tag.startswith("mask/model.layers.0") for tag in log.Tags()["histograms"])
    # The table of runs has the settings that were trained with, also those that no flag gave.
    session = log.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(session).session_start_info.hparams
    numbers = {name: settings[name].number_value for name in ("max_steps", "global_batch", "weight_decay")}
    assert numbers == {"max_steps": 8, "global_batch": 8, "weight_decay": 0}
    assert settings["learning_rate"].number_value > 0 and settings["micro_batch"].number_value == 4
    assert settings["teacher"].string_value not in ("", "None")


def _train_late(command_line: list[str]) -> tuple[list[str], int]:
    """Train with the numbers of steps read a step later, and return the lines of the log without their times."""
    lines: list[str] = []
    reads_late = "--late" in command_line
    with (
        mock.patch.object(logging.Logger, "handle", lambda _, record: lines.append(record.getMessage())),
        mock.patch.object(step_log, "waits_for", lambda device: reads_late),
        mock.patch.object(get_accelerator(), "synchronize") as synchronize,
    ):
        assert run_trainer([flag for flag in command_line if flag != "--late"]) == 0
    steps = [line for line in lines if line.startswith(("step ", "saved "))]
    return [re.sub(r"[\d,.]+ (tokens/s|s\b|[KMG]iB)|\S+ left", "", line) for line in steps], synchronize.call_count


def test_numbers_that_are_read_a_step_later_are_logged_alike(tmp_path):
    """Compare log lines, TensorBoard and result.json; updates, saves, scores and gaps have steps of their own."""
    logs = []
    for name, late in (("at_once", []), ("late", ["--late"])):
        content = deepspeed_json(stage=1, batch=4, monitor={"histograms_every": 4, "gap_every": 3})
        content["sparseforge"]["method"]["update_every"] = 2
        more = {"save_every": 5, "eval_every": 7, "eval_dataset": "stdlib:heldout", "eval_sequences": 4}
        flags = flags_of(tmp_path, content, output_dir=tmp_path / name, max_steps=11, log_every=1, **more)
        ((lines, waits),) = run_distributed(_train_late, 1, [*flags, *late])
        log = EventAccumulator(str(tmp_path / name / "tensorboard"))
        log.Reload()
        timed = ("train/tokens_per_second", "train/memory_gib", "eval/seconds", "checkpoint/seconds")
        scalars = {
            tag: [(event.step, event.value) for event in log.Scalars(tag)]
            for tag in log.Tags()["scalars"]
            if tag not in timed
        }
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert result.pop("seconds") > 0 and not waits, "DeepSpeed's clocks stop the device"
        assert len(scalars["loss/total"]) == 11 and sum(line.startswith("step ") for line in lines) > 11
        logs.append((lines, scalars, log.Tags()["histograms"], result))
    assert logs[0] == logs[1]


def test_a_teacher_whole_on_every_rank_gives_the_losses_of_a_divided_one(tmp_path):
    last_steps = []
    for hold in ("zero3", "replicated"):
        content = deepspeed_json(batch=8, distillation={"hold": hold, "temperature": 2.0})
        train(*flags_of(tmp_path, content, output_dir=tmp_path / hold))
        last_steps.append(json.loads((tmp_path / hold / "result.json").read_text())["last_step"])
    divided, replicated = last_steps
    assert divided["loss/kl"] > 0
    assert replicated == pytest.approx(divided, rel=1e-4)


def test_a_fixed_mask_without_a_teacher_is_a_plain_retrain(tmp_path):
    """Train the kept weights by the task loss alone, under the mask of the start."""
    block = {"method": "naive_retrain", "importance": "wanda", "distillation": None, "max_steps": 4}
    train(*flags_of(tmp_path, {**deepspeed_json(batch=8), "sparseforge": block}, save_every=2))
    result = json.loads((tmp_path / "run" / "result.json").read_text())["last_step"]
    assert "loss/kl" not in result and result["loss/total"] == result["loss/cross_entropy"]

    weights = []
    for step in (2, 4):
        out = tmp_path / f"step_{step}"
        checkpoint = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        assert command(["consolidate", str(checkpoint), str(out), "--skip_proof"]) == 0
        weights.append(load_file(out / "model.safetensors")["model.layers.0.mlp.up_proj.weight"])
    early, late = weights
    assert (early == 0).float().mean() == 0.5
    assert torch.equal(early == 0, late == 0), "the mask stays"
    assert not torch.equal(early, late), "the kept weights are trained"


def test_muon_tells_the_rate_of_its_matrices_and_goes_on_at_others(tmp_path):
    """Two rates of its own: they stand in the log and the path, and a resumed run takes new ones."""

    def content(muon: float, adam: float) -> dict[str, Any]:
        optimizer = {"type": "Muon", "params": {"muon_lr": muon, "adam_lr": adam}}
        block = {"method": "naive_retrain", "importance": "magnitude", "max_steps": 4}
        return {**deepspeed_json(stage=0), "optimizer": optimizer, "sparseforge": block}

    def flags(content: dict[str, Any]) -> list[str]:
        words = flags_of(tmp_path, content, save_every=2, keep_checkpoints=0, lr_scheduler_type="constant", warmup=0.03)
        return [word for word in words if not word.startswith("--learning_rate")]

    run = tmp_path / "run"
    train(*flags(content(0.02, 3e-3)), ranks=1)
    result = json.loads((run / "result.json").read_text())
    assert result["last_step"]["train/learning_rate"] == 0.02
    path = result["path"]
    shutil.rmtree(run / "checkpoints" / "step_000004")
    train(*flags(content(0.01, 1e-3)), "--resume", ranks=1)
    result = json.loads((run / "result.json").read_text())
    assert result["last_step"]["train/learning_rate"] == 0.01
    assert result["path"] == pytest.approx(path * 3 / 4)  # two steps each at 0.02 and 0.01, not four at 0.02
    groups = states(run / "checkpoints" / "step_000004")["mp_rank_00_model_states.pt"]["optimizer"]["param_groups"]
    assert {group["use_muon"]: group["lr"] for group in groups} == {True: 0.01, False: pytest.approx(1e-3)}


@pytest.mark.parametrize("learned", [False, True])
def test_runs_with_low_rank_branches_resume_bit_by_bit(tmp_path, learned):
    block = {"importance": "hutchinson", "low_rank": {"k": 12, "learned": learned}}
    flags = flags_of(tmp_path, deepspeed_json(batch=8, **block))
    train(*flags)
    checkpoints = tmp_path / "run" / "checkpoints"
    straight = states(checkpoints / "step_000008")
    shutil.rmtree(checkpoints / "step_000008")
    train(*flags, "--resume")
    assert differences(straight, states(checkpoints / "step_000008")) == []


def test_a_quantized_run_exports_what_it_trained(tmp_path):
    """Train on two ranks of ZeRO-3; a group of an output has at most 15 values, as codes and as ordinary weights."""
    block = {"quantize": {"bits": 4, "group_size": 16, "from": "freeze"}, "start": None}
    flags = flags_of(tmp_path, deepspeed_json(stage=3, **block), max_steps=10)
    train(*flags)
    assert command(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    record = json.loads((tmp_path / "out" / "sparsity.json").read_text())
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert record["proof"] and record["config"]["quantize"] == block["quantize"]
    for name in record["weights"]:
        for group in state[name].reshape(-1, 32):
            step = group.abs().max() / 7
            assert torch.allclose(group / step, (group / step).round(), atol=1e-3), name
    # The same weights as codes, which the library of that name gives back.
    coded = [str(tmp_path / "run"), str(tmp_path / "coded"), "--format", "compressed-tensors"]
    if importlib.util.find_spec("compressed_tensors") is None:
        assert command(["export", *coded]) == 2 and not (tmp_path / "coded").exists()
        return
    assert command(["export", *coded, "--dtype", "bfloat16"]) == 0
    config = json.loads((tmp_path / "coded" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32 and config["ignore"] == ["lm_head"]
    assert json.loads((tmp_path / "coded" / "sparsity.json").read_text())["proof"]["logits"] == "bit-equal"
    stored = load_file(tmp_path / "coded" / "model.safetensors")
    assert all(f"{name}_packed" in stored and name not in stored for name in record["weights"])
    source = StoredWeights(tmp_path / "coded", json.loads((tmp_path / "coded" / "config.json").read_text()))
    assert all(torch.equal(source.read(name), state[name].bfloat16()) for name in record["weights"])
