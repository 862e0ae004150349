"""A study as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from sparseforge_ds.planning.architecture import largest_experts
from sparseforge_ds.planning.memory import Memory
from sparseforge_ds.planning.study import GIB, Study

Line = tuple[str, str]


def report(found: Study) -> str:
    """Everything on one screen, or nearly."""
    lines = [
        *_run(found),
        ("", ""),
        *memory_lines(found.memory, found.machine.device),
        *_activations(found),
        *_gathering(found),
        *_traffic(found),
        *_time(found),
        *_layouts(found),
        *_verdict(found),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in lines)


def _run(found: Study) -> Iterator[Line]:
    model, laid_out = found.model, found.settings
    active = f", {model.active:,} active for a token" if model.active != model.total else ""
    yield "model", f"{found.request.model} ({model.model_type}), {model.total:,} parameters{active}"
    yield (
        "pruned",
        f"{laid_out.forge.pattern} in {model.coverage.weights} weights: {model.coverage}",
    )
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
    if laid_out.teacher and laid_out.forge.distillation is not None:
        who = "the dense model" if found.teacher is None else f"{found.request.teacher}, {found.teacher.total:,}"
        held = {"zero3": "divided by ZeRO-3", "replicated": "whole on every GPU"}[laid_out.forge.distillation.hold]
        yield "teacher", f"{who}, {held}"


def memory_lines(plan: Memory, device: int) -> Iterator[Line]:
    """A GPU of `device` bytes, kind by kind and moment by moment."""
    yield "memory of a GPU", "GiB"
    for name, size in plan.resident.items():
        yield f"  {name}", _gib(size)
    for moment, kinds in plan.moments.items():
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in kinds.items())
        yield f"  + {moment}", f"{_gib(sum(kinds.values()))}  {parts}"
    yield "  reserve (assumed)", _gib(plan.reserve)
    phase = "" if plan.peak == plan.frozen_peak else " while masks move"
    yield "  peak", f"{_gib(plan.peak)}  of {device / GIB:.0f}, in {plan.worst}{phase}"
    if phase:
        yield "  peak once frozen", _gib(plan.frozen_peak)
    if plan.host:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.host.items())
        yield "  on the host", f"{_gib(plan.host_total)}  for each GPU: {parts}"


def _activations(found: Study) -> Iterator[Line]:
    kept, recomputed = found.activations["kept"], found.activations["recomputed"]
    yield "", ""
    yield "activations", "GiB of one micro-batch, the peak with the loss"
    for name, each in (("  without checkpointing", kept), ("  with checkpointing", recomputed)):
        yield (
            name,
            f"{_gib(each.peak)}  saved by the blocks {each.saved / GIB:.2f}, blocks of logits {each.logits / GIB:.2f}",
        )


def _gathering(found: Study) -> Iterator[Line]:
    if found.settings.stage < 3:
        return
    low = found.settings.low
    experts = largest_experts(found.model) * low
    together = f", a layer's experts {experts / GIB:.2f}" if experts else ""
    yield (
        "gathered by ZeRO-3",
        f"largest module {found.model.largest_module * low / GIB:.2f} GiB{together}, prefetched "
        f"{found.settings.prefetch * low / GIB:.2f}",
    )


def _traffic(found: Study) -> Iterator[Line]:
    yield "", ""
    carried = found.traffic
    for name, kinds in (("collectives of a step", carried.training), ("  + ours", carried.ours)):
        parts = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds.items())
        yield name, f"{_gib(sum(kinds.values()))}  GiB: {parts or 'none'}"
    frozen = f", {found.frozen_checkpoint / GIB:.2f} once masks are frozen"
    yield "checkpoint", f"{_gib(found.checkpoint)}  GiB on disk{frozen if found.settings.forge.max_steps else ''}"


def _time(found: Study) -> Iterator[Line]:
    took, machine = found.duration, found.machine
    parts = ", ".join(f"{kind} {flops / took.flops_per_step:.0%}" for kind, flops in took.flops.items())
    yield "operations of a step", f"{took.flops_per_step:.3g}: {parts}"
    yield (
        "time",
        f"{took.steps:,} steps for {took.steps * took.tokens_per_step:,} tokens; {took.seconds_per_step:.2f} s a step "
        f"and {took.hours:,.1f} hours if {machine.mfu:.0%} of {machine.tflops:g} TFLOPS are reached (assumed)",
    )


def _layouts(found: Study) -> Iterator[Line]:
    yield "", ""
    yield "the same run under", "GiB of a GPU"
    for name, each in found.layouts.items():
        host = f", and {each.host_total / GIB:.0f} GiB of the host" if each.host else ""
        verdict = "fits" if each.peak <= found.machine.device else "does not fit"
        yield f"  {name}", f"{_gib(each.peak)}  {verdict}{host}"


def _verdict(found: Study) -> Iterator[Line]:
    yield "", ""
    device = found.machine.device / GIB
    if found.fits:
        spare = device - found.memory.peak / GIB
        yield "verdict", f"fits, with {spare:.1f} of {device:.0f} GiB to spare"
        yield "", f"the largest micro-batch that fits: {found.largest_micro_batch} (of 1, 2, 4 ... 64)"
        return
    yield "verdict", f"does not fit: {found.memory.peak / GIB:.1f} GiB where there are {device:.0f}"
    assert found.advice is not None
    after = f"{found.advice.memory.peak / GIB:.1f} GiB"
    yield "", f"it fits ({after}) with:" if found.advice.fits else f"not even all of this is enough ({after}):"
    for change in found.advice.changes:
        yield "", f"  {change}"
    if found.advice.memory.host:
        yield "", f"  and {found.advice.memory.host_total / GIB:.0f} GiB of the host's memory for each GPU"
    if found.ranks_that_fit is not None:
        yield "", f"or, as it is, on {found.ranks_that_fit} GPUs"


def _gib(size: float) -> str:
    return f"{size / GIB:8.2f}"
