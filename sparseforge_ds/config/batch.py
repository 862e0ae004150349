"""How many sequences a step, a rank and a micro-batch have, and how many ranks share one."""

from __future__ import annotations

import json
from typing import Any

from sparseforge_ds.config.arguments import RunArguments

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SEQUENCE = "sequence_parallel_size"


def with_batch(
    content: dict[str, Any], global_batch: int | None, micro_batch: int | None, accumulation: int | None = None
) -> dict[str, Any]:
    """Return the configuration with another batch, in sequences of a step and of a rank, and micro-batches of a step;
    None keeps what it says, or what the other two leave over."""
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
    elif (global_batch, micro_batch) != (None, None) and changed.get("train_batch_size", "auto") != "auto":
        changed["gradient_accumulation_steps"] = "auto"  # what the other two leave over
    return changed


def batch_line(resolved: dict[str, Any], world_size: int) -> str:
    """The batch of a resolved configuration over the ranks, for people."""
    parts, (micro, accumulation) = resolved.get(SEQUENCE, 1), (resolved[name] for name in BATCH[1:])
    if parts == 1:
        return f"{micro} a rank x {accumulation} accumulated x {world_size} ranks"
    groups = f"{world_size // parts} group{'s' * (world_size > parts)} of {parts} ranks that share sequences"
    return f"{micro} a group x {accumulation} accumulated x {groups}"


def sequence_ranks(content: dict[str, Any], arguments: RunArguments, world_size: int) -> int:
    """How many ranks share one sequence: those of the flag, or of the JSON. Raises ValueError where the number is not
    one, or does not divide the number of ranks."""
    given, flag = content.get(SEQUENCE, 1), arguments.sequence_parallel
    size, who = (given, f"{SEQUENCE} =") if flag is None else (flag, "--sequence_parallel")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{who} {json.dumps(size)} is not valid: use an integer >= 1")
    if world_size % size:
        raise ValueError(
            f"{who} {size}: {world_size} ranks cannot be divided into groups of {size}, each of which shares its "
            f"sequences; use a divisor of {world_size}, or change the number of ranks"
        )
    return size


def batch_arithmetic(content: dict[str, Any], world_size: int, sequence: int = 1) -> dict[str, int]:
    """All of `BATCH`: train = micro * accumulation * ranks that read other sequences, as each `sequence` share theirs.

    Given are one, two or all three of train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps;
    "auto" counts as not given. Raises ValueError where they do not fit each other and the number of ranks.
    """
    names, ranks, world_size = BATCH, world_size, world_size // sequence
    train, micro, accumulation = (None if content.get(name) == "auto" else content.get(name) for name in names)
    for name, value in zip(names, (train, micro, accumulation), strict=True):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f'{name} = {json.dumps(value)} is not valid: use an integer >= 1 or "auto"')
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        train = micro * accumulation * world_size
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    assert accumulation is not None
    if train != micro * accumulation * world_size or train == 0:
        unit = max(1, micro if content.get(names[1]) != "auto" and names[1] in content else 1)
        unit *= world_size * (accumulation if content.get(names[2]) not in (None, "auto") else 1)
        near = sorted({max(unit, train // unit * unit), (train // unit + 1) * unit})
        raise ValueError(
            f"train_batch_size = {train} cannot be divided into micro-batches for {ranks} ranks"
            f"{f', of which {sequence} share a sequence' if sequence > 1 else ''} "
            f"(train_micro_batch_size_per_gpu {content.get(names[1], 'auto')}, gradient_accumulation_steps "
            f'{content.get(names[2], "auto")}): use {" or ".join(map(str, near))}, set the other two keys to "auto", '
            "or change the number of ranks; --global_batch and --micro_batch win over the JSON"
        )
    return dict(zip(names, (train, micro, accumulation), strict=True))


def check_probe_batch(filled: dict[str, Any], sequences: int | None, readers: int, sequence: int) -> None:
    """Refuse a probe batch that `readers` (ranks, or groups of ranks that share sequences) cannot divide like a
    step's."""
    micro = filled[BATCH[1]]
    at_once, who = micro * readers, "ranks" if sequence == 1 else f"groups of {sequence} ranks"
    if sequences is not None and sequences % at_once:
        raise ValueError(
            f"sparseforge.curvature.sequences = {sequences}: {readers} {who} with a micro-batch of "
            f"{micro} read {at_once} at a time; use a multiple of that, or null for those of a step"
        )
