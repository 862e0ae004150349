"""The communication claim: a mask update moves O(rows + columns) + O(edges) bytes, never O(parameters)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests import tiny_models
from tests.distributed import run_distributed
from tests.zero.case import Case, build, probe_of, train_step

COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "barrier",
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather_coalesced",
    "all_reduce_coalesced",
]


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """(collective, bytes of its tensors) of every call, ours and DeepSpeed's alike."""
    calls: list[tuple[str, int]] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            flat: list[Any] = []
            for value in (*args, *kwargs.values()):
                flat += value if isinstance(value, (list, tuple)) else [value]
            sizes = [value.numel() * value.element_size() for value in flat if isinstance(value, Tensor)]
            calls.append((name, sum(sizes)))
            return function(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    for name, function in originals.items():
        setattr(dist, name, counting(name, function))
    try:
        yield calls
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def calls_of_update(case: Case, hidden: int, intermediate: int) -> dict[str, Any]:
    """Return what update 3 moves: its maths, all of `forge.step` without a probe, and a step between updates."""
    import deepspeed.comm.torch as backend

    assert backend.torch.distributed is dist  # DeepSpeed looks its collectives up there at every call
    # The updates before warm up what is made once.
    model = tiny_models.tiny_llama(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=40,
    )
    engine, forge = build(case, model)
    for step in range(3):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
    # A step between updates, then update 3 by its maths alone and by all of `forge.step`.
    engine.micro_steps += 1  # as by engine.step of a micro-batch that ends no step
    with counted() as between:
        forge.step(probe_of(engine, case, 2))
    train_step(engine, case, 3)
    with counted() as maths:
        forge.method.move()
    with counted() as full:
        assert forge.step(probe_of(engine, case, 3))
    with counted() as reporting:
        forge.histograms()
    return {
        "between": between,
        "maths": maths,
        "whole": full,
        "histograms": reporting,
        "matrices": len(forge.weights),
        "cut": forge.sharded.halo.any_cut,
        "edges": sum(forge.sharded.halo.prefix.values()) + sum(forge.sharded.halo.suffix.values()),
        "sides": sum(sum(weight.shape) for weight in forge.weights),
        "parameters": sum(weight.numel for weight in forge.weights),
    }


def calls_of_all(requests: list[tuple[Case, int, int]]) -> list[dict[str, Any]]:
    return [calls_of_update(*request) for request in requests]


def total(calls: list[tuple[str, int]]) -> int:
    return sum(size for _, size in calls)


NOTHING_PERSISTENT = {"stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    "config", [{"curvature": {"source": "training"}}, {"curvature": {"source": "probe"}}], ids=["training", "passes"]
)
def test_bytes_of_an_update_do_not_grow_with_the_weights(config: dict[str, Any]) -> None:
    requests = [
        (Case(stage=stage, zero=NOTHING_PERSISTENT if stage == 3 else {}, config=config), hidden, intermediate)
        for stage in (0, 1, 2, 3)
        for hidden, intermediate in ((32, 64), (64, 128))
    ]
    results = run_distributed(calls_of_all, 2, requests)
    for rank in results:
        for i in range(0, len(requests), 2):
            small = rank[i]
            large = rank[i + 1]
            stage = requests[i][0].stage
            assert not small["cut"] and not large["cut"]
            assert large["parameters"] == 4 * small["parameters"]
            for first in (small, large):  # of the fp32 row and column sums, a half from each rank
                first["maths"].remove(("all_gather_into_tensor", 4 * first["sides"] * 3 // 2))
            assert large["maths"] == small["maths"], stage
            assert len(small["maths"]) <= 2, (stage, small["maths"])
            assert total(small["maths"]) <= 64 * small["matrices"] + 256, (stage, small["maths"])
            assert not [name for name, _ in small["maths"] if "all_to_all" in name], stage
            assert small["between"] == [], stage
            # What was heard is reduced to slices; no gradient of a weight moves, passes of its own have none.
            reduced = [size for name, size in large["whole"] if name == "reduce_scatter_tensor"]
            assert reduced == [4 * large["sides"] * 3 // 2], stage
            weights = ("all_gather_into_tensor", "all_gather_single", "all_gather", "_all_gather_base")
            rest = [size for name, size in large["whole"] if name not in (*weights, "reduce_scatter_tensor")]
            assert sum(rest) <= 96 * large["matrices"] + 512, (stage, large["whole"])


@pytest.mark.parametrize("importance", ["magnitude", "wanda"])
def test_publication_on_zero3_moves_no_weight(importance: str) -> None:
    """Move nothing: the next forward gathers the new weights anyway, and magnitude has no probe."""
    case = Case(stage=3, zero=NOTHING_PERSISTENT, config={"importance": importance})
    small, large = run_distributed(calls_of_all, 2, [(case, 32, 64), (case, 64, 128)])[0]
    if importance == "magnitude":
        assert small["whole"] == large["whole"]
        assert total(small["whole"]) <= 64 * small["matrices"] + 256
    # Row and column sums of a curvature grow with the sides of a matrix, which are twice as long here.
    growth = 1 if importance == "magnitude" else 2
    assert total(small["histograms"]) <= total(large["histograms"]) <= growth * total(small["histograms"])
    assert total(small["histograms"]) <= 8 * 64 * small["matrices"] + 4 * small["sides"]


def test_cut_groups_add_their_missing_members_only() -> None:
    cases = [
        Case(stage=stage, zero=NOTHING_PERSISTENT if stage == 3 else {}, config={"exclude": ["*.k_proj.weight"]})
        for stage in (1, 3)
    ]
    requests = [(case, hidden, intermediate) for case in cases for hidden, intermediate in ((20, 28), (40, 56))]
    for rank in run_distributed(calls_of_all, 3, requests):
        for i, result in enumerate(rank):
            assert result["cut"] or result["parameters"] % 12 == 0, requests[i]
            exchanged = [size for name, size in result["maths"] if name == "all_to_all_single"]
            # Scores, then masks; what a rank receives is what it lacks, and it sends at most three members an edge.
            bound = 4 * (result["edges"] + 2 * 3 * 2 * result["matrices"])
            assert len(exchanged) == (2 if result["cut"] else 0)
            assert all(size <= bound for size in exchanged)
            assert result["edges"] <= 2 * 3 * result["matrices"]
