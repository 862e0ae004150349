"""`sparseforge advise`: what 2:4 would gain in memory and decode speed on a GPU, before anybody trains."""

from __future__ import annotations

import argparse
from typing import Any

from sparseforge_ds.checkpoint.disk import measurements_text
from sparseforge_ds.cli.imports import large_imports

_EPILOG = """\
Speed is the least time of a decode step: its bytes over the bytes a second that matrix products reached on an H200
(docs/hardware.md has them, and what whole models did). Rows marked "assumed" take the same share of the bandwidth
for 8 and 4 bits, which no GPU has measured here: our kernels for such values have not run on one. Prompts are not in
it: a short one is read slower from packed weights.

example:
  sparseforge advise Qwen/Qwen3-14B --gpu h100 --batch 8
"""
_NO_SPARSE_CORES = ("v100",)


def register(commands: Any) -> None:
    """Add the parser of `sparseforge advise`."""
    parser = commands.add_parser(
        "advise",
        help="predict what 2:4 gains in memory and decode speed in 16, 8 and 4 bits on a GPU, without weights",
        description="Predict memory and decode speed of a model, dense and 2:4, in 16, 8 and 4 bits.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model folder, a config.json, or a hub id")
    add("--gpu", metavar="NAME", default="h100", help="a100, b200, h100, h200 or l40s (default: h100)")
    add("--batch", type=int, default=1, metavar="N", help="sequences that are decoded together, 1 to 256 (default: 1)")
    context = "tokens of each sequence, whose keys and values are read (default: 4096, or the model's positions)"
    add("--context", type=int, metavar="N", help=context)
    add("--layers", type=int, metavar="N", help="decoder layers, instead of all, as in bench --layers")
    add("--any_family", action="store_true", help="as in plan: prune a family that the table does not know")
    add("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the formats of the model, their memory and speed."""
    import contextlib
    import dataclasses
    import sys

    # DeepSpeed prints to stdout, while it is imported, that there is no GPU.
    with contextlib.redirect_stdout(sys.stderr), large_imports():
        from sparseforge_ds.config.strict import nearest
        from sparseforge_ds.extras.planner.advice import advise, basis, check_batch, lines, model_bytes
        from sparseforge_ds.extras.planner.machine import GPUS
        from sparseforge_ds.model.architecture import with_layers
        from sparseforge_ds.model.model_config import read_model_config
        from sparseforge_ds.model.registration import positions_of

    # Check the flags.
    known = [name for name in GPUS if name not in _NO_SPARSE_CORES]
    gpu = GPUS.get(args.gpu.lower())
    if gpu is None:
        guess = nearest(args.gpu, known)
        suggestion = f"did you mean {guess}? " if guess else ""
        raise ValueError(f"--gpu {args.gpu}: {suggestion}known are {', '.join(known)}")
    if args.gpu.lower() in _NO_SPARSE_CORES:
        raise ValueError(f"--gpu {args.gpu}: it has no sparse tensor cores; use one of {', '.join(known)}")
    check_batch(args.batch)
    if args.context is not None and args.context < 1:
        raise ValueError(f"--context {args.context} is not valid: use an integer >= 1")

    # Count and print.
    config = read_model_config(args.model, "MODEL")
    if args.layers is not None:
        config = with_layers(config, args.layers)
    positions = positions_of(config)
    if positions is not None and args.context is not None and args.context > positions:
        raise ValueError(f"--context {args.context}: the model has {positions} positions; use at most {positions}")
    context = args.context or min(4096, positions or 4096)
    model = model_bytes(config, args.batch, context, args.any_family)
    rows = advise(model, gpu, args.batch)
    if args.json:
        formats = [{**dataclasses.asdict(row), "tokens_per_second": args.batch / row.seconds} for row in rows]
        content = {"model": dataclasses.asdict(model), "context": context, "formats": formats}
        print(measurements_text({**content, "basis": basis(args.batch, gpu)}, indent=2))
        return 0
    print(f"{args.model} on {args.gpu.lower()}, batch {args.batch}, {context:,} tokens of context each\n")
    for line in lines(rows, args.batch, gpu):
        print(line)
    return 0
