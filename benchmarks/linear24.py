"""The packed product on this CPU against torch's dense one and against a dense kernel written as carefully.

python -m benchmarks.linear24 [--threads 1] [--rows 1 2 4 8 16 17 32] [--repeats 9]

In turns; each line has medians in milliseconds, and medians of the quotients of neighbours. Weights are larger than the
last cache. The careful dense kernel (dense_matvec.cpp) knows one row of x and needs AVX-512 with bf16.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.cpp_extension import load

from sparseforge_ds.mask.packing import pack24
from sparseforge_ds.runtime.linear24 import linear24


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 17, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args()
    load(
        name="sparseforge_bench_dense",
        sources=[str(Path(__file__).with_name("dense_matvec.cpp"))],
        extra_cflags=["-O3", "-fopenmp"],
        extra_ldflags=["-fopenmp"],
        is_python_module=False,
    )
    torch.set_num_threads(args.threads)
    for name in args.dtypes:
        for shape in ((14336, 4096), (4096, 14336)):
            weight = torch.randn(shape, dtype=getattr(torch, name))
            weight.view(shape[0], -1, 4)[..., 1:3] = 0
            packed = pack24(weight, -1)
            for rows in args.rows:
                print(
                    f"{name} {shape[0]} x {shape[1]}, {rows} rows: {_line(weight, packed, rows, args.repeats)}",
                    flush=True,
                )


@torch.no_grad()
def _line(weight: torch.Tensor, packed: Any, rows: int, repeats: int) -> str:
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype)
    runs = {"torch": lambda: torch.nn.functional.linear(x, weight), "packed": lambda: linear24(x, *packed)}
    if rows == 1:
        runs["careful dense"] = lambda: torch.ops.sparseforge_bench.dense_matvec(x[0], weight)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - began)
    words = [f"{name} {median(taken) * 1e3:.2f} ms" for name, taken in times.items()]
    for name in runs.keys() - {"packed"}:
        quotient = median(theirs / mine for theirs, mine in zip(times[name], times["packed"], strict=True))
        words.append(f"{quotient:.2f}x of {name}")
    return ", ".join(words)


if __name__ == "__main__":
    main()
