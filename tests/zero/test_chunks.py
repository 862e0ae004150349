"""Work on a chunk at a time is work at once, bit for bit: scores, gates, masks, curvature, publication."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparseforge_ds.zero.halo import cut_into_chunks
from sparseforge_ds.zero.shard import Shard
from tests.distributed import run_distributed
from tests.zero.case import Case, build, probe_of, published, short, states, train_step

ODD = {"exclude": ["*.down_proj.weight"]}
ELEMENTS = {"curvature": {"factored": False}}
CASES = {
    "stage 3": Case(stage=3),
    "cut groups": Case(stage=3, model="llama_odd", config=ODD),
    "tiles": Case(stage=2, model="llama_tiles", config={"pattern": "block16"}),
    "input first": Case(stage=1, model="gpt2"),
    "hutchinson": Case(stage=2, config={"exclude": ["*.k_proj.weight"], "importance": "hutchinson"}),
    "wanda": Case(stage=3, model="qwen3_moe", config={"importance": "wanda"}),
    "experts": Case(stage=3, model="qwen3_moe"),
    "experts, stage 1": Case(stage=1, model="qwen3_moe", dtype="bf16"),
    "experts, stage 0": Case(stage=0, model="qwen3_moe"),
    "experts by elements": Case(stage=3, model="qwen3_moe", config=ELEMENTS),
    "experts by elements, stage 1": Case(stage=1, model="qwen3_moe", config=ELEMENTS),
    "two probes": Case(stage=3, model="qwen3_moe", config={"curvature": {"probes": 2}}),
    "sr_ste": Case(stage=3, model="llama_odd", config={"method": "sr_ste", **ODD}),
    "maskllm": Case(stage=3, model="llama_odd", config={"method": "maskllm", **ODD}),
}


def train(case: Case, small: bool) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Weights and states after a run, numbers of its last update, and chunks."""
    if "method" not in case.config:
        case = short(case)
    with ExitStack() as stack:
        if small:
            stack.enter_context(mock.patch("sparseforge_ds.zero.halo.CHUNK", 1))
            stack.enter_context(mock.patch("sparseforge_ds.mask.kernels.fisher.EXPERT_BYTES", 1))
        engine, forge = build(case)
        if forge.method.needs_start:
            forge.start(probe_of(engine, case, 0))
        gaps = []
        for step in range(case.steps):
            train_step(engine, case, step)
            forge.step(probe_of(engine, case, step))
            if step == case.steps // 2:
                gaps.append(forge.soft_to_hard_gap(probe_of(engine, case, step)))
        keys = ("dense", "mask", *(("curvature",) if forge.curvature.estimator is not None else ()))
        tensors = {
            f"{key} {name}": value
            for key, by_weight in states(forge, *keys).items()
            for name, value in by_weight.items()
        }
        tensors |= {f"published {name}": value for name, value in published(engine).items()}
        numbers = {**forge.metrics, "gap": gaps[0], "histograms": forge.histograms(), **forge.state_dict()}
        return tensors, numbers, sum(map(len, forge.sharded.halo.chunks.values()))


def train_all(small: bool, cases: list[Case]) -> list[Any]:
    return [train(case, small) for case in cases]


def test_a_run_in_small_chunks_is_the_run_in_one() -> None:
    chunks, full = (run_distributed(train_all, 2, is_small, list(CASES.values())) for is_small in (True, False))
    for rank in range(2):
        for name, small, plain in zip(CASES, chunks[rank], full[rank], strict=True):
            assert small[2] > plain[2], name
            assert small[0].keys() == plain[0].keys()
            for key, value in plain[0].items():
                assert torch.equal(small[0][key], value), (name, key)
            for key, number in plain[1].items():
                if isinstance(number, float):  # sums in another order
                    assert small[1][key] == pytest.approx(number, rel=1e-9, abs=1e-12), (name, key)
                else:
                    assert small[1][key] == number, (name, key)


@pytest.mark.parametrize(
    ("start", "stop", "period"), [(0, 1000, 4), (6, 1003, 4), (0, 0, 4), (7, 7, 4), (100, 90_000, 320)]
)
def test_chunks_are_cut_between_periods(start: int, stop: int, period: int) -> None:
    shard = Shard("w", (300, 320), start, stop, 1, 50)
    with mock.patch("sparseforge_ds.zero.halo.CHUNK", 256):
        chunks = cut_into_chunks(shard, period)
    ends = [start, *(chunk.stop for chunk in chunks)]
    assert [chunk.start for chunk in chunks] == ends[:-1] and ends[-1] == stop
    assert all(chunk.stop > chunk.start and chunk.offset - 50 == chunk.start - start for chunk in chunks)
    assert all(chunk.stop % period == 0 for chunk in chunks[:-1])
    assert bool(chunks) == (stop > start)
