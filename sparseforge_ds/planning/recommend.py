"""What to change when a run does not fit: cheap settings first, and none that is not needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparseforge_ds.planning.memory import Memory
from sparseforge_ds.planning.settings import Settings

Estimate = Callable[[Settings], Memory]

_SMALL_BUCKET = 50_000_000
_SMALL_SUB_GROUP = 100_000_000
_LITTLE_REUSE = 0
_MOST_RANKS = 1024


@dataclass(frozen=True)
class Advice:
    """The way from a run that does not fit to one that does."""

    changes: tuple[str, ...]
    settings: Settings
    memory: Memory
    fits: bool
    """False when not even all changes together are enough."""


def advise(settings: Settings, estimate: Estimate, device: int, host: int | None = None) -> Advice:
    """The first changes, in the order in which they cost little, that make a run fit; those that it can do without are
    left out.

    Args:
        settings: of the run that does not fit.
        estimate: memory of a rank by its settings.
        device: bytes of a GPU.
        host: bytes of the host for one rank, where that is known; offloading is not advised beyond it.
    """
    taken: list[str] = []
    useless: set[str] = set()
    now = settings
    while not fits(estimate(now), device, host):
        offers = ((text, changed) for text, changed in _ladder(now) if text not in useless and changed != now)
        text, changed = next(offers, ("", now))
        if not text:
            return Advice(tuple(taken), now, estimate(now), False)
        if estimate(changed).peak < estimate(now).peak:
            taken.append(text)
            now = changed
        else:
            useless.add(text)
    return _without_needless(settings, taken, now, estimate, device, host)


def fits(memory: Memory, device: int, host: int | None = None) -> bool:
    """Whether a rank finds room in `device` bytes, and in `host` bytes of the host's memory where that is known."""
    return memory.peak <= device and (host is None or memory.host_total <= host)


def _ladder(now: Settings) -> Iterator[tuple[str, Settings]]:
    change = dataclasses.replace
    yield (
        f'"reduce_bucket_size": {_SMALL_BUCKET} in zero_optimization',
        change(now, bucket=min(now.bucket, _SMALL_BUCKET)),
    )
    yield "--activation_checkpointing", change(now, checkpointing=True)
    hold = now.forge.distillation
    if now.teacher and hold is not None and hold.hold == "replicated" and now.ranks > 1:
        divided = dataclasses.replace(now.forge, distillation=dataclasses.replace(hold, hold="zero3"))
        yield '"hold": "zero3" in sparseforge.distillation', change(now, forge=divided)
    for stage in range(now.stage + 1, 4):
        if now.ranks > 1:
            yield f'"stage": {stage} in zero_optimization', change(now, stage=stage, overlapped=stage == 3)
    if now.stage == 3:
        yield (
            f'"sub_group_size": {_SMALL_SUB_GROUP} in zero_optimization',
            change(now, sub_group=min(now.sub_group, _SMALL_SUB_GROUP)),
        )
    if now.stage == 3 and now.ranks > 1:
        yield (
            f'"stage3_max_reuse_distance": {_LITTLE_REUSE} and "stage3_prefetch_bucket_size": 0 in zero_optimization',
            change(now, max_reuse=_LITTLE_REUSE, prefetch=0),
        )
    micro = now.micro_batch
    while micro > 1:
        least = next(d for d in range(2, micro + 1) if micro % d == 0)
        micro //= least
        times = now.accumulation * now.micro_batch // micro
        yield (
            f'"train_micro_batch_size_per_gpu": {micro} and "gradient_accumulation_steps": {times}',
            change(now, micro_batch=micro, accumulation=times),
        )
    if not now.fused_optimizer:
        yield '"fused": true beside "torch_adam" in the optimizer\'s params', change(now, fused_optimizer=True)
    if now.stage:
        yield (
            '"offload_optimizer": {"device": "cpu"} in zero_optimization',
            change(now, optimizer_on_host=True),
        )
    if now.stage == 3:
        yield '"offload_param": {"device": "cpu"} in zero_optimization', change(now, weights_on_host=True)
    if now.forge.keeps_elements:
        magnitude = dataclasses.replace(now.forge, importance="magnitude")
        yield '"importance": "magnitude" in sparseforge, which costs quality', change(now, forge=magnitude)


def _without_needless(
    start: Settings, taken: list[str], present: Settings, estimate: Estimate, device: int, host: int | None
) -> Advice:
    """Leave out, one at a time and from the costly end, every change without which it fits as well."""
    needed = list(taken)
    for text in reversed(taken):
        fewer = [other for other in needed if other != text]
        changed = _apply(start, fewer)
        if changed is not None and fits(estimate(changed), device, host):
            needed, present = fewer, changed
    return Advice(tuple(needed), present, estimate(present), True)


def _apply(start: Settings, texts: list[str]) -> Settings | None:
    """Make changes by their texts; None when one of them is not possible without another."""
    now = start
    for text in texts:
        found = next((changed for offered, changed in _ladder(now) if offered == text), None)
        if found is None:
            return None
        now = found
    return now


def fewest_ranks(settings: Settings, estimate: Estimate, device: int, host: int | None = None) -> int | None:
    """The smallest power of two of ranks, at least the present one, on which it fits as it is; None up to 1024."""
    ranks = settings.ranks
    while ranks <= _MOST_RANKS:
        if fits(estimate(dataclasses.replace(settings, ranks=ranks)), device, host):
            return ranks
        ranks *= 2
    return None


def largest_micro_batch(settings: Settings, estimate: Estimate, device: int) -> int:
    """The largest power of two of sequences, up to 64, that fits; 0 when none does."""
    best, micro = 0, 1
    while micro <= 64 and estimate(dataclasses.replace(settings, micro_batch=micro)).peak <= device:
        best, micro = micro, 2 * micro
    return best
