"""A run with our Triton kernels, on CPUs in Triton's interpreter: the same as one without, matrix by matrix.

The interpreter holds for a whole process, so that the ranks are started from one of their own.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sparseforge_ds.curvature import tiled_shards
from sparseforge_ds.curvature.tiled_shards import TiledShards
from sparseforge_ds.mask.kernels.fusing import compiled
from sparseforge_ds.methods import soft_mask
from tests.distributed import run_distributed
from tests.interpreted_triton import run_interpreted
from tests.zero.case import Case, run
from tests.zero.test_parity import ODD

TRAINING = {"curvature": {"source": "training"}}
CASES = {
    "all in tiles": Case(stage=3, model="llama_24", config=TRAINING),
    # Many matrices lie in one weight, and experts without a token are scored by magnitude.
    "experts": Case(stage=2, model="qwen3_moe_idle", config={"include": ["*gate_up_proj"], **TRAINING}, steps=2),
    # The first rank's last part and all parts of the second one begin or end inside a byte of bits.
    "some in tiles": Case(
        stage=2,
        dtype="bf16",
        model="llama_odd",
        config={"importance": "magnitude", "method": {"threshold": "nth"}, **ODD},
        steps=6,
    ),
}


def test_it_is_the_same_run() -> None:
    run_interpreted("-c", "from tests.zero.test_tiled_shards import compare_runs; compare_runs()")


@pytest.mark.gpu
def test_it_is_the_same_run_on_a_gpu() -> None:
    """Let a mask code differ by one, see `kernels.fusing`; from there on the runs go apart by roundings."""
    name = "all in tiles"
    runs = run_distributed(run_twice, 1, [name], device="cuda")[0][name]
    assert runs.in_tiles
    first, expected = runs.tiled["updates"][0]["mask"], runs.by_matrix["updates"][0]["mask"]
    for weight, mask in first.items():
        apart = (mask - expected[weight]).abs()
        assert float(apart.max()) < 2 / 65535 and int((apart > 0).sum()) <= 1, weight
    assert runs.tiled["losses"] == pytest.approx(runs.by_matrix["losses"], rel=1e-3)
    assert runs.tiled["metrics"][0] == pytest.approx(runs.by_matrix["metrics"][0], rel=1e-5)


class Runs(NamedTuple):
    """One case in tiles and matrix by matrix."""

    tiled: dict[str, Any]
    by_matrix: dict[str, Any]
    in_tiles: list[str]
    """Weights of this rank that were in tiles."""
    elsewhere: list[str]
    """Weights of this rank that were not."""
    by_magnitude: set[int]
    """Matrices that had no curvature."""
    log: list[str]
    """Messages of the run in tiles."""


def compare_runs() -> None:
    """Compare both runs of every case, on two ranks."""
    for name, runs in run_distributed(run_twice, 2, list(CASES))[0].items():
        tiled, by_matrix = runs.tiled, runs.by_matrix
        assert runs.in_tiles and bool(runs.elsewhere) == (name == "some in tiles"), (name, runs.elsewhere)
        assert bool(runs.by_magnitude) == (name == "experts"), (name, runs.by_magnitude)
        # A user is told once how much goes the slower way.
        assert len(runs.log) == bool(runs.elsewhere), runs.log
        assert all("0.0% have their inputs in rows" in message for message in runs.log), runs.log
        # Kernels in layer hooks add tokens up in another order, and a code may then round to the other side.
        apart = {"rtol": 1e-5, "atol": 2 / 65535} if name == "all in tiles" else {"rtol": 0, "atol": 0}
        assert tiled["losses"] == pytest.approx(by_matrix["losses"], rel=apart["rtol"], abs=0), name
        assert len(tiled["updates"]) == len(by_matrix["updates"]) > 0
        for ours, expected in zip(tiled["updates"], by_matrix["updates"], strict=True):
            torch.testing.assert_close(ours["mask"], expected["mask"], **apart)
            torch.testing.assert_close(ours["dense"], expected["dense"], **apart)
            torch.testing.assert_close(ours.get("curvature"), expected.get("curvature"), rtol=1e-5, atol=0)
        torch.testing.assert_close(tiled["published"], by_matrix["published"], **apart)
        for metrics, expected in zip(tiled["metrics"], by_matrix["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-6)


def run_twice(names: list[str]) -> dict[str, Runs]:
    """Run every case in tiles and matrix by matrix, in the interpreter without any kernel of ours then."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    runs = {}
    for name in names:
        moved: list[tuple[TiledShards, set[int]]] = []
        move = TiledShards.move

        # Note which shards are moved in tiles, and which matrices by magnitude.
        def noting(
            tiled: TiledShards, factors: Any, by_magnitude: set[int], *args: Any, moved: Any = moved, move: Any = move
        ) -> None:
            moved.append((tiled, by_magnitude))
            move(tiled, factors, by_magnitude, *args)

        with (
            mock.patch.object(TiledShards, "move", noting),
            mock.patch.object(logging.getLogger(tiled_shards.__name__), "info") as info,
        ):
            tiled = run(CASES[name])
        # The same case matrix by matrix.
        tiles_off = mock.patch.object(soft_mask, "tiled_shards", lambda weights: None)
        with compiled(False) if is_interpreted else tiles_off:
            by_matrix = run(CASES[name])
        shards, by_magnitude = moved[0]
        in_tiles = [chunk.name for chunks in shards.chunks.values() for chunk in chunks]
        log = [call.args[0] % call.args[1:] for call in info.call_args_list]
        runs[name] = Runs(tiled, by_matrix, in_tiles, shards.rest, by_magnitude, log)
    return runs if dist.get_rank() == 0 else {}
