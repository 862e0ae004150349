"""`sparseforge consolidate`: the shards of a run become a Hugging Face model."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from sparseforge_ds.cli.export import DTYPES, adapter_line, proof_line

_EPILOG = """\
examples:
  sparseforge consolidate runs/qwen3_14b models/qwen3_14b_2to4
  sparseforge consolidate runs/qwen3_14b/checkpoints/step_000400 models/early --dtype float32 --max_shard_size 2GB
"""


def register(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "consolidate",
        help="the newest checkpoint of a run, whatever its ranks and ZeRO stage, as a Hugging Face folder",
        description="Read the shards of a checkpoint, offline and one weight at a time, and write a Hugging Face "
        "folder that plain transformers loads. OUT is there whole or not at all; after a kill the same command goes on "
        "where it was.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="RUN", help="a run folder (its newest checkpoint), or one checkpoint folder")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="default: auto, what config.json says")
    parser.add_argument("--max_shard_size", default="5GB", help="largest safetensors file (default: 5GB)")
    parser.add_argument("--workers", type=int, help="threads (default: one per processor, at most 8)")
    parser.add_argument("--model", metavar="DIR", help="folder with config.json and tokenizer (default: the run's)")
    parser.add_argument("--skip_proof", action="store_true", help="do not load the model that was written")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Consolidate, and say what was made."""
    from sparseforge_ds.export.formats import export
    from sparseforge_ds.export.open import open_source
    from sparseforge_ds.export.workers import default_workers

    source = open_source(args.source, args.model, args.dtype)
    workers = default_workers() if args.workers is None else args.workers
    sparsity = export(
        source, args.out, "hf", args.max_shard_size, workers, sys.stderr.isatty(), say, skip_proof=args.skip_proof
    )
    if not sparsity["finished"]:
        print(f"note: the run was not finished at step {sparsity['step']}: its mask is soft and was projected here")
    groups = sum(entry["groups"] for entry in sparsity["weights"].values())
    weights = len(sparsity["weights"])
    print(f"{args.out}: {weights} weights in {sparsity['pattern']}, {groups:,} groups, verified")
    if sparsity["adapter"]:
        print(adapter_line(args.out))
    print(proof_line("hf", sparsity["proof"]))
    return 0


def say(text: str) -> None:
    """Print a note."""
    print(f"note: {text}")


if __name__ == "__main__":
    raise SystemExit("error: this module is run as `sparseforge consolidate`")
