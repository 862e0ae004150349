"""Agreement: what one rank finds, every rank raises."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import torch

from sparseforge_ds.ranks import AgreedError, Ranks
from tests.distributed import run_distributed


def _agreements():
    ranks = Ranks()
    outcomes = [ranks.all_or_raise(lambda: ranks.rank * 10), ranks.on_first(lambda: {"from": ranks.rank})]

    def fail(rank, error):
        if ranks.rank == rank:
            raise error

    for work in (
        lambda: ranks.all_or_raise(lambda: fail(0, ValueError("first"))),
        lambda: ranks.all_or_raise(lambda: fail(1, ValueError("second"))),
        lambda: ranks.all_or_raise(lambda: fail(1, torch.OutOfMemoryError("third"))),
        lambda: ranks.all_or_raise(lambda: torch.empty(1 << 60) if ranks.rank else None),
        lambda: ranks.all_or_raise(lambda: fail(1, MemoryError("fifth"))),
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
    rest = [{"from": 0}, "first", "on rank 1: second", "on rank 1: OutOfMemoryError: third"]
    assert re.match(r"on rank 1: MemoryError: .*DefaultCPUAllocator: can't allocate memory", first.pop(5))
    assert second.pop(5).startswith("on rank 1: MemoryError: ")
    rest += ["on rank 1: MemoryError: fifth", "OSError: [Errno 28] No space left on device", [0, 1]]
    assert first == [0, *rest]
    assert second == [10, *rest]


def _joined_by(interfaces):
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(interfaces)
    try:
        Ranks()
    except ValueError as error:
        return str(error)
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_gloo_takes_the_interface_of_nccl_unless_it_has_one():
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for wanted in (loopback, f"={loopback}"):
        assert run_distributed(_joined_by, 2, {"NCCL_SOCKET_IFNAME": wanted}) == [loopback] * 2
    own = {"NCCL_SOCKET_IFNAME": loopback, "GLOO_SOCKET_IFNAME": "nowhere0"}
    for message in run_distributed(_joined_by, 2, own):
        assert (
            "ranks do not reach each other by gloo (" in message and "set GLOO_SOCKET_IFNAME to the network" in message
        )


def _other_error():
    Ranks().all_or_raise(lambda: 1 / 0)


def test_a_mistake_of_ours_is_not_dressed_up():
    with pytest.raises(ZeroDivisionError):
        run_distributed(_other_error, 1)


def test_a_process_without_others_agrees_with_itself():
    ranks = Ranks()
    assert ranks.first and ranks.gather(3) == [3] and ranks.all_or_raise(lambda: 4) == 4
    with pytest.raises(AgreedError, match="FileNotFoundError"):
        ranks.on_first(lambda: Path("/nowhere/at/all").read_text())
