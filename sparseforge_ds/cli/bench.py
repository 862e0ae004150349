"""`sparseforge bench`: what a packed 2:4 model gains on this machine."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparseforge_ds.cli.export import DTYPES
from sparseforge_ds.cli.given_model import require_model
from sparseforge_ds.cli.imports import large_imports

_EPILOG = """\
Both models are loaded into this process and measured in turns, on the GPU where there is one. Prefill reads a prompt;
decode writes tokens one after the other. Leave the machine to it: what else runs makes the quartiles wide.

OUT gets bench.json with everything measured, and bench.png.

examples:
  sparseforge bench models/qwen3_14b_packed24
  sparseforge bench models/qwen3_14b_packed24 --against Qwen/Qwen3-14B --batches 1 8 32 --out bench
"""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="speed and memory of a packed 2:4 model against the dense one, on this machine",
        description="Measure memory, and prefill and decode in tokens per second, of a packed24 model and a dense one.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a packed24 folder, as `sparseforge export --format packed24` writes it")
    add("--against", metavar="DENSE", help="the dense model: a folder or hub id (default: MODEL, unpacked)")
    add("--batches", type=int, nargs="+", default=[1, 4], metavar="N", help="sequences at once (default: 1 4)")
    add("--prompt", type=int, default=512, metavar="N", help="tokens of a prompt (default: 512)")
    add("--generated", type=int, default=16, metavar="N", help="tokens that decode writes (default: 16)")
    add("--repeats", type=int, default=5, metavar="N", help="turns of each (default: 5)")
    add("--threads", type=int, metavar="N", help="threads on the CPU (default: torch's)")
    add("--dtype", default="auto", choices=DTYPES, help="default: as stored")
    add("--out", metavar="OUT", help="folder for bench.json and bench.png")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files."""
    numbers = {"--prompt": args.prompt, "--generated": args.generated, "--repeats": args.repeats}
    numbers |= {"--batches": min(args.batches)} | ({} if args.threads is None else {"--threads": args.threads})
    if wrong := next((flag for flag, number in numbers.items() if number < 1), None):
        raise ValueError(f"{wrong} {numbers[wrong]}: give 1 or more")
    if args.out is not None and find_spec("matplotlib") is None:
        raise ValueError("--out: bench.png needs matplotlib; pip install matplotlib")
    out = None if args.out is None else Path(args.out).absolute()
    if out is not None and any(path.exists() and not path.is_dir() for path in (out, *out.parents)):
        raise ValueError(f"--out {args.out}: a file is there; give a folder")

    for name in filter(None, (args.model, args.against)):
        require_model(name)
    with large_imports():
        import torch

        from sparseforge_ds.evaluate.speed import Workload, draw, load_pair, measure, report, table

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    workload = Workload(tuple(args.batches), args.prompt, args.generated, args.repeats)
    packed, dense = load_pair(args.model, args.against, args.dtype)
    speeds = measure(packed, dense, workload)
    names = args.model, args.against or f"{args.model}, unpacked"
    measured = report(packed, dense, names, workload, speeds)
    print(table(measured))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(measured, indent=2) + "\n")
        draw(measured, out / "bench.png")
    return 0
