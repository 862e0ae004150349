"""`sparseforge apply`: a mask on the dense model that it was learned for."""

from __future__ import annotations

import argparse
from typing import Any

from sparseforge_ds.cli.export import add_out, write

_EPILOG = """\
example:
  sparseforge apply models/qwen3_14b_mask models/Qwen3-14B models/qwen3_14b_2to4
"""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "apply",
        help="put a mask (export --format mask) on its dense model: a sparse Hugging Face folder",
        description="Write mask * dense as a Hugging Face folder, verified and proved. Where a run only learned its "
        "mask, this is its model; where it trained weights as well, it is not.",
        epilog=_EPILOG,
    )
    parser.add_argument("mask", metavar="MASK", help="a folder that `sparseforge export --format mask` wrote")
    parser.add_argument("dense", metavar="DENSE", help="the dense model: a folder of safetensors, of any float type")
    add_out(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Apply, and say what was made."""
    from sparseforge_ds.export.mask_only import MaskedSource

    return write(MaskedSource(args.mask, args.dense), args)
