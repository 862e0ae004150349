"""Agreement: what one rank finds, every rank raises."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from sparseforge_ds.train.ranks import AgreedError, Ranks, unlink_shared_buffers
from tests.distributed import run_distributed


def _agreements():
    ranks = Ranks()
    outcomes = [ranks.everywhere(lambda: ranks.rank * 10), ranks.on_first(lambda: {"from": ranks.rank})]

    def fail(rank, error):
        if ranks.rank == rank:
            raise error

    for work in (
        lambda: ranks.everywhere(lambda: fail(0, ValueError("first"))),
        lambda: ranks.everywhere(lambda: fail(1, ValueError("second"))),
        lambda: ranks.on_first(lambda: fail(0, OSError(28, "No space left on device"))),
    ):
        try:
            work()
        except AgreedError as error:
            outcomes.append(str(error))
    ranks.barrier()
    return [*outcomes, ranks.gather(ranks.rank)]


def test_every_rank_gets_the_same_verdict():
    first, second = run_distributed(_agreements, 2)
    rest = [{"from": 0}, "first", "on rank 1: second", "OSError: [Errno 28] No space left on device", [0, 1]]
    assert first == [0, *rest]
    assert second == [10, *rest]


def _other_error():
    Ranks().everywhere(lambda: 1 / 0)


def test_a_mistake_of_ours_is_not_dressed_up():
    with pytest.raises(ZeroDivisionError):
        run_distributed(_other_error, 1)


def _shared_buffers() -> dict[str, bool]:
    """Which buffers have a name before and after, and whether they still work."""
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
