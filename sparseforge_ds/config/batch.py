"""Sizes of the batch: sequences of a step and of a micro-batch, and ranks that share a sequence."""

from __future__ import annotations

import json
from typing import Any

from sparseforge_ds.config.arguments import RunArguments

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys of the DeepSpeed JSON about the batch: sequences of a step, sequences of a rank at a time, accumulation."""
SEQUENCE = "sequence_parallel_size"
"""Key of the DeepSpeed JSON for the ranks that share one sequence."""


def with_batch(
    content: dict[str, Any], global_batch: int | None, micro_batch: int | None, accumulation: int | None = None
) -> dict[str, Any]:
    """Return a configuration with another batch.

    Args:
        content: the parsed DeepSpeed JSON, which is not changed.
        global_batch: sequences of a step; None keeps the configuration's, or follows from the other two.
        micro_batch: sequences of a rank at a time; None likewise.
        accumulation: micro-batches of a step; None likewise.
    """
    changed = dict(content)
    if global_batch is not None:
        changed["train_batch_size"] = global_batch
    if micro_batch is not None:
        changed["train_micro_batch_size_per_gpu"] = micro_batch
    if accumulation is not None:
        changed["gradient_accumulation_steps"] = accumulation
        if global_batch is None:
            changed["train_batch_size"] = "auto"
        elif micro_batch is None:
            changed["train_micro_batch_size_per_gpu"] = "auto"
    elif (global_batch, micro_batch) != (None, None) and all(changed.get(name, "auto") != "auto" for name in BATCH[:2]):
        changed["gradient_accumulation_steps"] = "auto"  # it follows from the other two
    return changed


def batch_line(resolved: dict[str, Any], world_size: int) -> str:
    """Describe the batch of a resolved configuration, for the banner."""
    micro, accumulation = (resolved[name] for name in BATCH[1:])
    size = resolved.get(SEQUENCE, 1)
    if size == 1:
        return f"{micro} a rank x {accumulation} accumulated x {world_size} ranks"
    groups = f"{world_size // size} group{'s' * (world_size > size)} of {size} ranks that share sequences"
    return f"{micro} a group x {accumulation} accumulated x {groups}"


def sequence_ranks(content: dict[str, Any], arguments: RunArguments, world_size: int) -> int:
    """Return the number of ranks that share one sequence, from the flag or the JSON.

    Raises:
        ValueError: it is no integer above 0, or does not divide the number of ranks.
    """
    size = content.get(SEQUENCE, 1)
    who = f"{SEQUENCE} ="
    if arguments.sequence_parallel is not None:
        size = arguments.sequence_parallel
        who = "--sequence_parallel"
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{who} {json.dumps(size)} is not valid: use an integer >= 1")
    if world_size % size:
        raise ValueError(
            f"{who} {size}: {world_size} ranks cannot be divided into groups of {size}, each of which shares its "
            f"sequences; use a divisor of {world_size}, or change the number of ranks"
        )
    return size


def batch_arithmetic(content: dict[str, Any], world_size: int, sequence: int = 1) -> dict[str, int]:
    """Return all three values of `BATCH`: train = micro * accumulation * (ranks / ranks that share a sequence).

    Args:
        content: has none, one, two or all three of the keys; "auto" counts as missing.
        world_size: number of ranks.
        sequence: ranks that share one sequence.

    Raises:
        ValueError: the values do not fit each other and the number of ranks.
    """
    readers = world_size // sequence
    train, micro, accumulation = (None if content.get(name) == "auto" else content.get(name) for name in BATCH)
    for name, value in zip(BATCH, (train, micro, accumulation), strict=True):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f'{name} = {json.dumps(value)} is not valid: use an integer >= 1 or "auto"')
    # 1. Missing values follow from the others.
    if train is None:
        micro = micro or 1
        accumulation = accumulation or 1
        train = micro * accumulation * readers
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * readers)
    elif accumulation is None:
        accumulation = train // (micro * readers)
    assert accumulation is not None
    # 2. The division must be exact; the message names the nearest batches that fit the given values.
    if train != micro * accumulation * readers or train == 0:
        unit = max(1, micro if content.get(BATCH[1]) != "auto" and BATCH[1] in content else 1)
        unit *= readers * (accumulation if content.get(BATCH[2]) not in (None, "auto") else 1)
        near = sorted({max(unit, train // unit * unit), (train // unit + 1) * unit})
        raise ValueError(
            f"train_batch_size = {train} cannot be divided into micro-batches for {world_size} ranks"
            f"{f', of which {sequence} share a sequence' if sequence > 1 else ''} "
            f"(train_micro_batch_size_per_gpu {content.get(BATCH[1], 'auto')}, gradient_accumulation_steps "
            f'{content.get(BATCH[2], "auto")}): use {" or ".join(map(str, near))}, set the other two keys to "auto", '
            "or change the number of ranks; --global_batch and --micro_batch win over the JSON"
        )
    return dict(zip(BATCH, (train, micro, accumulation), strict=True))


def check_probe_batch(filled: dict[str, Any], sequences: int | None, readers: int, sequence: int) -> None:
    """Refuse a probe batch that cannot be divided as the batch of a step is.

    Args:
        filled: the resolved configuration.
        sequences: sequences of the probe batch; None: as many as a step has.
        readers: ranks, or groups of ranks that share sequences.
        sequence: ranks that share one sequence.
    """
    micro = filled[BATCH[1]]
    at_once = micro * readers
    who = "ranks" if sequence == 1 else f"groups of {sequence} ranks"
    if sequences is not None and sequences % at_once:
        raise ValueError(
            f"sparseforge.curvature.sequences = {sequences}: {readers} {who} with a micro-batch of "
            f"{micro} read {at_once} at a time; use a multiple of that, or null for those of a step"
        )
