"""The tiles of the packed product in Triton on this GPU: the fastest for each shape and rows, against the dense one.

python -m benchmarks.tiles [--json OUT] [--compile 16] [--seconds 55] [--shapes 14336x4096 ...] [--rows 1 4 ...]

Times are those of CUDA graphs that go through six weights or more in turn, twice the L2 cache at least, so that none is
found there. A tile whose result is further from fp64 than its dtype explains is told and not counted, as is one that
does not compile or run.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.extras.packed24.triton_kernel import Tile, choose_tile, multiply, triton24, unpack
from sparseforge_ds.packed_format.packing import pack24

SHAPES = ("14336x4096", "4096x14336", "4096x4096", "17408x5120")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
FEWEST_WEIGHTS = 6
"""Weights that a graph goes through, unless more are needed to leave the L2 cache."""
FEW = [
    *((1, 512, 4, 1), (1, 512, 4, 2), (1, 1024, 8, 1), (2, 512, 4, 1), (2, 512, 4, 2), (4, 512, 4, 1), (4, 512, 4, 2)),
    *((2, 1024, 8, 1), (4, 1024, 8, 1), (1, 256, 2, 2), (1, 256, 2, 4), (2, 256, 2, 1), (2, 256, 2, 2), (4, 256, 2, 2)),
    *((4, 128, 4, 2), (4, 128, 4, 4), (8, 128, 4, 1), (8, 128, 4, 2), (8, 128, 8, 2), (8, 128, 8, 4), (16, 128, 8, 2)),
    *((16, 128, 4, 1), (1, 128, 1, 2), (1, 128, 1, 4), (2, 128, 1, 2), (2, 128, 1, 4), (4, 128, 1, 2)),
]
"""Outputs, groups, warps and iterations unrolled of matrix-vector tiles."""
MANY = [
    *((64, 16, 4, 3), (64, 16, 4, 4), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3)),
    *((128, 16, 4, 3), (128, 32, 4, 3), (128, 16, 8, 3), (128, 32, 8, 2), (128, 32, 8, 3)),
]
"""Outputs, groups, warps and stages of matrix-matrix tiles."""
UNPACK = [(1, 512, 4), (1, 1024, 4), (1, 1024, 8), (2, 512, 4), (4, 512, 4), (8, 128, 4)]
"""Outputs, groups and warps of unpacking."""
CHECKS = [
    *((torch.float32, 4096, 4096, rows) for rows in (16, 1, 100, 256)),
    *((torch.float16, 4096, 4096, rows) for rows in (1, 3, 16, 100, 256)),
    *((torch.bfloat16, 4096, 4096, rows) for rows in (3, 5, 256)),
    *((torch.bfloat16, 1000, 4100, rows) for rows in (1, 3, 16, 200)),
]
"""Dtype, outputs, inputs and rows; 4100 inputs are no whole words of positions."""
SKIPPED = (RuntimeError, ValueError, TypeError, AssertionError, TritonError)
"""Errors of a tile that does not fit this GPU, including Triton's own."""


def candidates(rows: int, outputs: int, groups: int) -> Iterator[Tile]:
    """Tiles that are worth a try; parts of sums where whole ones would be too few programs."""
    if rows <= 8:
        block = 1 << (rows - 1).bit_length()
        for tile in FEW:
            if rows < 4 or (tile[3] < 4 and tile[0] <= 8):
                yield Tile(block, *tile)
    if 2 <= rows <= 256:
        block = min(128, max(16, 1 << (rows - 1).bit_length()))
        blocks = (64, 128) if 64 < rows <= 128 else (block,)
        for block in blocks:
            for tile in MANY[3 if rows <= 4 else 0 :: 2 if rows <= 4 else 1]:
                programs = -(-rows // block) * -(-outputs // tile[0])
                for splits in (1, 2, 4, 8) if rows <= 64 else (1, 2, 4):
                    if 100 <= programs * splits <= 1400 and groups // splits >= 2 * tile[1]:
                        yield Tile(block, *tile, splits)


def compile_one(job: tuple[int, Tile]) -> str | None:
    """Run a tile once in a process of its own, which leaves it in Triton's cache, or return why not."""
    rows, tile = job
    values = torch.zeros(4096, 2048, dtype=torch.bfloat16, device="cuda")
    positions = torch.full((4096, 512), 0x44, dtype=torch.uint8, device="cuda")
    x, y = values.new_zeros(rows, 4096), values.new_empty(rows, 4096)
    try:
        if tile.rows:
            multiply(x, values, positions, None, y, tile)
        else:
            unpack(values, positions, tile)
        torch.cuda.synchronize()
    except SKIPPED as error:
        return f"{tile}: {type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(processes: int, shapes: list[tuple[int, int]], all_rows: list[int]) -> None:
    """Fill Triton's cache; what is compiled depends on rows by whether they are one or a multiple of 16."""
    jobs: dict[Any, tuple[int, Tile]] = {tile: (1, tile) for tile in unpackers()}
    for rows in all_rows:
        for outputs, inputs in shapes:
            for tile in candidates(rows, outputs, inputs // 4):
                jobs[tile._replace(splits=min(tile.splits, 2)), rows == 1, rows % 16] = (rows, tile)
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        checks = pool.imap_unordered(check, CHECKS)
        for failure in pool.imap_unordered(compile_one, jobs.values()):
            if failure:
                print("skipped:", failure, flush=True)
        for line in checks:
            print(line)
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def unpackers() -> list[Tile]:
    """Tiles of unpacking."""
    return [Tile(0, outputs, groups, warps, 1) for outputs, groups, warps in UNPACK]


def graph_us(calls: Sequence[Callable[[], Any]], turns: int = 3) -> float:
    """Microseconds of a call, of all of them as one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    results = []
    for _ in range(turns + 1):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        results.append(begin.elapsed_time(end) / len(calls) * 1e3)
    return median(results[1:])


def product(x: Tensor, packed: tuple[Tensor, Tensor], tile: Tile) -> Tensor:
    """Multiply with a tile; a tile without rows unpacks the weight."""
    if not tile.rows:
        return torch.nn.functional.linear(x, unpack(*packed, tile))
    y = x.new_empty(x.shape[0], packed[0].shape[0])
    multiply(x, *packed, None, y, tile)
    return y


def error_of(y: Tensor, exact: Tensor, size: Tensor, inputs: int) -> float:
    """Return the largest error relative to the bound of one rounding and of sums in fp32; up to 1 is right."""
    rounding = torch.finfo(y.dtype).eps * exact.abs()
    summing = inputs * torch.finfo(torch.float32).eps * size
    return float(((y.double() - exact).abs() / (rounding + summing)).max())


def measure(dense: list[Tensor], packed: list[tuple[Tensor, Tensor]], rows: int, until: float) -> dict[str, Any] | None:
    """Measure one line of the table: dense, every tile, and that of `choose_tile`; None when time is up."""
    x = torch.randn(rows, dense[0].shape[1], device="cuda", dtype=dense[0].dtype)
    exact = x.double() @ dense[0].double().T
    size = x.double().abs() @ dense[0].double().abs().T
    outputs, inputs = dense[0].shape
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    tiles = [*candidates(rows, outputs, inputs // 4), *(unpackers() if rows >= 32 else [])]
    base = graph_us([partial(torch.nn.functional.linear, x, weight) for weight in dense])
    for tile in tiles:
        if time.perf_counter() > until:
            print("out of time", flush=True)
            return None
        name = " ".join(map(str, tile))
        try:
            error = error_of(product(x, packed[0], tile), exact, size, inputs)
            if not error <= 1:
                failed[name] = f"error {error:.1e} of what is right"
                continue
            times[name] = graph_us([partial(product, x, weight, tile) for weight in packed])
        except SKIPPED as fault:
            failed[name] = f"{type(fault).__name__}: {str(fault)[:200]}"
    chosen = graph_us([partial(triton24, x, values, positions, None) for values, positions in packed])
    best = sorted(times.items(), key=lambda item: item[1])
    text = "; ".join(f"[{name}] {us:.1f}" for name, us in best[:3])
    print(
        f"{outputs}x{inputs} rows {rows}: dense {base:.1f} us, chosen {chosen:.1f} us, {base / chosen:.2f}x; "
        f"best {text}, {base / best[0][1] if best else 0:.2f}x",
        flush=True,
    )
    for name, why in failed.items():
        print(f"  failed [{name}]: {why}", flush=True)
    return {
        "shape": [outputs, inputs],
        "rows": rows,
        "dense": base,
        "chosen": chosen,
        "tiles": dict(best),
        "failed": failed,
    }


def weights_in_turn(outputs: int, inputs: int, dtype: torch.dtype, cache_bytes: int | None = None) -> int:
    """Return the number of packed weights that take twice the L2 cache, by default that of this GPU."""
    if cache_bytes is None:
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    packed_bytes = outputs * inputs * dtype.itemsize // 2 + outputs * -(-inputs // 8)
    return max(FEWEST_WEIGHTS, math.ceil(2 * cache_bytes / packed_bytes))


def weights(outputs: int, inputs: int, dtype: torch.dtype, count: int) -> tuple[list[Tensor], list[Any]]:
    """Dense ones that are 2:4, at places that differ, and the same packed."""
    pairs = [[i in pair for i in range(4)] for pair in combinations(range(4), 2)]
    zeros = torch.tensor(pairs, device="cuda")
    dense = []
    packed = []
    for _ in range(count):
        weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype)
        group = weight.view(outputs, -1, 4)
        group.masked_fill_(zeros[torch.randint(len(zeros), group.shape[:2], device="cuda")], 0)
        dense.append(weight)
        packed.append(pack24(weight, -1))
    return dense, packed


def check(job: tuple[torch.dtype, int, int, int]) -> str:
    """Return the error of the tile of `choose_tile`."""
    dtype, outputs, inputs, rows = job
    dense, packed = weights(outputs, inputs, dtype, 1)
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    exact = x.double() @ dense[0].double().T + bias.double()
    size = x.double().abs() @ dense[0].double().abs().T + bias.double().abs()
    about = f"{dtype} {outputs}x{inputs} rows {rows} {tuple(choose_tile(rows, dtype, outputs, inputs // 4))}"
    try:
        error = error_of(triton24(x, packed[0][0], packed[0][1], bias), exact, size, inputs)
    except SKIPPED as fault:
        return f"{about}: {type(fault).__name__}: {str(fault)[:200]}"
    return f"{about}: error {error:.1e} of what is right{'' if error <= 1 else ': WRONG'}"


def host_times() -> None:
    """Print the time that a call takes on the host."""
    for rows in (1, 16, 256):
        _, packed = weights(256, 256, torch.bfloat16, 1)
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        plain = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
        calls: dict[str, Callable[[], Any]] = {
            "dense": partial(torch.nn.functional.linear, x, plain),
            "linear24": partial(linear24, x, *packed[0]),
            "triton24": partial(triton24, x, packed[0][0], packed[0][1], None),
        }
        print(f"host, rows {rows}:", ", ".join(f"{name} {host_us(call):.1f} us" for name, call in calls.items()))


@torch.no_grad()
def host_us(call: Callable[[], Any], count: int = 300) -> float:
    """Microseconds of the host for a call."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    result = (time.perf_counter() - start) / count * 1e6
    torch.cuda.synchronize()
    return result


def _shape(text: str) -> tuple[int, int]:
    outputs, inputs = map(int, text.split("x"))
    return outputs, inputs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--seconds", type=float, default=55)
    parser.add_argument("--shapes", type=_shape, nargs="+", default=[_shape(text) for text in SHAPES], metavar="OUTxIN")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    if args.compile:
        compile_all(args.compile, args.shapes, args.rows)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    host_times()
    results: list[dict[str, Any]] = []
    for outputs, inputs in args.shapes:
        dense, packed = weights(outputs, inputs, torch.bfloat16, weights_in_turn(outputs, inputs, torch.bfloat16))
        for rows in args.rows:
            line = measure(dense, packed, rows, until)
            if line is None:
                break
            results.append(line)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
        del dense, packed


if __name__ == "__main__":
    main()
