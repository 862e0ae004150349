"""The ranks that share an evaluation: each takes every n-th batch, and all get all results in the order of one rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


class Shares:
    """This rank among `count`; results travel as CPU objects over gloo, on GPUs too."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    @classmethod
    def alone(cls) -> Shares:
        """One process without a launcher."""
        return cls(0, 1)

    @classmethod
    @contextlib.contextmanager
    def of_launcher(cls) -> Iterator[Shares]:
        """The ranks that torchrun or deepspeed has started, for the time of the block."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield cls.alone()
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo")
        try:
            yield cls(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share."""
        return items[self.rank :: self.count]

    def all(self, results: list[T]) -> list[T]:
        """What became of all items, in their order, from every rank's results of `mine`. Collective."""
        shares = self._gather(results)
        merged: list[Any] = [None] * sum(map(len, shares))
        for rank, share in enumerate(shares):
            merged[rank :: self.count] = share
        return merged

    def all_or_raise(self, work: Callable[[], T]) -> T:
        """Do `work`, which does not communicate, on every rank.

        Raises:
            ValueError: it was refused on some rank; every rank raises it.
        """
        result, verdict = None, None
        try:
            result = work()
        except ValueError as error:
            verdict = str(error)
        for rank, other in enumerate(self._gather(verdict)):
            if other is not None:
                raise ValueError(other if rank == 0 else f"on rank {rank}: {other}")
        return cast(T, result)

    def _gather(self, value: T) -> list[T]:
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values
