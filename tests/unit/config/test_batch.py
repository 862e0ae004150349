"""Ranks that share sequences, in the arithmetic of the batch."""

from __future__ import annotations

from typing import Any

import pytest

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.batch import BATCH, batch_arithmetic, batch_line, sequence_ranks

CONTENT = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}


def ranks(content: dict[str, Any], world_size: int, flag: int | None = None) -> int:
    return sequence_ranks(content, RunArguments(deepspeed="zero3", sequence_parallel=flag), world_size)


def test_the_flag_wins_over_the_json() -> None:
    assert ranks({}, 6) == 1
    assert ranks({"sequence_parallel_size": 2}, 6) == 2
    assert ranks({"sequence_parallel_size": 2}, 6, flag=3) == 3


@pytest.mark.parametrize(
    ("arguments", "flag", "words"),
    [
        ({}, 4, "--sequence_parallel 4: 6 ranks cannot be divided into groups of 4"),
        ({"sequence_parallel_size": 4}, None, "sequence_parallel_size = 4: 6 ranks cannot be divided"),
        ({"sequence_parallel_size": 0}, None, "sequence_parallel_size = 0 is not valid: use an integer >= 1"),
        ({"sequence_parallel_size": "auto"}, None, 'sequence_parallel_size = "auto" is not valid'),
        ({"sequence_parallel_size": True}, None, "sequence_parallel_size = true is not valid"),
    ],
)
def test_a_number_that_does_not_divide_the_ranks_is_refused(
    arguments: dict[str, Any], flag: int | None, words: str
) -> None:
    with pytest.raises(ValueError) as raised:
        ranks(arguments, 6, flag)
    assert str(raised.value).startswith(words)


def test_groups_of_ranks_divide_the_batch_as_ranks_do() -> None:
    assert batch_arithmetic(CONTENT, 4, 2) == dict(zip(BATCH, (12, 3, 2), strict=True))
    assert batch_arithmetic(CONTENT, 2, 2) == batch_arithmetic(CONTENT, 1) == dict(zip(BATCH, (12, 3, 4), strict=True))
    with pytest.raises(ValueError, match=r"for 10 ranks, of which 2 share a sequence .*: use 15, set"):
        batch_arithmetic(CONTENT, 10, 2)
    resolved = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "sequence_parallel_size": 2}
    assert batch_line(resolved, 4) == "3 a group x 2 accumulated x 2 groups of 2 ranks that share sequences"
