"""The packed product against torch's dense one, on a CPU also against a dense kernel written as carefully.

python -m benchmarks.linear24 [--threads 1] [--rows 1 2 4 8 16 17 32] [--repeats 9]
    [--values int8 int4:64] [--round_inputs]
python -m benchmarks.linear24 --device cuda [--shapes 14336x4096 4096x14336 ...] [--staged]

On the CPU in turns; each line has medians in milliseconds, and medians of the quotients of neighbours. Weights are
larger than the last cache. The careful dense kernel (dense_matvec.cpp) is beside one row of x where it knows the shape
(outputs a multiple of 8, inputs of 64) and the processor has AVX-512, with bf16 for that dtype.

On a GPU each line has microseconds of CUDA graphs that go through six weights or more in turn, twice the L2 cache at
least, so that none is found there, and behind them what a call without a graph costs the host.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import load

from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.extras.packed24.mma_kernel import MOST_ROWS, mma24
from sparseforge_ds.packed_format.packed_values import Grid, parse_grid, round_values
from sparseforge_ds.packed_format.packing import pack24


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="on the CPU (default: 1)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 17, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", help="bfloat16, and on the CPU float32, too")
    parser.add_argument("--values", nargs="+", type=parse_grid, default=[], metavar="NAME[:GROUP]", help="rounded, too")
    parser.add_argument("--round_inputs", action="store_true", help="int8 also with inputs in 8 bits")
    parser.add_argument("--staged", action="store_true", help="on a GPU: SPARSEFORGE_STAGED=1, too, if it is right")
    parser.add_argument("--shapes", type=_shape, nargs="+", default=[(14336, 4096), (4096, 14336)], metavar="OUTxIN")
    args = parser.parse_args(argv)

    # A flag that the device does not read is refused: its line would be taken for an answer.
    unread = {"cpu": {"--staged": args.staged}}
    unread["cuda"] = {"--values": args.values, "--round_inputs": args.round_inputs, "--threads": args.threads}
    if flag := next((flag for flag, value in unread[args.device].items() if value), None):
        parser.error(f"{flag}: --device {args.device} does not read it; leave it out")
    if args.round_inputs and Grid("int8") not in args.values:
        parser.error("--round_inputs: rounds the inputs of int8 values; give --values int8 too")
    args.threads = args.threads or 1
    args.dtypes = args.dtypes or (["bfloat16", "float32"] if args.device == "cpu" else ["bfloat16"])
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_arguments(argv)
    if args.device == "cuda":
        on_cuda(args)
        return
    torch.set_num_threads(args.threads)
    for name in args.dtypes:
        for shape in args.shapes:
            weight = torch.randn(shape, dtype=getattr(torch, name))
            weight.view(shape[0], -1, 4)[..., 1:3] = 0
            packed = packed_forms(weight, args.values)
            if args.round_inputs:
                packed["int8, inputs too"] = partial(_set, "SPARSEFORGE_CPU_ACTIVATIONS", "int8", packed["int8"])
            for rows in args.rows:
                print(
                    f"{name} {shape[0]} x {shape[1]}, {rows} rows: {_line(weight, packed, rows, args.repeats)}",
                    flush=True,
                )


def has_careful_dense(dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Return True if dense_matvec.cpp can multiply a weight on this processor."""
    needed = {
        torch.bfloat16: {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"},
        torch.float32: {"avx512f"},
    }
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().split()) if cpu.exists() else set()
    return outputs % 8 == 0 and inputs % 64 == 0 and dtype in needed and needed[dtype] <= flags


@cache
def load_careful_dense() -> Callable[[Tensor, Tensor], Tensor]:
    """Compile dense_matvec.cpp, and return its product."""
    load(
        name="sparseforge_bench_dense",
        sources=[str(Path(__file__).with_name("dense_matvec.cpp"))],
        extra_cflags=["-O3", "-fopenmp"],
        extra_ldflags=["-fopenmp"],
        is_python_module=False,
    )
    product: Callable[[Tensor, Tensor], Tensor] = torch.ops.sparseforge_bench.dense_matvec
    return product


def packed_forms(weight: Tensor, grids: Sequence[Grid]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return products with a 2:4 weight: with values in its dtype, `packed`, and with rounded ones, by name."""
    values, positions = pack24(weight, -1)
    forms: dict[str, Callable[[Tensor], Tensor]] = {"packed": partial(linear24, values=values, positions=positions)}
    for grid in grids:
        codes, scale = round_values(values, -1, grid)
        forms[grid.name if grid.group_size is None else f"{grid.name}:{grid.group_size}"] = partial(
            linear24, values=codes, positions=positions, scale=scale
        )
    return forms


def _set(name: str, value: str, product: Callable[..., Any], *operands: Tensor | None) -> Any:
    """Compute a product while the environment has a variable."""
    os.environ[name] = value
    try:
        return product(*operands)
    finally:
        del os.environ[name]


@torch.no_grad()
def on_cuda(args: argparse.Namespace) -> None:
    """Measure and print."""
    from benchmarks.tiles import (
        error_of,
        graph_us,
        host_us,
        weights,
        weights_in_turn,
    )  # Triton, which is where torch has CUDA

    wrong = 0
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name in args.dtypes:
        for outputs, inputs in args.shapes:
            dtype = getattr(torch, name)
            dense, packed = weights(outputs, inputs, dtype, weights_in_turn(outputs, inputs, dtype))
            for rows in args.rows:
                x = torch.randn(rows, inputs, dtype=dtype, device="cuda")
                runs = {
                    "torch": [partial(torch.nn.functional.linear, x, weight) for weight in dense],
                    "packed": [partial(linear24, x, *weight) for weight in packed],
                }
                if args.staged:
                    runs["staged"] = [
                        partial(_set, "SPARSEFORGE_STAGED", "1", linear24, x, *weight) for weight in packed
                    ]
                    exact = x.double() @ dense[0].double().T
                    size = x.double().abs() @ dense[0].double().abs().T
                    # Where the kernel takes no such product, the call would be Triton's.
                    product = _set("SPARSEFORGE_STAGED", "1", mma24, x, *packed[0], None)
                    is_staged = product is not None and rows > MOST_ROWS
                    for of in ("packed", "staged"):
                        error = error_of(runs[of][0](), exact, size, inputs)
                        fault = "" if error <= 1 else f"{error:.3g} of the bound"
                        if of == "staged" and not is_staged:
                            fault = "another kernel answers"
                        if fault:
                            wrong += 1
                            print(f"WRONG: {of}, {outputs} x {inputs}, {rows} rows: {fault}", flush=True)
                            del runs[of]
                us = {of: graph_us(calls, args.repeats) for of, calls in runs.items()}
                host = {of: host_us(calls[0]) for of, calls in runs.items()}
                words = [", ".join(f"{of} {taken:.1f} us" for of, taken in times.items()) for times in (us, host)]
                quotients = ", ".join(f"{of} {us['torch'] / taken:.2f}x" for of, taken in us.items() if of != "torch")
                fastest = f"; fastest: {min(us, key=lambda of: us[of])}" if args.staged else ""
                print(
                    f"{name} {outputs} x {inputs}, {rows} rows: {words[0]}; {quotients}{fastest}; host: {words[1]}",
                    flush=True,
                )
    if wrong:
        raise SystemExit(1)


def _shape(text: str) -> tuple[int, int]:
    outputs, inputs = map(int, text.split("x"))
    return outputs, inputs


@torch.no_grad()
def _line(weight: Tensor, packed: dict[str, Callable[[Tensor], Tensor]], rows: int, repeats: int) -> str:
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype)
    runs: dict[str, Callable[[], Tensor]] = {"torch": lambda: torch.nn.functional.linear(x, weight)}
    runs |= {name: partial(form, x) for name, form in packed.items()}
    if rows == 1 and has_careful_dense(weight.dtype, *weight.shape):
        runs["careful dense"] = partial(load_careful_dense(), x[0], weight)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - began)
    words = [f"{name} {median(taken) * 1e3:.2f} ms" for name, taken in times.items()]
    for form in packed:
        quotients = {
            name: median(reference / actual for reference, actual in zip(times[name], times[form], strict=True))
            for name in runs
            if name not in packed or (name == "packed" != form)
        }
        words.append(f"{form} " + ", ".join(f"{quotient:.2f}x of {name}" for name, quotient in quotients.items()))
    return "; ".join(words)


if __name__ == "__main__":
    main()
