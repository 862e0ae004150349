"""Time of the fused functions of an update and of a step: bytes a second on the device, and what a call costs the host.

python -m benchmarks.fused_functions --device cuda [--shapes 17408x5120 576x576] [--json fused.json]

Medians of 15 calls. `bytes` is what a function must move for one weight, each operand counted once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels.bits import keep_in_place, pack
from sparseforge_ds.mask.kernels.codes import CODE
from sparseforge_ds.mask.kernels.fisher import add_fisher_sums
from sparseforge_ds.mask.kernels.fused_update import mask_stats, update_mask_in_place
from sparseforge_ds.mask.kernels.publication import soft_step
from sparseforge_ds.mask.kernels.scores import RankOne, score_moments
from sparseforge_ds.mask.kernels.tiles import (
    SUMS,
    MatrixRun,
    TiledCurvature,
    TiledPartition,
    can_tile,
    cut_into_tiles,
    new_moments,
    sum_moments,
    update_partition,
)
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.model.distill import tokens_per_block
from sparseforge_ds.model.token_losses import TokenLosses

DIALS = Dials(temperature=0.4, beta=0.3, mid_penalty=0.2, penalty_rate=0.2, mask_rate=0.1, x=0.7)
CALLS = 15
Case = tuple[str, float, int, Callable[[], Any]]
"""Name, bytes an element, elements, and a call."""


def main(argv: list[str] | None = None) -> None:
    """Measure every function at every shape, print a line each, and write them as JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", type=_shape, nargs="+", default=[(576, 576), (17408, 5120)], metavar="OUTxIN")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the layer hook and of the loss")
    parser.add_argument("--vocabulary", type=int, default=151936, help="entries of the loss")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = []
    with torch.no_grad():
        for outputs, inputs in args.shapes:
            for name, size, elements, call in _cases(args.device, outputs, inputs, args.tokens):
                rows.append(_measure(f"{outputs}x{inputs} {name}", size, elements, call, args.device))
        for name, size, elements, call in _loss(args.device, args.tokens, args.vocabulary):
            rows.append(_measure(name, size, elements, call, args.device))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def _cases(device: str, outputs: int, inputs: int, tokens: int) -> Iterator[Case]:
    """Yield the functions on one matrix, all of it on one rank."""
    # A matrix in the middle of its annealing.
    torch.manual_seed(0)
    elements = outputs * inputs
    dense = torch.randn(elements, device=device)
    codes = torch.randint(0, 65536, (elements,), device=device).to(CODE)
    before = pack(torch.rand(elements, device=device) > 0.5)
    curvature = RankOne(torch.rand(outputs, device=device), torch.rand(inputs, device=device), 0)
    scaling = scalings(score_moments(dense, curvature)[None], 1e-4)[0]
    pattern = NM(2, 4)
    shape = (outputs, inputs)
    update = update_mask_in_place(dense, codes, curvature, scaling, DIALS, pattern, shape, -1)
    kept = mask_stats(codes, update.target, update.kept, before).kept
    assert kept is not None
    master = dense.clone()

    # Each with the bytes that it must move for a weight.
    yield "moments", 4, elements, lambda: score_moments(dense, curvature)
    yield (
        "move",
        10,
        elements,
        lambda: update_mask_in_place(dense, codes, curvature, scaling, DIALS, pattern, shape, -1),
    )
    yield "mask_stats", 4.4, elements, lambda: mask_stats(codes, update.target, update.kept, before)
    yield "soft step", 18.1, elements, lambda: soft_step(dense, master, codes, kept, 0.6, 0.5, master)
    yield "keep in place", 8.1, elements, lambda: keep_in_place(master, kept)
    if can_tile(pattern, dense.device):  # what an update of 2:4 is made of on a GPU, publication included
        tiles = cut_into_tiles([MatrixRun(0, 0, 0, elements)]).to(device)
        factors = torch.cat([curvature.share_R, curvature.column_C])
        bounds = torch.tensor([[0, outputs, inputs]]).to(device)
        tiled = TiledCurvature(factors, bounds, torch.ones(1, dtype=torch.bool, device=device))
        partition = TiledPartition(dense, codes, before, kept, master)
        moments = new_moments(tiles)
        sums = torch.empty(len(tiles), SUMS, device=device)
        rows = scaling[None]
        yield "moments, in tiles", 4, elements, lambda: sum_moments(dense, tiled, tiles, moments)
        yield (
            "update, in tiles",
            12.4,
            elements,
            lambda: update_partition(partition, tiled, rows, tiles, DIALS, True, sums),
        )
    gradient_TO = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
    input_TI = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    layer = gradient_TO.numel() + input_TI.numel()
    sums_of_layer = [torch.zeros(size, dtype=torch.float64, device=device) for size in shape]
    yield "layer hook", 4, layer, lambda: add_fisher_sums(gradient_TO, input_TI, 1.0, *sums_of_layer)


def _loss(device: str, tokens: int, vocabulary: int) -> Iterator[Case]:
    """Yield the element-wise part of the distillation loss over a block of tokens: both models' logits, two passes."""
    config = DistillationConfig()
    rows = min(tokens, tokens_per_block(vocabulary))
    student_TV = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16)
    teacher_TV = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16)
    labels_T = torch.randint(vocabulary, (rows,), device=device)
    losses = TokenLosses(labels_T, config, torch.bfloat16)
    of_total = torch.ones((), device=device)
    yield "loss, first pass", 4, student_TV.numel(), lambda: losses.add(slice(None), student_TV, teacher_TV)
    yield "loss, gradient", 6, student_TV.numel(), lambda: losses.gradient(student_TV, teacher_TV, of_total)


def _measure(name: str, size: float, elements: int, call: Callable[[], Any], device: str) -> dict[str, Any]:
    """Time calls of a function, print the line and return it."""
    for _ in range(3):
        call()
    milliseconds = median(_milliseconds(call, device) for _ in range(CALLS))
    rate = elements * size / milliseconds / 1e9
    host = _host_microseconds(call, device)
    print(f"{name:36} {milliseconds:9.4f} ms {rate:7.3f} TB/s {host:8.0f} us host", flush=True)
    return {"name": name, "ms": milliseconds, "terabytes_a_second": rate, "host_us": host}


def _milliseconds(call: Callable[[], Any], device: str) -> float:
    """Time one call, on the device's own clock where it has one."""
    if device == "cpu":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _host_microseconds(call: Callable[[], Any], device: str, calls: int = 20) -> float:
    """Time that the host spends on a call, without waiting for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    spent = (time.perf_counter() - began) / calls * 1e6
    if device == "cuda":
        torch.cuda.synchronize()
    return spent


def _shape(text: str) -> tuple[int, int]:
    """Parse OUTxIN."""
    outputs, inputs = text.split("x")
    return int(outputs), int(inputs)


if __name__ == "__main__":
    main()
