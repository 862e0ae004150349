"""What to change when a run does not fit: cheap settings first, and none that is not needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from sparseforge_ds.planning.memory import Memory
from sparseforge_ds.planning.settings import Settings

Estimate = Callable[[Settings], Memory]

_MOST_RANKS = 1024


class Change(Enum):
    """What helps, in the order in which it costs little. The value is what to write, with fields of `Settings`."""

    BUCKET = '"reduce_bucket_size": {bucket} in zero_optimization'
    CHECKPOINTING = "--activation_checkpointing"
    DIVIDED_TEACHER = '"hold": "zero3" in sparseforge.distillation'
    STAGE = '"stage": {stage} in zero_optimization'
    SUB_GROUP = '"sub_group_size": {sub_group} in zero_optimization'
    GATHER_LATE = '"stage3_max_reuse_distance": 0 and "stage3_prefetch_bucket_size": 0 in zero_optimization'
    MICRO_BATCH = '"train_micro_batch_size_per_gpu": {micro_batch} and "gradient_accumulation_steps": {accumulation}'
    FUSED = '"fused": true beside "torch_adam" in the optimizer\'s params'
    OPTIMIZER_ON_HOST = '"offload_optimizer": {{"device": "cpu"}} in zero_optimization'
    WEIGHTS_ON_HOST = '"offload_param": {{"device": "cpu"}} in zero_optimization'
    MAGNITUDE = '"importance": "magnitude" in sparseforge, which costs quality'

    def options(self, now: Settings) -> list[Settings]:
        """The run with this change, the mildest form first; empty where there is nothing to change."""
        several, zero3, hold = now.ranks > 1, now.stage == 3, now.forge.distillation
        found: list[Settings] = []
        if self is Change.BUCKET:
            found = [replace(now, bucket=min(now.bucket, 50_000_000))]
        elif self is Change.CHECKPOINTING:
            found = [replace(now, checkpointing=True)]
        elif self is Change.DIVIDED_TEACHER and hold is not None and several:
            found = [replace(now, forge=replace(now.forge, distillation=replace(hold, hold="zero3")))]
        elif self is Change.STAGE and several:
            found = [replace(now, stage=stage, overlapped=stage == 3) for stage in range(now.stage + 1, 4)]
        elif self is Change.SUB_GROUP and zero3:
            found = [replace(now, sub_group=min(now.sub_group, 100_000_000))]
        elif self is Change.GATHER_LATE and zero3 and several:
            found = [replace(now, max_reuse=0, prefetch=0)]
        elif self is Change.MICRO_BATCH:
            sequences = now.micro_batch * now.accumulation
            smaller = [n for n in range(now.micro_batch - 1, 0, -1) if now.micro_batch % n == 0]
            found = [replace(now, micro_batch=n, accumulation=sequences // n) for n in smaller]
        elif self is Change.FUSED:
            found = [replace(now, fused_optimizer=True)]
        elif self is Change.OPTIMIZER_ON_HOST and now.stage:
            found = [replace(now, optimizer_on_host=True)]
        elif self is Change.WEIGHTS_ON_HOST and zero3:
            found = [replace(now, weights_on_host=True)]
        elif self is Change.MAGNITUDE and now.forge.keeps_elements:
            found = [replace(now, forge=replace(now.forge, importance="magnitude"))]
        return [changed for changed in found if changed != now]


@dataclass(frozen=True)
class Advice:
    """The way from a run that does not fit to one that does."""

    changes: dict[Change, int]
    """Which of its options each change takes."""
    settings: Settings
    memory: Memory
    fits: bool
    """False when not even all changes together are enough."""

    @property
    def lines(self) -> list[str]:
        """What to write, for people."""
        return [change.value.format(**vars(self.settings)) for change in self.changes]


def advise(settings: Settings, estimate: Estimate, device: int, host: int | None = None) -> Advice:
    """The first changes, in the order in which they cost little, that make a run fit, without the needless among them.

    Args:
        settings: of the run that does not fit.
        estimate: memory of a rank by its settings.
        device: bytes of a GPU.
        host: bytes of the host for one rank, where that is known; offloading is not advised beyond it.
    """
    taken: dict[Change, int] = {}
    now = settings
    for change in Change:
        for number, changed in enumerate(change.options(now)):
            if fits(estimate(now), device, host):
                break
            if estimate(changed).peak < estimate(now).peak:
                taken[change], now = number, changed
    enough = fits(estimate(now), device, host)
    for change in list(reversed(taken)) if enough else ():
        fewer = {other: number for other, number in taken.items() if other is not change}
        without = apply(settings, fewer)
        if without is not None and fits(estimate(without), device, host):
            taken, now = fewer, without
    return Advice(taken, now, estimate(now), enough)


def apply(settings: Settings, changes: dict[Change, int]) -> Settings | None:
    """Make changes; None when one of them is not possible without another."""
    now = settings
    for change, number in changes.items():
        options = change.options(now)
        if number >= len(options):
            return None
        now = options[number]
    return now


def fits(memory: Memory, device: int, host: int | None = None) -> bool:
    """Whether a rank finds room in `device` bytes, and in `host` bytes of the host's memory where that is known."""
    return memory.peak <= device and (host is None or memory.host_total <= host)


def fewest_ranks(settings: Settings, estimate: Estimate, device: int, host: int | None = None) -> int | None:
    """The smallest power of two of ranks, at least the present one, on which it fits as it is; None up to 1024."""
    ranks = settings.ranks
    while ranks <= _MOST_RANKS:
        if fits(estimate(replace(settings, ranks=ranks)), device, host):
            return ranks
        ranks *= 2
    return None


def largest_micro_batch(settings: Settings, estimate: Estimate, device: int) -> int:
    """The largest power of two of sequences, up to 64, that fits; 0 when none does."""
    best, micro = 0, 1
    while micro <= 64 and estimate(replace(settings, micro_batch=micro)).peak <= device:
        best, micro = micro, 2 * micro
    return best
