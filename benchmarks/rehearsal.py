#!/usr/bin/env python3
"""A whole run with the layer shapes of a published model, random weights and as few layers as fit.

python benchmarks/rehearsal.py /scratch/rehearsal --model qwen3_14b --layers 1
python benchmarks/rehearsal.py /scratch/rehearsal --model deepseek_moe_16b --layers 1 --experts 32
python benchmarks/rehearsal.py /scratch/rehearsal --model qwen3_14b --layers 2 fit         # on a machine with GPUs

Weights are generated in FOLDER; then `deepspeed launch/train.py` heats, hardens, freezes and finetunes, `sparseforge
consolidate` exports with its proof and `sparseforge verify` checks, each in processes of its own. Memory is compared
with what `sparseforge plan` says. The exit code is that of the first step that failed, else 0 whatever the numbers are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed says that there is no GPU
    import torch

    from benchmarks.rehearsal_model import HUB_IDS, VOCABULARY, hub_config, rehearsal_config, write_model, write_text
    from benchmarks.rehearsal_processes import Trained, command, train
    from benchmarks.rehearsal_report import phases, report
    from sparseforge_ds.config import SparseForgeConfig
    from sparseforge_ds.config.arguments import RunArguments
    from sparseforge_ds.config.deepspeed_config import zero_stage
    from sparseforge_ds.extras.planner.dry_run import find_config_only, plan_run
    from sparseforge_ds.extras.planner.machine import GIB, Machine
    from sparseforge_ds.extras.planner.plan import Plan
    from sparseforge_ds.mask.anneal import Schedule
    from sparseforge_ds.train.spec import Hardware, make_spec

OF_PROCESS = int(0.5 * GIB)
"""Bytes of a rank on a CPU after its imports; measured again in every run."""
SHORT = {"update_every": 2, "hardening": [0.34, 0.67], "blend": [0.0, 0.34], "mid_penalty_ramp": [0.0, 0.34]}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="A run at a published model's layer shapes, from weights to export")
    add = parser.add_argument
    add("folder", type=Path, help="scratch folder; a checkpoint takes 24 bytes a parameter")
    add("--model", required=True, choices=tuple(HUB_IDS))
    add("--layers", nargs="+", default=["1"], help="decoder layers, or fit; a run each, two give the cost of a layer")
    add("--experts", type=int, help="routed experts of a layer (default: as published)")
    add("--vocabulary", type=int, default=VOCABULARY, help="rows of embedding and head")
    add("--shrink", type=int, default=1, help="divide widths and heads by this, to try the command itself")
    add("--ranks", type=int, help="processes (default: one a GPU, two without)")
    add("--steps", type=int, default=9, help="optimizer steps; a third each for heating, hardening and finetuning")
    add("--seq_length", type=int, default=64, help="tokens of a sequence")
    add("--micro_batch", type=int, default=1, help="sequences of a micro-batch and rank")
    add("--activation_checkpointing", action="store_true", help="as for the launcher")
    add("--no_teacher", action="store_true", help="train on the text alone, without the dense model as a teacher")
    add("--bf16_states", action="store_true", help="bf16 masters, and bf16 moments of what is under no mask")
    add("--deepspeed", type=Path, default=ROOT / "ds_configs" / "zero3.json", help="configuration to start from")
    add("--memory", type=float, default=20.0, help="GiB for all ranks together; a GPU has what it has")
    add("--full_gpus", type=int, default=8, help="GPUs for which the full model is planned")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="also write the numbers to a file")
    arguments = parser.parse_args(argv)
    for word in arguments.layers:
        if word != "fit" and not (word.isdigit() and int(word)):
            parser.error(f"--layers {word}: use an integer >= 1 or fit")
    for name in ("ranks", "seq_length", "micro_batch", "shrink", "full_gpus"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: use an integer >= 1")
    if arguments.steps < 6:
        parser.error(f"--steps {arguments.steps}: use at least 6, so that every phase has a step")
    if arguments.vocabulary < VOCABULARY:
        parser.error(f"--vocabulary {arguments.vocabulary}: the tokenizer has {VOCABULARY} pieces")
    arguments.folder = arguments.folder.absolute()  # launcher and commands run in the checkout
    gpus = torch.cuda.device_count()
    arguments.gpu_memory = min((torch.cuda.mem_get_info(i)[0] for i in range(gpus)), default=0)
    arguments.ranks = arguments.ranks or gpus or 2
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Rehearse every depth, extrapolate, print."""
    arguments = parse_arguments(argv)
    try:
        depths = sorted({depth_of(word, arguments) for word in arguments.layers})
        check_depths(arguments.model, depths)
        runs = [rehearse(arguments, layers) for layers in depths]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))} ended with {error.returncode}:\n{error.output}", file=sys.stderr)
        return int(error.returncode) if error.returncode > 0 else 1
    result = {
        "model": arguments.model,
        "device": torch.cuda.get_device_name() if arguments.gpu_memory else "cpu",
        "ranks": arguments.ranks,
        "stage": zero_stage(json.loads(arguments.deepspeed.read_text())),
        "settings": {
            key: getattr(arguments, key)
            for key in (
                *("experts", "vocabulary", "shrink", "steps", "seq_length", "micro_batch"),
                *("no_teacher", "bf16_states"),
            )
        },
        "runs": runs,
        "full_depth": full_depth(arguments, runs),
    }
    print(report(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


# -- what is going to be ----------------------------------------------------------------------------------------------


def _config(arguments: argparse.Namespace, layers: int) -> Any:
    return rehearsal_config(arguments.model, layers, arguments.vocabulary, arguments.experts, arguments.shrink)


def write_deepspeed(path: Path, arguments: argparse.Namespace, ranks: int) -> None:
    """Write the configuration for launcher and planner: bf16, and all phases within a few steps."""
    content = json.loads(arguments.deepspeed.read_text())
    content |= {
        "train_batch_size": ranks * arguments.micro_batch,
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
    }
    if arguments.bf16_states:
        content["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    content.pop("fp16", None)
    zero = {"reduce_bucket_size": 50_000_000, "sub_group_size": 100_000_000, "stage3_allgather_sequential": True}
    content["zero_optimization"] = {**content["zero_optimization"], **zero}
    block = content["sparseforge"] | ({"distillation": None} if arguments.no_teacher else {})
    content["sparseforge"] = {**block, "method": {**block.get("method", {}), **SHORT}}
    path.write_text(json.dumps(content, indent=2))


def plan(arguments: argparse.Namespace, config: Any, ranks: int, on_gpus: bool | None = None) -> Plan:
    """Plan such a run without a reserve, by default on the devices of this machine."""
    folder = arguments.folder / "plan"
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    write_deepspeed(folder / "deepspeed.json", arguments, ranks)
    flags = RunArguments(
        deepspeed=str(folder / "deepspeed.json"),
        model=str(folder),
        output_dir=str(folder.with_name("run")),
        seq_length=arguments.seq_length,
        activation_checkpointing=arguments.activation_checkpointing,
        max_steps=arguments.steps,
        dry_run=True,
        gpus=ranks,
    )
    device = arguments.gpu_memory or int(arguments.memory * GIB / arguments.ranks) - OF_PROCESS
    fused = bool(arguments.gpu_memory) if on_gpus is None else on_gpus  # a CPU steps in a plain loop
    try:
        return plan_run(make_spec(flags, ranks, find_config_only, Hardware(fused=fused)), Machine(device, reserve=0))
    finally:
        shutil.rmtree(folder)


def depth_of(word: str, arguments: argparse.Namespace) -> int:
    """Return the number of layers for `word`, checked against memory and disk.

    Raises:
        ValueError: they do not fit.
    """
    most = int(hub_config(arguments.model).num_hidden_layers)
    if word != "fit":
        layers = int(word)
        if layers > most:
            raise ValueError(f"--layers {layers}: {arguments.model} has {most}")
    else:
        layers = 1
        too_many = most + 1
        while too_many - layers > 1:  # doubling first: a plan takes longer, the deeper the model
            middle = min(2 * layers, most) if too_many > most else (layers + too_many) // 2
            if plan(arguments, _config(arguments, middle), arguments.ranks).fits:
                layers = middle
            else:
                too_many = middle
    planned = plan(arguments, _config(arguments, layers), arguments.ranks)
    if not planned.fits:
        raise ValueError(
            f"--layers {word}: {layers} layers of {arguments.model} take {planned.memory.peak / GIB:.1f} GiB on each "
            f"of {arguments.ranks} ranks, and there are {planned.machine.device / GIB:.1f}; use fewer --layers or "
            "--experts, more --ranks, or on a CPU a larger --memory"
        )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(arguments.folder).free
    needed = planned.checkpoint + 4 * planned.model.total
    if free < needed:
        raise ValueError(
            f"{arguments.folder}: {needed / GIB:.1f} GiB are needed on its disk, {free / GIB:.1f} are free"
        )
    return layers


def check_depths(model: str, depths: list[int]) -> None:
    """Reject depths whose difference is not that of layers like the published model's.

    Raises:
        ValueError: one layer is a mixture, and the first of more a dense one.
    """
    if len(depths) > 1 and depths[0] == 1 and getattr(hub_config(model), "first_k_dense_replace", None):
        raise ValueError(
            f"--layers {' '.join(map(str, depths))}: 1 layer of {model} is a mixture, and the first of more is dense, "
            "so they give no time of a mixture; use depths of 2 or more, or 1 alone"
        )


# -- what happens -----------------------------------------------------------------------------------------------------


def rehearse(arguments: argparse.Namespace, layers: int) -> dict[str, Any]:
    """Do one run, from weights to a verified export, and keep only its numbers."""
    config = _config(arguments, layers)
    planned = plan(arguments, config, arguments.ranks)
    folder = arguments.folder / f"{arguments.model}_{layers}"
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder}: {planned.model.total:,} parameters, {layers} layers", file=sys.stderr, flush=True)
    try:
        begun = time.perf_counter()
        size = write_model(folder / "model", config, arguments.seed)
        written = time.perf_counter() - begun
        write_text(folder / "text.jsonl")
        write_deepspeed(folder / "deepspeed.json", arguments, arguments.ranks)
        trained = train(arguments, folder)
        checkpoint = sum(file.stat().st_size for file in (folder / "run" / "checkpoints").rglob("*") if file.is_file())
        exported = command("consolidate", folder / "run", folder / "export")
        verified = command("verify", folder / "export")
        schedule = SparseForgeConfig.from_json(folder / "deepspeed.json", max_steps=arguments.steps).resolved_schedule
        assert isinstance(schedule, Schedule)  # `write_deepspeed` chooses the soft mask
        return {
            "layers": layers,
            "parameters": planned.model.total,
            "masked": planned.model.masked,
            "write": {"seconds": written, "bytes": size},
            "phases": phases(trained.step_seconds, schedule),
            "start": {"seconds": trained.seconds["load"]},
            "save": {"seconds": trained.seconds["save"], "bytes": checkpoint},
            "consolidate": exported,
            "verify": verified,
            "memory": memory_of(trained, planned),
            "losses": trained.losses,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- what it came to --------------------------------------------------------------------------------------------------


def memory_of(trained: Trained, planned: Plan) -> dict[str, Any]:
    """Bytes of the rank with most: measured, and as the planner has them."""
    records = trained.memory
    moments = {moment: records.highest(moment) for moment in records.own if moment != "start"}
    own = max(moments.values(), default=0)
    result = trained.allocated if trained.allocated is not None else own - trained.before
    return {
        "found": result,
        "planned": planned.memory.peak,
        "ratio": result / planned.memory.peak,
        "worst": planned.memory.worst,
        "resident": planned.memory.resident,
        "phases": planned.memory.phases,
        "before": trained.before,
        "own_by_moment": moments,
        "peak_resident": max(records.peak.values(), default=0),
        "all_ranks": records.together,
    }


def full_depth(arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Estimate the published model: memory by the planner, step times by a straight line through two depths."""
    planned = plan(arguments, hub_config(arguments.model), arguments.full_gpus, on_gpus=True)
    layers = int(hub_config(arguments.model).num_hidden_layers)
    results: dict[str, Any] = {
        "layers": layers,
        "gpus": arguments.full_gpus,
        "parameters": planned.model.total,
        "planned": planned.memory.peak,
        "worst": planned.memory.worst,
        "checkpoint": planned.checkpoint,
        "seconds_per_layer": {},
        "seconds": {},
    }
    if len(runs) > 1:
        low, high = runs[0], runs[-1]
        for phase in low["phases"].keys() & high["phases"].keys():
            a, b = low["phases"][phase]["seconds"], high["phases"][phase]["seconds"]
            item = (b - a) / (high["layers"] - low["layers"])
            results["seconds_per_layer"][phase] = item
            results["seconds"][phase] = b + item * (layers - high["layers"])
    return results


if __name__ == "__main__":
    sys.exit(main())
