"""The tilings of the kernel for sparse tensor cores on this GPU: the cheapest by the rule, and what they take.

python -m benchmarks.tilings [--shapes 14336x4096 ...] [--rows 1 8 16 32 64] [--best 10] [--seconds 60]

Times are those of CUDA graphs that go through six weights or more in turn, twice the L2 cache at least, so that none is
found there. The first of a line is what the rule takes; a tiling that is wrong is told and not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from benchmarks.tiles import error_of, graph_us, weights, weights_in_turn
from sparseforge_ds.extras.packed24.cuda_driver import shared_memory_limit
from sparseforge_ds.extras.packed24.mma_kernel import ProductPlan, Tiling, ranked
from sparseforge_ds.extras.packed24.staged_tiling import StagedTiling

SHAPES = ("14336x4096", "4096x14336", "4096x4096", "17408x5120", "1024x4096", "28672x8192")


def candidates(rows: int, outputs: int, inputs: int, best: int) -> Sequence[Tiling | StagedTiling]:
    """Return the cheapest tilings by the rule, the one that it chooses first."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return ranked(rows, outputs, inputs, processors, shared_memory_limit(0))[:best]


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="OUTxIN")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--best", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    shapes = [(int(outputs), int(inputs)) for outputs, inputs in (text.split("x") for text in args.shapes)]
    torch.zeros(1, device="cuda")
    jobs = [
        (tiling, rows, *shape, torch.bfloat16, 0)
        for shape in shapes
        for rows in args.rows
        for tiling in candidates(rows, *shape, args.best)
    ]
    with ThreadPoolExecutor() as pool:
        plans = dict(zip(jobs, pool.map(lambda job: ProductPlan(*job), jobs), strict=True))
    for outputs, inputs in shapes:
        dense, packed = weights(outputs, inputs, torch.bfloat16, weights_in_turn(outputs, inputs, torch.bfloat16))
        for rows in args.rows:
            if time.perf_counter() > until:
                print("out of time")
                return
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
            y = x.new_empty(rows, outputs)
            exact = x.double() @ dense[0].double().T
            size = x.double().abs() @ dense[0].double().abs().T
            base = graph_us([partial(torch.nn.functional.linear, x, weight) for weight in dense])
            words = []
            for tiling in candidates(rows, outputs, inputs, args.best):
                plan = plans[tiling, rows, outputs, inputs, torch.bfloat16, 0]
                plan(x, packed[0][0], packed[0][1], None, y)
                if not error_of(y, exact, size, inputs) <= 1:
                    words.append(f"{tuple(tiling)} WRONG")
                    continue
                us = graph_us([partial(plan, x, values, positions, None, y) for values, positions in packed])
                words.append(f"{','.join(map(str, tiling))}: {us:.1f} ({base / us:.2f}x)")
            print(f"{outputs}x{inputs} rows {rows}: dense {base:.1f} us;", "; ".join(words), flush=True)


if __name__ == "__main__":
    main()
