"""Processes of a run or an evaluation, and how they agree on an error: what one rank finds, every rank raises.

Python objects travel over a gloo group of its own, which needs no GPU and is patient: the others may wait for hours
while rank 0 tokenizes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

_PATIENCE = timedelta(days=7)


class AgreedError(ValueError):
    """An error that every rank raises together, so that it needs to be printed once."""


def _patient_group() -> dist.ProcessGroup:
    """Return a gloo group on the network interface that NCCL was told to take, unless gloo has one of its own.

    Raises:
        ValueError: the ranks do not reach each other.
    """
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if wanted in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", wanted)
    try:
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_PATIENCE))
    except RuntimeError as error:
        raise ValueError(
            f"ranks do not reach each other by gloo ({str(error).strip().splitlines()[0]:.300}); set "
            "GLOO_SOCKET_IFNAME to the network interface that joins the machines, on each of them"
        ) from None


def all_or_raise(work: Callable[[], T], gather: Callable[[str | None], list[str | None]]) -> T:
    """Do `work` on every rank, and return its result where no rank has an error. Collective.

    Args:
        work: function that must not communicate.
        gather: function that returns a value of every rank, in rank order, such as `Ranks.gather`.

    Raises:
        AgreedError: it was refused (ValueError), failed (OSError) or ran out of memory on some rank.
    """
    result, problem = _attempt(work)
    for rank, message in enumerate(gather(problem)):
        if message is not None:
            raise AgreedError(message if rank == 0 else f"on rank {rank}: {message}")
    return cast(T, result)


class Ranks:
    """Place of this process among all; without a process group it is alone."""

    def __init__(self) -> None:
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world_size = dist.get_world_size() if joined else 1
        self._process_group = _patient_group() if joined else None

    @property
    def first(self) -> bool:
        """True for the rank that writes and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order."""
        if self._process_group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._process_group)
        return values

    def all_or_raise(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank, as the function `all_or_raise` does."""
        return all_or_raise(work, self.gather)

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and give its (picklable) result to every rank.

        Raises:
            AgreedError: it was refused (ValueError), failed (OSError) or ran out of memory.
        """
        answer: list[Any] = [_attempt(work) if self.first else None]
        if self._process_group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._process_group)
        result, verdict = answer[0]
        if verdict is not None:
            raise AgreedError(verdict)
        return cast(T, result)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._process_group is not None:
            dist.barrier(group=self._process_group)

    def leave(self) -> None:
        """Wait for every rank and close the connections, so that no rank takes the end of another for a failure."""
        self.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """Join the ranks that torchrun or deepspeed has started, or this process alone, for the time of the block."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo")
    try:
        yield Ranks()
    finally:
        dist.destroy_process_group()


def _attempt(work: Callable[[], T]) -> tuple[Any, str | None]:
    """Return the result of `work` and None, or None and the message of its error."""
    try:
        return work(), None
    except ValueError as error:
        return None, str(error)
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        return None, f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        # torch has no class of its own for memory of the host.
        if "DefaultCPUAllocator" not in str(error):
            raise
        return None, f"MemoryError: {error}"
