"""A study as text for people, and as plain JSON types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparseforge_ds.planning.memory import Memory
from sparseforge_ds.planning.states import Kinds
from sparseforge_ds.planning.study import GIB, Study

Line = tuple[str, str]


def report(found: Study) -> str:
    """Everything on one screen, or nearly."""
    memory = memory_lines(found.memory, found.machine.device)
    blocks = (_run(found), memory, _needs(found), _layouts(found), _verdict(found))
    lines = [line for block in blocks for line in (*block, ("", ""))][:-1]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in lines)


def _run(found: Study) -> Iterator[Line]:
    model, laid_out = found.model, found.settings
    active = f", {model.active:,} active for a token" if model.active != model.total else ""
    yield "model", f"{found.request.model} ({model.model_type}), {model.total:,} parameters{active}"
    yield "pruned", f"{laid_out.forge.pattern} in {model.coverage.weights} weights: {model.coverage}"
    for line in model.coverage.lines(but={line.partition(" (")[0] for line in model.uncovered}):
        yield "left dense", line
    for line in model.uncovered:
        yield "not covered", f"{line}: stays dense; no row of the family table names it"
    dtype = str(laid_out.dtype).removeprefix("torch.")
    checkpointing = "with" if laid_out.checkpointing else "without"
    yield (
        "layout",
        f"{laid_out.name}: ZeRO-{laid_out.stage}, {dtype}, {laid_out.ranks} GPUs, {checkpointing} activation "
        f"checkpointing, importance {laid_out.forge.importance}",
    )
    yield (
        "batch",
        f"{laid_out.micro_batch} x {laid_out.seq_length} tokens a GPU x {laid_out.accumulation} accumulated x "
        f"{laid_out.ranks} GPUs = {laid_out.tokens_per_step:,} tokens a step",
    )
    if laid_out.teacher:
        who = "the dense model" if found.teacher is None else f"{found.request.teacher}, {found.teacher.total:,}"
        yield "teacher", f"{who}, {'divided by ZeRO-3' if laid_out.divided_teacher else 'whole on every GPU'}"


def memory_lines(plan: Memory, device: int) -> Iterator[Line]:
    """A GPU of `device` bytes, kind by kind and moment by moment."""
    yield "memory of a GPU", "GiB"
    for name, size in plan.resident.items():
        yield f"  {name}", _gib(size)
    for moment, kinds in plan.moments.items():
        yield f"  + {moment}", f"{_gib(sum(kinds.values()))}  {_parts(kinds)}"
    yield "  reserve (assumed)", _gib(plan.reserve)
    phase = "" if plan.peak == plan.frozen_peak else " while masks move"
    yield "  peak", f"{_gib(plan.peak)}  of {device / GIB:.0f}, in {plan.worst}{phase}"
    if phase:
        yield "  peak once frozen", _gib(plan.frozen_peak)
    if plan.host:
        yield "  on the host", f"{_gib(plan.host_total)}  for each GPU: {_parts(plan.host)}"


def _needs(found: Study) -> Iterator[Line]:
    """Activations, disk and time."""
    yield "activations", "GiB of one micro-batch, the peak with the loss"
    for name, each in zip(("without", "with"), found.activations.values(), strict=True):
        parts = f"saved by the blocks {each.saved / GIB:.2f}, blocks of logits {each.logits / GIB:.2f}"
        yield f"  {name} checkpointing", f"{_gib(each.peak)}  {parts}"
    frozen = f", {found.frozen_checkpoint / GIB:.2f} once masks are frozen" if found.settings.forge.max_steps else ""
    yield "checkpoint", f"{_gib(found.checkpoint)}  GiB on disk{frozen}"
    took, machine = found.duration, found.machine
    whole = sum(took.flops.values())
    parts = ", ".join(f"{kind} {flops / whole:.0%}" for kind, flops in took.flops.items())
    yield "operations of a step", f"{whole:.3g}: {parts}"
    yield (
        "time",
        f"{took.steps:,} steps for {took.steps * took.tokens_per_step:,} tokens; {took.seconds_per_step:.2f} s a step "
        f"and {took.hours:,.1f} hours if {machine.mfu:.0%} of {machine.tflops:g} TFLOPS are reached (assumed)",
    )


def _layouts(found: Study) -> Iterator[Line]:
    yield "the same run under", "GiB of a GPU"
    for name, each in found.layouts.items():
        host = f", and {each.host_total / GIB:.0f} GiB of the host" if each.host else ""
        verdict = "fits" if each.peak <= found.machine.device else "does not fit"
        yield f"  {name}", f"{_gib(each.peak)}  {verdict}{host}"


def _verdict(found: Study) -> Iterator[Line]:
    device = found.machine.device / GIB
    if found.fits:
        yield "verdict", f"fits, with {device - found.memory.peak / GIB:.1f} of {device:.0f} GiB to spare"
        yield "", f"the largest micro-batch that fits: {found.largest_micro_batch} (of 1, 2, 4 ... 64)"
        return
    yield "verdict", f"does not fit: {found.memory.peak / GIB:.1f} GiB where there are {device:.0f}"
    assert found.advice is not None
    after = f"{found.advice.memory.peak / GIB:.1f} GiB"
    yield "", f"it fits ({after}) with:" if found.advice.fits else f"not even all of this is enough ({after}):"
    for line in found.advice.lines:
        yield "", f"  {line}"
    if found.advice.memory.host:
        yield "", f"  and {found.advice.memory.host_total / GIB:.0f} GiB of the host's memory for each GPU"
    if found.ranks_that_fit is not None:
        yield "", f"or, as it is, on {found.ranks_that_fit} GPUs"


def _parts(kinds: Kinds) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in kinds.items())


def _gib(size: float) -> str:
    return f"{size / GIB:8.2f}"


def to_dict(found: Study) -> dict[str, Any]:
    """Plain JSON types, in bytes and seconds."""
    model, laid_out, plan, advice = found.model, found.settings, found.memory, found.advice
    return {
        "deepspeed": laid_out.name,
        "fits": found.fits,
        "model": {
            "name": found.request.model,
            "model_type": model.model_type,
            "parameters": model.total,
            "active": model.active,
            "linear": model.coverage.linear,
            "masked": model.masked,
        },
        "settings": {
            "zero_stage": laid_out.stage,
            "ranks": laid_out.ranks,
            "dtype": str(laid_out.dtype).removeprefix("torch."),
            "micro_batch": laid_out.micro_batch,
            "accumulation": laid_out.accumulation,
            "seq_length": laid_out.seq_length,
            "activation_checkpointing": laid_out.checkpointing,
        },
        "memory": {"device": found.machine.device, "peak": plan.peak, "worst": plan.worst, **vars(plan)},
        "activations": {name: {**vars(each), "peak": each.peak} for name, each in found.activations.items()},
        "time": vars(found.duration),
        "checkpoint": found.checkpoint,
        "frozen_checkpoint": found.frozen_checkpoint,
        "layouts": {
            name: {"peak": each.peak, "host": each.host_total, "fits": each.peak <= found.machine.device}
            for name, each in found.layouts.items()
        },
        "largest_micro_batch": found.largest_micro_batch,
        "advice": advice and {"changes": advice.lines, "peak": advice.memory.peak, "fits": advice.fits},
        "ranks_that_fit": found.ranks_that_fit,
    }
