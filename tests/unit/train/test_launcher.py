"""A process finds its place, and DeepSpeed's buffers end with the run."""

from __future__ import annotations

import importlib.util
import os
import random
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from sparseforge_ds.train.launcher import (
    free_port,
    set_default_environment,
    unlink_shared_buffers,
    world_size_from_launcher,
)
from tests.distributed import run_distributed


def _shared_buffers() -> dict[str, bool]:
    """Return the buffers that have a name before and after, and whether they still work."""
    os.environ["LOCAL_SIZE"] = str(dist.get_world_size())  # as DeepSpeed's launcher does
    shared = get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    shared.initialize(dist.get_world_size(), dist.get_rank())
    ours = f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_"
    dist.barrier()
    before = len(list(Path("/dev/shm").glob(f"{ours}*")))
    unlink_shared_buffers()
    dist.barrier()
    after = len(list(Path("/dev/shm").glob(f"{ours}*")))
    total = torch.full((8,), float(dist.get_rank() + 1))
    torch.ops.deepspeed.inference_all_reduce_(total)
    return {"named": before == 2, "left": after > 0, "works": bool((total == 3).all())}


@pytest.mark.skipif(sys.platform != "linux", reason="DeepSpeed's buffers are files of Linux's /dev/shm")
def test_buffers_of_deepspeed_end_with_the_run(tmp_path):
    """And those of another run keep their names."""
    other = Path("/dev/shm") / f"deepspeed_allreduce_buffer_{os.getuid()}_{tmp_path.name}_0_0"
    other.touch()
    try:
        for rank in run_distributed(_shared_buffers, 2):
            assert rank == {"named": True, "left": False, "works": True}
        assert other.exists()
    finally:
        other.unlink()


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove a launcher from the environment; what `set_default_environment` sets is taken back."""
    for name in (*PLACE, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_without_a_launcher_a_process_is_alone(nowhere: pytest.MonkeyPatch) -> None:
    nowhere.setenv("MASTER_ADDR", "somewhere.else")  # as clusters set it for whole jobs
    nowhere.setenv("SLURM_STEP_NUM_TASKS", "1")
    set_default_environment()
    *position, port = (os.environ[name] for name in PLACE)
    assert position == ["0", "0", "1", "127.0.0.1"]
    assert 10_000 <= int(port) < 32_768  # an ephemeral one could be taken by a connection before DeepSpeed listens


def test_ports_that_are_taken_or_were_chosen_before_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    second = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        drawn = iter([first, listener.getsockname()[1], second, second + 1, *range(10_000, 20_000)])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert free_port() not in (first, listener.getsockname()[1], second)


def test_an_environment_of_a_launcher_is_kept(nowhere: pytest.MonkeyPatch) -> None:
    arguments = dict(zip(PLACE, ("3", "1", "4", "node0", "29500"), strict=True))
    for name, value in arguments.items():
        nowhere.setenv(name, value)
    set_default_environment()
    assert {name: os.environ[name] for name in PLACE} == arguments


def test_an_incomplete_environment_is_refused(nowhere: pytest.MonkeyPatch) -> None:
    nowhere.setenv("RANK", "1")
    nowhere.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK=1, WORLD_SIZE=2 but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT: set all"):
        set_default_environment()
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py finds the others")
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_of_mpirun_do_not_each_train_alone(nowhere: pytest.MonkeyPatch, name: str) -> None:
    nowhere.setenv(name, "2")
    with pytest.raises(ValueError, match=f"{name}=2: .* pip install mpi4py, or start with deepspeed"):
        set_default_environment()


def test_the_world_size_of_mpirun_and_srun_counts(nowhere: pytest.MonkeyPatch) -> None:
    assert world_size_from_launcher() == 1
    nowhere.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert world_size_from_launcher() == 4
    nowhere.setenv("WORLD_SIZE", "2")
    assert world_size_from_launcher() == 2
