"""The processes of a run, and how they agree on an error: what one rank finds, every rank raises.

Talk goes over a gloo group of its own, which works on CPU objects and is patient: the other ranks may wait for hours
while rank 0 tokenises.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What DeepSpeed asks mpi4py for where one of them is not in the environment."""
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""How many processes mpirun or srun has started."""
_SHARED_BUFFER = "/dev/shm/deepspeed_allreduce_buffer_"


class AgreedError(ValueError):
    """An error that every rank raises together, so that it needs to be printed once."""


class Ranks:
    """This process among all; made after `deepspeed.init_distributed`."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_or_raise(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank. It must not communicate.

        Raises:
            AgreedError: it was refused (ValueError) or failed (OSError) on some rank.
        """
        result, verdict = _attempt(work)
        for rank, other in enumerate(self.gather(verdict)):
            if other is not None:
                raise AgreedError(other if rank == 0 else f"on rank {rank}: {other}")
        return cast(T, result)

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and give its (picklable) result to every rank.

        Raises:
            AgreedError: it was refused (ValueError) or failed (OSError).
        """
        result, verdict = _attempt(work) if self.first else (None, None)
        answer: list[Any] = [(result, verdict)]
        dist.broadcast_object_list(answer, src=0, group=self.group)
        result, verdict = answer[0]
        if verdict is not None:
            raise AgreedError(verdict)
        return cast(T, result)

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self.group)

    def leave(self) -> None:
        """Wait for every rank and close the connections, so that no rank takes the end of another for a failure."""
        self.barrier()
        dist.destroy_process_group()


def unlink_shared_buffers() -> None:
    """Let the memory of DeepSpeed's all-reduce on a CPU, 69 MB a rank, end with the run. Collective.

    DeepSpeed names it in /dev/shm, where it would stay for good; once all ranks have it open it needs no name. This
    rank removes what it has mapped and has made, which its number at the end of the name says.
    """
    dist.barrier()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for line in maps.read_text().splitlines():
        place = line.split(maxsplit=5)[-1]
        if place.startswith(_SHARED_BUFFER) and place.endswith(f"_{dist.get_rank()}"):
            Path(place).unlink(missing_ok=True)


def take_place() -> None:
    """Make this process rank 0 of 1 where no launcher has told it its place.

    Raises:
        ValueError: a launcher has started it with others, but has not told it enough to find them.
    """
    missing = [name for name in _PLACE if name not in os.environ]
    if not missing:
        return
    if len(missing) < len(_PLACE) and ("RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        raise ValueError(
            f"the environment says {', '.join(f'{name}={os.environ[name]}' for name in _PLACE if name in os.environ)} "
            f"but not {', '.join(missing)}: set all of them, or none for one process, or start with deepspeed or "
            "torchrun"
        )
    for name in _COUNTS:
        if os.environ.get(name, "1") != "1":
            if find_spec("mpi4py") is None:
                raise ValueError(
                    f"{name}={os.environ[name]}: DeepSpeed finds the processes of mpirun and srun by mpi4py; "
                    "pip install mpi4py, or start with deepspeed, torchrun or launch/slurm.sh"
                )
            return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ.update(zip(_PLACE, ("0", "0", "1", "127.0.0.1", str(port)), strict=True))


def world_size_from_launcher() -> int:
    """Processes of the run as the launcher announced them, before they have met."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _attempt(work: Callable[[], T]) -> tuple[Any, str | None]:
    try:
        return work(), None
    except ValueError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{type(error).__name__}: {error}"
