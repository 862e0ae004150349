"""`sparseforge bench`: speed and memory of a packed 2:4 model on this machine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.disk import atomic_file, finite, require_writable, write_json
from sparseforge_ds.cli.export import DTYPES
from sparseforge_ds.cli.given_model import require_model
from sparseforge_ds.cli.imports import large_imports

_EPILOG = """\
All models are loaded into this process and measured in turns, on the GPU where there is one. Run nothing else
meanwhile: other work makes the quartiles wide. --rivals adds quantized forms of the dense model, which torchao makes,
--values those of the packed one, rounded to nearest; int4:64 has a scale for 64 kept values.

--engine eager: prefill reads a prompt of --prompt tokens; decode writes --generated tokens one after the other. On a
GPU a small batch waits for the host then. --engine graph: a prompt is read and new tokens are written at every
--workload, with a static cache and compiled decoding, in CUDA graphs. Each batch and workload is compiled for both
models, in a minute or two for a model of 32 layers; --layers takes less.

OUT gets bench.json with everything measured, and bench.png where matplotlib is installed.

examples:
  sparseforge bench models/qwen3_14b_packed24
  sparseforge bench models/qwen3_14b_packed24 --against Qwen/Qwen3-14B --batches 1 8 32 --out bench
  sparseforge bench models/qwen3_14b_packed24 --rivals int8 fp8 --values int8 int4:64
  sparseforge bench --shapes llama-2-7b --workload 128x128 128x1024 --batches 1 8   # random weights
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure speed and memory of a packed 2:4 model and the dense one on this machine",
        description="Measure memory, and prefill and decode in tokens per second, of a packed24 model and a dense one.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a packed24 folder, as `sparseforge export --format packed24` writes it",
    )
    add("--against", metavar="DENSE", help="the dense model: a folder or hub id (default: MODEL, unpacked)")
    add("--shapes", choices=_SHAPES, help="instead of MODEL: both models of these shapes, with random weights")
    add("--layers", type=int, metavar="N", help="with --shapes: layers of both models (default: all)")
    add(
        "--rivals",
        nargs="+",
        choices=("int8", "fp8", "int4"),
        default=[],
        help="also measure the dense model quantized by torchao, weights only (default: none)",
    )
    add(
        "--values",
        nargs="+",
        default=[],
        metavar="NAME[:GROUP]",
        help="also measure the packed model with rounded values: int8, fp8_e4m3, int4, int4:64 (default: none)",
    )
    add("--engine", choices=("graph", "eager"), help="way of decoding (default: graph, on CUDA alone; eager elsewhere)")
    add("--batches", type=int, nargs="+", default=[1, 4], metavar="N", help="batch sizes (default: 1 4)")
    add(
        "--workload",
        type=_length,
        nargs="+",
        metavar="PxN",
        help="graph: tokens of a prompt and new tokens (default: 128x128)",
    )
    add("--prompt", type=int, metavar="N", help="eager: tokens of a prompt (default: 512)")
    add("--generated", type=int, metavar="N", help="eager: tokens that decode writes (default: 16)")
    add("--repeats", type=int, default=5, metavar="N", help="turns of each (default: 5)")
    add("--threads", type=int, metavar="N", help="threads on the CPU (default: torch's)")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of the models (default: as stored; --shapes: bfloat16)")
    add("--out", metavar="OUT", help="folder for bench.json and bench.png")
    parser.set_defaults(run=run)


_SHAPES = ("llama-2-7b", "qwen3-14b")


def _length(text: str) -> tuple[int, int]:
    """Read `128x1024`: tokens of a prompt, and new ones."""
    prompt, _, new = text.partition("x")
    if not (prompt.isdecimal() and new.isdecimal() and int(prompt) >= 1 and int(new) >= 2):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no workload; give tokens of a prompt and 2 new ones or more: 128x128"
        )
    return int(prompt), int(new)


def run(args: argparse.Namespace) -> int:
    """Measure both models, print a table, and write the files."""
    # Check the flags.
    flags = {"--prompt": args.prompt, "--generated": args.generated, "--threads": args.threads, "--layers": args.layers}
    numbers = {flag: number for flag, number in flags.items() if number is not None}
    numbers |= {"--repeats": args.repeats, "--batches": min(args.batches)}
    if wrong := next((flag for flag, number in numbers.items() if number < 1), None):
        raise ValueError(f"{wrong} {numbers[wrong]}: give 1 or more")
    if (args.model is None) == (args.shapes is None):
        raise ValueError("bench: give MODEL, or --shapes for random weights, and not both")
    if args.shapes is not None and args.against is not None:
        raise ValueError(f"--against {args.against}: --shapes makes both models; leave one out")
    if args.shapes is None and args.layers is not None:
        raise ValueError(f"--layers {args.layers}: MODEL has its layers; leave it out, or give --shapes")
    out = None if args.out is None else Path(args.out).absolute()
    if out is not None:
        require_writable(out, f"--out {args.out}")

    # Check the rest before both models are loaded or made, which takes minutes.
    for name in (args.model, args.against):
        if name is not None:
            require_model(name)
    with large_imports():
        import torch

        from sparseforge_ds.evaluate.perplexity import max_positions
        from sparseforge_ds.extras.packed24.compared_models import load_pair, not_packed, quantized, rounded
        from sparseforge_ds.extras.packed24.graph_speed import (
            SHAPES,
            Length,
            Lengths,
            measure_graphs,
            random_pair,
            require_compilable,
            require_groups,
            table_of_generations,
        )
        from sparseforge_ds.extras.packed24.speed import Workload, draw, measure, report, table
        from sparseforge_ds.model.registration import load_config
        from sparseforge_ds.model.stored_config import is_packed_config
        from sparseforge_ds.packed_format.packed_values import parse_grid

    if args.model is not None and not is_packed_config(vars(load_config(args.model, args.model))):
        raise not_packed(args.model)
    try:
        grids = {text: parse_grid(text) for text in args.values}
    except ValueError as error:
        raise ValueError(f"--values: {error}") from None
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    engine = args.engine or ("graph" if torch.cuda.is_available() else "eager")
    _require_flags_of(engine, args)
    if engine == "graph" and not torch.cuda.is_available():
        raise ValueError("--engine graph: needs a GPU with CUDA, and torch has none here; use --engine eager")
    workload: Any
    if engine == "eager":
        workload = Workload(tuple(args.batches), args.prompt or 512, args.generated or 16, args.repeats)
    else:
        lengths = tuple(Length(*pair) for pair in args.workload or [(128, 128)])
        workload = Lengths(tuple(args.batches), lengths, args.repeats)
    for name in (args.model, args.against) if args.shapes is None else (str(SHAPES[args.shapes]),):
        if name is not None:
            workload.require_positions(max_positions(load_config(name, name)))
            if engine == "graph" and args.shapes is None:
                require_compilable(name)
    if args.rivals and find_spec("torchao") is None:
        raise ValueError(f"--rivals {args.rivals[0]}: torchao is not installed; pip install torchao")
    if args.model is not None:
        _require_grids_of(args.model, grids)
    else:
        require_groups(args.shapes, args.layers, grids)

    # Load or make both models.
    if args.shapes is None:
        packed, dense = load_pair(args.model, args.against, args.dtype)
        other = args.against or args.model
        is_unpacked = is_packed_config(vars(load_config(other, other)))
        folders = {"dense": f"{other}, unpacked" if is_unpacked else other, "packed": args.model}
    else:
        dtype = torch.bfloat16 if args.dtype == "auto" else getattr(torch, args.dtype)
        packed, dense = random_pair(args.shapes, args.layers, dtype)
        folders = {"dense": f"{args.shapes}, random", "packed": f"{args.shapes}, random, packed"}
    models = {"dense": dense, "packed": packed}
    for text, grid in grids.items():
        models[f"packed {text}"] = rounded(packed, grid)
        folders[f"packed {text}"] = f"{folders['packed']}, {grid}"
    for kind in dict.fromkeys(args.rivals):
        models[f"dense {kind}"] = quantized(dense, packed, kind)
        folders[f"dense {kind}"] = f"{folders['dense']}, {kind} by torchao"

    # Measure.
    generations: list[Any] = []
    if engine == "eager":
        speeds = measure(models, workload)
    else:
        speeds, generations = measure_graphs(models, workload)

    # Print and write the report.
    measured = report(models, folders, workload, speeds, engine)
    print(table(measured))
    if generations:
        measured["generations"] = [asdict(generation) for generation in generations]
        print("\n" + table_of_generations(generations))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "bench.json", finite(measured))
        if find_spec("matplotlib") is None:
            print("no bench.png: it needs matplotlib; pip install matplotlib", file=sys.stderr)
        else:
            with atomic_file(out / "bench.png") as file:
                draw(measured, file)
    return 0


def _require_flags_of(engine: str, args: argparse.Namespace) -> None:
    """Reject flags that the engine does not read."""
    unread = {"graph": {"--prompt": args.prompt, "--generated": args.generated}, "eager": {"--workload": args.workload}}
    if flag := next((flag for flag, value in unread[engine].items() if value is not None), None):
        cure = "--workload PxN" if engine == "graph" else "--prompt and --generated"
        raise ValueError(f"{flag}: --engine {engine} does not read it; give {cure}, or the other --engine")


def _require_grids_of(model: str, grids: dict[str, Any]) -> None:
    """Reject `--values` that the config.json or the headers of a packed folder do not allow."""
    from safetensors import SafetensorError

    from sparseforge_ds.extras.packed24.file_headers import read_headers
    from sparseforge_ds.model.registration import load_config
    from sparseforge_ds.model.stored_config import is_packed_config
    from sparseforge_ds.packed_format.packed_values import require_group_size
    from sparseforge_ds.packed_format.packing import POSITIONS, packed24_axis

    config = vars(load_config(model, model))
    if grids and is_packed_config(config) and config["quantization_config"].get("values") is not None:
        raise ValueError(f"--values: the values of {model} are rounded already; leave it out, or give a folder in bf16")
    # Groups divide the kept inputs of every packed weight. A model of the hub is checked when it is loaded.
    groups = {text: grid.group_size for text, grid in grids.items() if grid.group_size is not None}
    try:
        headers = read_headers(map(str, Path(model).glob("*.safetensors"))) if groups else {}
    except SafetensorError as error:
        raise ValueError(f"{model}: its weights cannot be read ({error})") from None
    for weight in sorted({key.removesuffix(POSITIONS) for key in headers if key.endswith(POSITIONS)} & headers.keys()):
        shape = headers[weight].shape
        for text, group_size in groups.items():
            try:
                require_group_size(shape[packed24_axis(shape, headers[weight + POSITIONS].shape)], group_size)
            except ValueError as error:
                raise ValueError(f"--values {text}: {weight}: {error}") from None
