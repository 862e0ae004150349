"""Rank and world size as a launcher sets them in the environment, and DeepSpeed's shared memory on a machine."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of a process; DeepSpeed asks mpi4py where one of them is missing."""
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables with the number of processes that mpirun or srun has started."""
_PORTS = (10_000, 32_768)
"""First port, and the first of those that Linux hands out as ephemeral ones."""
_CHOSEN: set[int] = set()
"""Ports that this process has chosen."""
_SHARED_BUFFER = "/dev/shm/deepspeed_allreduce_buffer_"


def unlink_shared_buffers() -> None:
    """Let the shared memory of DeepSpeed's all-reduce on a CPU, 69 MB a rank, end with the run. Collective.

    DeepSpeed names it in /dev/shm, where it would stay for good. Once all ranks have opened it, it needs no name. Each
    rank removes the name that ends in its own number.
    """
    dist.barrier()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for line in maps.read_text().splitlines():
        mapped_file = line.split(maxsplit=5)[-1]
        if mapped_file.startswith(_SHARED_BUFFER) and mapped_file.endswith(f"_{dist.get_rank()}"):
            Path(mapped_file).unlink(missing_ok=True)


def set_default_environment() -> None:
    """Make this process rank 0 of 1 where no launcher has set the environment.

    Raises:
        ValueError: a launcher has started other processes too, but the environment is not enough to find them.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if not missing:
        return
    # A launcher that has set some of the variables must set all.
    if len(missing) < len(_VARIABLES) and ("RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        present = ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
        raise ValueError(
            f"the environment says {present} but not {', '.join(missing)}: set all of them, or none for one process, "
            "or start with deepspeed or torchrun"
        )
    # Processes of mpirun and srun find each other by mpi4py.
    for name in _COUNTS:
        if os.environ.get(name, "1") != "1":
            if find_spec("mpi4py") is None:
                raise ValueError(
                    f"{name}={os.environ[name]}: DeepSpeed finds the processes of mpirun and srun by mpi4py; "
                    "pip install mpi4py, or start with deepspeed, torchrun or launch/slurm.sh"
                )
            return
    # One process needs no launcher, only a free port.
    os.environ.update(zip(_VARIABLES, ("0", "0", "1", "127.0.0.1", str(free_port())), strict=True))


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Restore a launcher's variables at the end of the block: a process that starts later belongs to another run."""
    before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        yield
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)


def free_port() -> int:
    """Return a free port of this machine that the kernel does not hand out as an ephemeral one.

    Somebody listens on it seconds later. Meanwhile any connection could take a port that the kernel chooses. Process
    ids say nothing of who else chooses: containers that share a network count alike. So the choice is random, and does
    not depend on a seed.
    """
    generator = random.SystemRandom()
    while True:
        port = generator.randrange(*_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            if port not in _CHOSEN:
                listener.bind(("", port))
                _CHOSEN.add(port)
                return port


def rank_from_launcher() -> int:
    """Return the rank of this process; under mpirun it is 0 until DeepSpeed has started."""
    return int(os.environ.get("RANK", "0"))


def world_size_from_launcher() -> int:
    """Return the number of processes that the launcher announces, before they have met."""
    return int(next((os.environ[name] for name in ("WORLD_SIZE", *_COUNTS) if name in os.environ), "1"))
