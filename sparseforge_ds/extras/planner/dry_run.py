"""`--dry_run`: a run from its flags to its last step, without weights, text, GPUs or the hub.

The model is built at full size on the meta device. A mistake that would stop the real run is one ValueError. Checks
that are impossible here are listed as not checked. Nothing is allocated or written, and no process talks to another.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparseforge_ds.config.arguments import EMBEDDED_MODEL, DocumentFrame, RunArguments
from sparseforge_ds.data.hub_text import HubText
from sparseforge_ds.data.mixture import file_lines
from sparseforge_ds.data.tokenization import check_frame
from sparseforge_ds.extras.planner.flops import attention_layers
from sparseforge_ds.extras.planner.machine import GIB, Machine
from sparseforge_ds.extras.planner.plan import Plan, make_plan
from sparseforge_ds.model.model_config import read_model_config
from sparseforge_ds.model.pretrained import Pretrained, find_model
from sparseforge_ds.model.sequence_parallel import default_attention
from sparseforge_ds.train.banner import Row, layout_rows, readable_bytes, spec_rows
from sparseforge_ds.train.launcher import world_size_from_launcher
from sparseforge_ds.train.length import scheduled_steps_of_saved_run, with_more_steps
from sparseforge_ds.train.run_folder import (
    bytes_of_checkpoints,
    bytes_of_streamed_text,
    check_beginning,
    check_room,
    size_of_checkpoint,
    why_nothing_to_resume,
)
from sparseforge_ds.train.spec import Hardware, RunSpec, make_spec

_RESERVE = 4 * GIB
"""Bytes of a GPU that a plan leaves free, as `sparseforge plan` does by default."""


def dry_run(arguments: RunArguments) -> Iterator[str]:
    """Check a run and describe it, a section at a time.

    Args:
        arguments: the run flags; with `gpus` the run is for other machines, whose disk is not this one's.

    Raises:
        ValueError: something would stop the run.
    """
    # Resolve the settings; the checks that were impossible collect in a list.
    unchecked: list[str] = []
    elsewhere = arguments.gpus is not None
    spec = make_spec(
        arguments,
        arguments.gpus or world_size_from_launcher(),
        lambda name, flag: _find(name, flag, arguments.document_frame, unchecked),
        Hardware() if elsewhere else Hardware.here(),
    )
    if (scheduled := scheduled_steps_of_saved_run(spec)) is not None:
        spec = with_more_steps(spec, scheduled)

    # Describe the run; each section may end it with an error.
    ranks = "1 rank" if spec.world_size == 1 else f"{spec.world_size} ranks"
    yield f"dry run for {ranks}: nothing is loaded, allocated or written"
    yield layout_rows(row for row in spec_rows(spec) if row[0] != "memory")
    yield "text\n" + layout_rows(_text(arguments, spec, unchecked))
    yield "output\n" + layout_rows(_output(spec, elsewhere, unchecked))
    yield from _memory(spec, unchecked)
    unchecked.append("GPUs, their network, and what DeepSpeed refuses when an engine starts")
    yield "not checked\n" + "\n".join(f"  {line}" for line in unchecked)
    yield "dry run: nothing that was checked would stop this run"


def _find(name: str, flag: str, frame: DocumentFrame, unchecked: list[str]) -> Pretrained:
    """Find a model; if it is on the hub, read its config only."""
    if name == EMBEDDED_MODEL or Path(name).exists():
        model = find_model(name, flag)
        if flag == "--model":
            check_frame(model.tokenizer, frame)
        return model
    unchecked.append(f"{flag} {name}: its weights and tokenizer are on the hub")
    return find_config_only(name, flag)


def find_config_only(name: str, flag: str) -> Pretrained:
    """Return a model of which only the config is read, from a folder or the hub's cache."""
    return Pretrained(name, Path(name), read_model_config(name, flag))


def _text(arguments: RunArguments, spec: RunSpec, unchecked: list[str]) -> Iterator[Row]:
    """Describe each source: its share of the run's tokens, and its files."""
    text = spec.text
    tokens = spec.steps * spec.tokens_per_step
    for source, share in zip(text.sources, text.shares, strict=True):
        yield source.name, "\n".join([f"{share * tokens:,.0f} tokens, {share:.1%}", *file_lines(source)])
        if isinstance(source, HubText):
            unchecked.append(f"--dataset {source.name}: it is read from the hub, field {arguments.text_field!r}")
    if isinstance(spec.held_out, HubText):
        unchecked.append(f"--eval_dataset {spec.held_out.name}: it is read from the hub")
    unchecked.append("the text beyond the first record of each file, and whether there is enough of it")


def _output(spec: RunSpec, elsewhere: bool, unchecked: list[str]) -> Iterator[Row]:
    """Check the run folder, and describe the room that checkpoints take."""
    # A run that has nothing to resume is checked as a fresh one.
    reason = why_nothing_to_resume(spec)
    if reason is not None:
        yield "resume", reason
        spec = replace(spec, arguments=replace(spec.arguments, resume=False))
    check_beginning(spec)
    # Ask the nearest folder that exists whether it can be written, and how much is free.
    parent = next(path for path in (spec.folder.absolute(), *spec.folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {spec.folder}: {parent} is no folder that can be written; give another one")
    needed = bytes_of_checkpoints(spec)
    size = readable_bytes(size_of_checkpoint(spec))
    yield "a checkpoint", f"{size}; at once on disk {readable_bytes(needed)}"
    if tokens := bytes_of_streamed_text(spec):
        yield "streams", f"{readable_bytes(tokens)} of tokens, which stay in the run folder"
        needed += tokens
    if elsewhere:
        unchecked.append(f"--output_dir: whether the disk of those machines has room for {readable_bytes(needed)}")
        return
    check_room(spec, shutil.disk_usage(parent).free)


def _memory(spec: RunSpec, unchecked: list[str]) -> Iterator[str]:
    """Describe the memory of a GPU; ValueError where it is too small."""
    try:
        plan = plan_run(spec, Machine(int(spec.arguments.gpu_memory * GIB), reserve=_RESERVE))
    except ValueError as error:
        unchecked.append(f"memory: {error}")
        return
    yield layout_rows(plan.memory_lines())
    unchecked.extend(_memory_of_unfused_attention(spec))
    if str(spec.deepspeed["optimizer"]["type"]).lower() == "muon":
        unchecked.append("memory: the whole matrices that Muon gathers and makes orthogonal in its step")
    # The ladder's last rung is the run with all changes that save memory.
    if not plan.fits:
        changes = [change for change, _ in plan.ladder]
        is_enough = bool(plan.ladder) and plan.ladder[-1][1] <= plan.machine.device
        cure = f"it fits with {' and '.join(changes)}" if is_enough else "take more GPUs, or larger ones"
        raise ValueError(
            f"a GPU needs {plan.memory.peak / GIB:.1f} GiB, in {plan.memory.worst}, and has "
            f"{spec.arguments.gpu_memory:g} (--gpu_memory); {cure}"
        )


def _memory_of_unfused_attention(spec: RunSpec) -> Iterator[str]:
    """Describe memory of attention that the plan leaves out: it assumes fused attention in causal order."""
    settings = spec.memory_settings
    config = spec.model.config
    attention = spec.arguments.attn_implementation or default_attention(config)
    pairs = settings.micro_batch * settings.seq_length**2
    heads = max((layer.heads for layer in attention_layers(config.get_text_config())), default=0)
    if attention == "eager" and heads:
        scores = readable_bytes(pairs * heads * settings.low)
        yield f"memory: eager attention's scores of all pairs of tokens, {scores} a layer, several times"
    elif attention == "sdpa" and spec.arguments.document_attention:
        yield f"memory: the mask of --document_attention, {readable_bytes(pairs)} with sdpa; flash attention needs none"


def check_estimable(resolved: dict[str, Any]) -> None:
    """Reject a DeepSpeed configuration that the planner has no estimate for.

    These are masters that are not in fp32, except in bf16 under plain ZeRO-3.
    """
    zero = resolved.get("zero_optimization", {})
    bf16 = resolved.get("bf16") or {}
    plain = zero.get("stage") == 3 and not zero.get("offload_optimizer")
    if bf16.get("bf16_master_weights_and_grads") and not (bf16.get("bf16_optimizer_states") and plain):
        raise ValueError(
            "bf16_master_weights_and_grads: the planner knows it only with bf16_optimizer_states, under ZeRO-3 without "
            "offload_optimizer; plan without it"
        )
    if (resolved.get("fp16") or {}).get("fp16_master_weights_and_grads"):
        raise ValueError("fp16_master_weights_and_grads: the planner knows fp32 masters only; plan without it")


def plan_run(spec: RunSpec, machine: Machine) -> Plan:
    """Return the plan of a run on a machine.

    Raises:
        ValueError: there is no estimate for this layout, or this model.
    """
    check_estimable(spec.deepspeed)
    teacher = None
    if spec.teacher is not None and spec.teacher_sizes is not None:
        teacher = spec.teacher.config, spec.teacher_sizes
    return make_plan(spec.model.config, spec.sizes, spec.memory_settings, machine, teacher=teacher)
