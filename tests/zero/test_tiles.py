"""A run whose masks are updated a partition at a time, on CPUs in Triton's interpreter: the same as matrix by matrix.

The interpreter holds for a whole process, so that the ranks are started from one of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sparseforge_ds.curvature import tiles
from sparseforge_ds.curvature.tiles import TiledShards
from sparseforge_ds.methods import soft_mask
from tests.distributed import PATIENCE, ROOT, run_distributed
from tests.zero.case import Case, run
from tests.zero.test_parity import ODD

CASES = {
    "all in tiles": Case(stage=3, model="llama_24", config={"curvature": {"source": "training"}}),
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
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    done = subprocess.run(
        [sys.executable, "-c", "from tests.zero.test_tiles import compare_runs; compare_runs()"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_it_is_the_same_run_on_a_gpu() -> None:
    """A mask code may differ by one, see `kernels.fusing`; from there on the runs go apart by roundings."""
    name = "all in tiles"
    tiled, by_matrix, in_tiles, *_ = run_distributed(run_twice, 1, [name], device="cuda")[0][name]
    assert in_tiles
    first, expected = tiled["updates"][0]["mask"], by_matrix["updates"][0]["mask"]
    for weight, mask in first.items():
        apart = (mask - expected[weight]).abs()
        assert float(apart.max()) < 2 / 65535 and int((apart > 0).sum()) <= 1, weight
    assert tiled["losses"] == pytest.approx(by_matrix["losses"], rel=1e-3)
    assert tiled["metrics"][0] == pytest.approx(by_matrix["metrics"][0], rel=1e-5)


def compare_runs() -> None:
    """Compare both runs of every case, on two ranks."""
    for name, (tiled, by_matrix, in_tiles, elsewhere, log) in run_distributed(run_twice, 2, list(CASES))[0].items():
        assert in_tiles and bool(elsewhere) == (name == "some in tiles"), (name, in_tiles, elsewhere)
        # A user is told once how much goes the slower way.
        assert len(log) == bool(elsewhere) and all("0.0% have their inputs in rows" in message for message in log), log
        assert tiled["losses"] == by_matrix["losses"], name
        assert len(tiled["updates"]) == len(by_matrix["updates"]) > 2
        for ours, expected in zip(tiled["updates"], by_matrix["updates"], strict=True):
            assert_equal(ours["mask"], expected["mask"])
            assert_equal(ours["dense"], expected["dense"])
        assert_equal(tiled["published"], by_matrix["published"])
        for ours, expected in zip(tiled["metrics"], by_matrix["metrics"], strict=True):
            assert ours == pytest.approx(expected, rel=1e-6)


def run_twice(names: list[str]) -> dict[str, Any]:
    """Run every case in tiles and matrix by matrix; return both, what was in tiles and what was not, and the log."""
    runs = {}
    for name in names:
        made: list[TiledShards] = []
        move = TiledShards.move

        def noting(tiled: TiledShards, *args: Any, made: list[TiledShards] = made, move: Any = move) -> None:
            made.append(tiled)
            move(tiled, *args)

        with mock.patch.object(TiledShards, "move", noting), mock.patch.object(tiles._LOG, "info") as info:
            tiled = run(CASES[name])
        with mock.patch.object(soft_mask, "tiled_shards", lambda weights: None):
            by_matrix = run(CASES[name])
        in_tiles = [chunk.name for chunks in made[0].chunks.values() for chunk in chunks]
        log = [call.args[0] % call.args[1:] for call in info.call_args_list]
        runs[name] = (tiled, by_matrix, in_tiles, made[0].rest, log)
    return runs if dist.get_rank() == 0 else {}


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), name
