"""`sparseforge reshard`: a copy of a run that any number of ranks, ZeRO stage and offload continues from."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_EPILOG = """\
A run continues in another layout without this: start it with --resume on other ranks or at another stage. The copy is
for moving a run elsewhere: it holds no pickle, and one file per state instead of several per rank.

example:
  sparseforge reshard runs/qwen3_14b portable/qwen3_14b
  deepspeed --num_gpus 4 launch/train.py --output_dir portable/qwen3_14b --resume ...
"""


def register(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "reshard",
        help="copy a run so that any number of ranks, ZeRO stage and offload continues from it",
        description="Read the newest checkpoint of a run, offline and one weight at a time, and write a run folder "
        "with the same weights, masks and optimizer states whole, in safetensors and JSON. OUT is there whole or not "
        "at all; training continues in it with --resume, and export and inspect read it like any run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="RUN", help="a run folder (its newest checkpoint), or one checkpoint folder")
    parser.add_argument("out", metavar="OUT", help="run folder to write; must not exist or be empty")
    parser.add_argument("--max_shard_size", default="5GB", help="largest safetensors file (default: 5GB)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Copy, and say what was made."""
    from sparseforge_ds.checkpoint.reader import Checkpoint
    from sparseforge_ds.checkpoint.reshard import reshard

    folder = reshard(args.source, args.out, args.max_shard_size, _show if sys.stderr.isatty() else None)
    contents = Checkpoint(folder).contents
    states = sorted({key for entry in contents.entries.values() for key in entry.states})
    print(
        f"{folder}: {len(contents.entries)} tensors with {', '.join(states) or 'no state'}, saved at ZeRO stage "
        f"{contents.stage} by {contents.world_size} ranks; fits any"
    )
    return 0


def _show(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{done / 1e9:.1f} of {total / 1e9:.1f} GB", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit("error: this module is run as `sparseforge reshard`")
