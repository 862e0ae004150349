"""Where a launcher has put this process, and what DeepSpeed's processes leave on a machine."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist

_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What DeepSpeed asks mpi4py for where one of them is not in the environment."""
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""How many processes mpirun or srun has started."""
_SHARED_BUFFER = "/dev/shm/deepspeed_allreduce_buffer_"


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


def set_default_environment() -> None:
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


def rank_from_launcher() -> int:
    """This process among those of the run; of mpirun's it is 0 until DeepSpeed has started."""
    return int(os.environ.get("RANK", "0"))


def world_size_from_launcher() -> int:
    """Processes of the run as the launcher announced them, before they have met."""
    return int(next((os.environ[name] for name in ("WORLD_SIZE", *_COUNTS) if name in os.environ), "1"))
