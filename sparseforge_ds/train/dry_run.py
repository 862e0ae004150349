"""`--dry_run`: a run from its flags to its last step, without weights, text, GPUs or the hub.

The model is built at full size on the meta device. What would stop the real run is one ValueError; what cannot be known
here is listed as not checked. Nothing is allocated or written, and no process talks to another.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from sparseforge_ds.config.arguments import EMBEDDED_MODEL, DocumentFrame, RunArguments
from sparseforge_ds.data.hub import HubStream
from sparseforge_ds.data.mixture import Mixture, file_lines, find_text
from sparseforge_ds.data.packing import frame_tokens
from sparseforge_ds.model.family_table import LOW_RANK
from sparseforge_ds.model.rules import name_pattern
from sparseforge_ds.planning.architecture import describe, empty_model
from sparseforge_ds.planning.model_config import read_model_config
from sparseforge_ds.planning.recommend import advise
from sparseforge_ds.planning.report import memory_lines
from sparseforge_ds.planning.settings import check_estimable
from sparseforge_ds.planning.states import checkpoint_bytes
from sparseforge_ds.planning.study import GIB, describe_teacher, estimators
from sparseforge_ds.train.banner import Row, readable_bytes, spec_rows, table
from sparseforge_ds.train.plan import Hardware, RunSpec, make_spec
from sparseforge_ds.train.pretrained import Pretrained, find_model, read_tokenizer
from sparseforge_ds.train.ranks import world_size_from_launcher
from sparseforge_ds.train.run_folder import begins_anew, check_beginning, room_for_checkpoints

_PHASES = {
    "heating": "the mask is soft",
    "hardening": "the mask becomes binary",
    "moving": "the mask moves",
    "frozen": "finetune under the frozen mask",
}
_RESERVE = 4 * GIB
"""Of a GPU, as `sparseforge plan` assumes by default."""


def dry_run(arguments: RunArguments) -> Iterator[str]:
    """Check a run and describe it, a section at a time.

    Args:
        arguments: with `gpus` the run is that of other machines, whose disk is not this one's.

    Raises:
        ValueError: something would stop the run.
    """
    unchecked: list[str] = []
    elsewhere = arguments.gpus is not None
    plan = make_spec(
        arguments,
        arguments.gpus or world_size_from_launcher(),
        lambda name, flag: _find(name, flag, arguments.document_frame, unchecked),
        Hardware() if elsewhere else Hardware.here(),
    )
    model = empty_model(plan.model.config, plan.config, plan.dtype)
    yield f"dry run for {plan.world_size} GPUs: nothing is loaded, allocated or written"
    yield table(row for row in spec_rows(plan) if row[0] != "memory")
    yield "steps\n" + table(_phases(plan))
    yield "weights under a mask\n" + table(_masked(plan, model))
    yield "dense matrices\n" + table(_dense(plan, model))
    yield "text\n" + table(_text(arguments, plan, unchecked))
    yield "output\n" + table(_output(plan, elsewhere, unchecked))
    yield from _memory(plan, model, unchecked)
    unchecked.append("GPUs, their network, and what DeepSpeed refuses when an engine starts")
    yield "not checked\n" + "\n".join(f"  {line}" for line in unchecked)
    yield "dry run: nothing that was checked would stop this run"


def _find(name: str, flag: str, frame: DocumentFrame, unchecked: list[str]) -> Pretrained:
    """A model whose weights need not be here: of one on the hub, only the config is read."""
    if name == EMBEDDED_MODEL or Path(name).exists():
        found = find_model(name, flag)
        if flag == "--model":
            frame_tokens(read_tokenizer(found), frame)
        return found
    unchecked.append(f"{flag} {name}: its weights and tokenizer are on the hub")
    return Pretrained(name, Path(name), read_model_config(name, flag))


def _phases(plan: RunSpec) -> Iterator[Row]:
    """Steps, tokens and mask updates of every phase."""
    schedule, steps = plan.config.resolved_schedule, plan.config.max_steps
    for name, first, last in schedule.phases(steps):
        if last > first:
            updates = sum(map(schedule.is_update, range(first, last)))
            tokens = (last - first) * plan.tokens_per_step
            yield name, f"{first:,} to {last:,}: {_PHASES[name]}, {tokens:,} tokens, {updates:,} mask updates"
    yield "in all", f"{steps:,} steps of {plan.tokens_per_step:,} tokens: {steps * plan.tokens_per_step:,} tokens"
    every = plan.arguments.save_every
    saves = -(-steps // every) if every else 1
    yield "saves", f"{saves}, {f'every {every} steps and ' if every else ''}at the end"
    if plan.config.branch_step >= 0:
        when = f"branches come in at step {plan.config.branch_step:,}"
        yield "SLoRB", "weights are shifted into branches before the first step" if plan.config.shifts else when


def _masked(plan: RunSpec, model: nn.Module) -> Iterator[Row]:
    """A line for every kind of weight: how many, their shape, and how the pattern divides them."""
    kinds = Counter((name_pattern(weight.name), weight.shape, weight.input_axis) for weight in plan.weights)
    for (name, shape, axis), count in kinds.items():
        along = f"{plan.config.pattern} along axis {axis} ({shape[axis]:,} inputs)"
        yield name, f"{count} x {shape} = {count * math.prod(shape):,}; {along}"
    added = sum(p.numel() for name, p in model.named_parameters() if name.endswith(f".{LOW_RANK}"))
    if added:
        yield "SLoRB", f"{added:,} parameters more, {readable_bytes(added * plan.layout.low)} to deploy"


def _dense(plan: RunSpec, model: nn.Module) -> Iterator[Row]:
    masked = {weight.name for weight in plan.weights}
    kinds = Counter(
        (name_pattern(name), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and name not in masked and not name.endswith(f".{LOW_RANK}")
    )
    for (name, shape), count in kinds.items():
        yield name, f"{count} x {shape} = {count * math.prod(shape):,}"


def _text(arguments: RunArguments, plan: RunSpec, unchecked: list[str]) -> Iterator[Row]:
    text = find_text(arguments.dataset, arguments.text_field, arguments.split, arguments.sample_by)
    read = plan.config.max_steps * plan.tokens_per_step
    sources, shares = (text.sources, text.shares) if isinstance(text, Mixture) else ((text,), (1.0,))
    for source, share in zip(sources, shares, strict=True):
        yield source.name, "\n".join([f"{share * read:,.0f} tokens, {share:.1%}", *file_lines(source)])
        if isinstance(source, HubStream):
            unchecked.append(f"--dataset {source.name}: it is read from the hub, field {arguments.text_field!r}")


def _output(plan: RunSpec, elsewhere: bool, unchecked: list[str]) -> Iterator[Row]:
    anew = begins_anew(plan)
    if anew is None:
        check_beginning(plan)
    else:
        yield "resume", anew
    parent = next(p for p in (plan.folder.absolute(), *plan.folder.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {plan.folder}: {parent} is no folder that can be written; give another one")
    one, needed = checkpoint_bytes(plan.sizes, plan.layout), room_for_checkpoints(plan)
    yield "a checkpoint", f"{readable_bytes(one)}; at once on disk {readable_bytes(needed)}"
    if elsewhere:
        unchecked.append(f"--output_dir: whether the disk of those machines has room for {readable_bytes(needed)}")
        return
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ValueError(
            f"--output_dir {plan.folder} has room for {readable_bytes(free)}, but its checkpoints will take about "
            f"{readable_bytes(needed)}; make room, or raise --save_every or lower --keep_checkpoints"
        )


def _memory(plan: RunSpec, model: nn.Module, unchecked: list[str]) -> Iterator[str]:
    """The memory of a GPU; and an error when it is too small."""
    laid_out, device = plan.layout, int(plan.arguments.gpu_memory * GIB)
    try:
        check_estimable(plan.deepspeed)
        student = describe(model, plan.config, laid_out.leaves)
        other = plan.teacher.config if plan.teacher is not None and plan.teacher is not plan.model else None
        teacher = None if other is None else describe_teacher(other, laid_out)
        _, estimate = estimators(plan.model.config, student, laid_out, teacher, other, _RESERVE)
        found = estimate(laid_out)
    except ValueError as error:
        unchecked.append(f"memory: {error}")
        return
    yield table(memory_lines(found, device))
    if found.peak > device:
        advice = advise(laid_out, estimate, device)
        cure = "; ".join(advice.lines) if advice.fits else "take more GPUs, or larger ones"
        raise ValueError(
            f"a GPU needs {found.peak / GIB:.1f} GiB, in {found.worst}, and has {plan.arguments.gpu_memory:g} "
            f"(--gpu_memory); {cure}"
        )
