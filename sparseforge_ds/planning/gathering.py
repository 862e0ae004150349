"""Which weights ZeRO-3 has gathered at which time: its fetching, prefetching and releasing, replayed without tensors.

The rules are those of DeepSpeed 0.19's `PartitionedParameterCoordinator` once it has seen a whole step: a module's
weights are fetched before it runs, the next ones up to the prefetch bucket with them, and a weight is released behind
its module unless it is used again within `stage3_max_reuse_distance` elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparseforge_ds.planning.architecture import Architecture, Module


class Step(NamedTuple):
    """One module that runs, as positions in `Architecture.parameters`."""

    needs: tuple[int, ...]
    frees: tuple[int, ...]
    """What it, and whatever it kept waiting, is done with afterwards."""


@dataclass(frozen=True)
class Gathering:
    """One forward (and backward) pass, in elements."""

    live: int
    """Most elements gathered at one time, without the persistent ones."""
    moved: int
    """Elements gathered in all, each as often as it is."""
    persistent: int
    """Elements that stay gathered on every rank."""
    largest: int
    """Most elements gathered by one call."""


def forward_only(architecture: Architecture) -> list[Step]:
    """What a teacher's forward pass needs."""
    return [Step(module.parameters, module.parameters) for module in architecture.modules]


def forward_backward(architecture: Architecture, checkpointing: bool) -> list[Step]:
    """What a forward and a backward pass need.

    The backward pass enters modules in the opposite order in which the forward pass left them. With checkpointing, a
    block is run forward again as soon as its last innermost module asks for what it saved, which meanwhile keeps that
    module's own weights.
    """
    modules = architecture.modules
    steps = forward_only(architecture)
    pending = {module.block for module in modules if module.block >= 0} if checkpointing else set()
    for index in reversed(architecture.left):
        own, block = modules[index].parameters, modules[index].block
        if not modules[index].innermost or block not in pending:
            steps.append(Step(own, own))
            continue
        pending.discard(block)
        again = [
            module.parameters for i, module in enumerate(modules) if module.block == block and not _whole(modules, i)
        ]
        steps.append(Step(own, ()))
        steps += [Step(needed, tuple(set(needed) - set(own))) for needed in again[:-1]]
        steps.append(Step(again[-1], (*again[-1], *own)))
    return steps


def _whole(modules: tuple[Module, ...], index: int) -> bool:
    """Whether a module is the block itself, which is not entered again."""
    return index == 0 or modules[index - 1].block != modules[index].block


def replay(
    architecture: Architecture,
    steps: Sequence[Step],
    *,
    prefetch: int,
    persistence: int,
    max_live: int,
    max_reuse: int,
) -> Gathering:
    """Fetch and release as DeepSpeed does over `steps`.

    Args:
        architecture: whose parameters `steps` names by position.
        steps: from `forward_only` or `forward_backward`.
        prefetch: stage3_prefetch_bucket_size.
        persistence: stage3_param_persistence_threshold.
        max_live: stage3_max_live_parameters, which bounds prefetching only.
        max_reuse: stage3_max_reuse_distance.
    """
    sizes = [parameter.numel for parameter in architecture.parameters]
    kept = {index for index, size in enumerate(sizes) if size <= persistence}
    here = set(kept)
    queue = deque((index, step) for step, module in enumerate(steps) for index in sorted(module.needs))
    fetched_for = dict.fromkeys(range(len(sizes)), -1)
    live = peak = moved = largest = 0

    def gather(wanted: set[int]) -> None:
        nonlocal live, peak, moved, largest
        size = sum(sizes[index] for index in wanted)
        here.update(wanted)
        live, moved, largest = live + size, moved + size, max(largest, size)
        peak = max(peak, live)

    for step, module in enumerate(steps):
        gather(set(module.needs) - here)
        unseen = {index for index in module.needs if fetched_for[index] < step}
        seen: set[int] = set()
        while queue and len(seen) < len(unseen):
            index, used = queue.popleft()
            fetched_for[index] = used
            seen.add(index)
        ahead: set[int] = set()
        size, room = 0, min(max_live - live, prefetch)
        while queue and size < room:
            index, used = queue.popleft()
            fetched_for[index] = max(fetched_for[index], used)
            if index not in here and index not in ahead:
                ahead.add(index)
                size += sizes[index]
        gather(ahead)
        done = {index for index in module.frees if index in here - kept and fetched_for[index] <= step + 1}
        distance = 0
        for later in steps[step + 1 :]:
            if distance >= max_reuse or not done:
                break
            done.difference_update(later.needs)
            distance += sum(sizes[index] for index in later.needs)
        here -= done
        live -= sum(sizes[index] for index in done)
    return Gathering(live=peak, moved=moved, persistent=sum(sizes[index] for index in kept), largest=largest)
