"""The harness itself: results by rank, failures that say who and where, and no hang."""

from __future__ import annotations

import os
import signal
import time

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.distributed import PATIENCE, RankFailure, run_distributed
from tests.tiny_models import tiny_llama, token_batch


def _sum_of_ranks(offset: torch.Tensor) -> dict[str, object]:
    total = offset + torch.distributed.get_rank()
    torch.distributed.all_reduce(total)
    return {"rank": torch.distributed.get_rank(), "total": total, "threads": torch.get_num_threads()}


def _fail_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        raise ValueError(f"rank {rank} has a reason")
    torch.distributed.barrier()


def _die_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def _never_ends() -> None:
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    time.sleep(PATIENCE)


def _train_one_step() -> tuple[float, str]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    model = tiny_llama()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batch = {name: tensor.to(engine.device) for name, tensor in token_batch(batch=1).items()}
    losses = []
    for _ in range(2):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses[1] - losses[0], get_accelerator().communication_backend_name()


def test_every_rank_returns_its_own_value() -> None:
    results = run_distributed(_sum_of_ranks, 2, torch.tensor([10.0]))
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["total"] for result in results] == [torch.tensor([21.0])] * 2
    assert all(result["threads"] == 1 for result in results)


def test_a_failure_keeps_its_type_and_names_rank_and_line() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has a reason") as caught:
        run_distributed(_fail_on, 2, rank=1)
    assert isinstance(caught.value.__cause__, RankFailure)
    assert "rank 1 of 2 failed" in str(caught.value.__cause__)
    assert "in _fail_on" in str(caught.value.__cause__)
    assert time.monotonic() - start < PATIENCE / 2


def test_a_killed_rank_is_reported() -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 died with exit code -9"):
        run_distributed(_die_on, 2, rank=0)


def test_a_hang_is_ended_with_stacks() -> None:
    run_distributed(_sum_of_ranks, 2, torch.tensor([0.0]))  # what ranks are forked from takes seconds to start
    with pytest.raises(TimeoutError, match="still ran after 8 s") as caught:
        run_distributed(_never_ends, 2, timeout=8)
    assert "_never_ends" in str(caught.value)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_distributed(lambda: None, 1)


def test_deepspeed_trains_on_the_ranks() -> None:
    for change, _ in run_distributed(_train_one_step, 2):
        assert change < 0
