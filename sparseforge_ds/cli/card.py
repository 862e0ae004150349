"""`sparseforge card`: a model card of an exported folder, and both on the hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_EPILOG = """\
Every export has a card already. This writes it anew, with results of this model that were measured since; where none
are given, with those that it has. It leaves a README.md alone that somebody else wrote or changed. Of paths on this
machine a card says the last part only.

examples:
  sparseforge card models/qwen3_14b_2to4 --results evaluation.json --license apache-2.0
  sparseforge card models/qwen3_14b_2to4 --push owner/qwen3-14b-2to4 --private
"""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "card",
        help="the model card of an exported folder, with its scores; --push uploads both",
        description="Write README.md of a folder that consolidate or export wrote: what sparsity.json says, the "
        "settings of its run, and results of evaluations, as the hub reads them.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder with sparsity.json")
    parser.add_argument(
        "--results",
        nargs="+",
        default=[],
        metavar="FILE",
        help="what `sparseforge evaluate` wrote of this model by --json",
    )
    parser.add_argument("--license", metavar="NAME", help="licence of the model, as the hub names it, like apache-2.0")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to the hub, as this model")
    parser.add_argument("--private", action="store_true", help="with --push: make a new model private")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the card, perhaps upload, and say what was done."""
    from sparseforge_ds.export.model_card import NAME, push, read_results, write_card

    folder = Path(args.model)
    if args.private and args.push is None:
        raise ValueError("--private: it belongs to --push")
    if write_card(folder, read_results(args.results, folder, args.push), args.license, args.push):
        print(f"{folder / NAME}: written")
    else:
        print(f"{folder / NAME}: was written or changed by somebody else, and stays as it is")
    if args.push is not None:
        print(f"uploaded: {push(folder, args.push, args.private)}")
    return 0
