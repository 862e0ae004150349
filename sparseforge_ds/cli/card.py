"""`sparseforge card`: a model card for an exported folder, and an upload of both to the hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_EPILOG = """\
Every export has a card already. This command writes it again, with newer results of the model; without --results it
keeps those that it has. It leaves a README.md alone that somebody else wrote or changed. A card names only the last
part of a path on this machine.

examples:
  sparseforge card models/qwen3_14b_2to4 --results evaluation.json --license apache-2.0
  sparseforge card models/qwen3_14b_2to4 --push owner/qwen3-14b-2to4 --private
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge card`."""
    parser = commands.add_parser(
        "card",
        help="write the model card of an exported folder, with its scores; --push uploads both",
        description="Write README.md for a folder of consolidate or export: the facts of sparsity.json, the settings "
        "of the run, and results of evaluations, in the format of the hub.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder with sparsity.json")
    parser.add_argument(
        "--results",
        nargs="+",
        default=[],
        metavar="FILE",
        help="results of this model, as `sparseforge evaluate --json` writes them",
    )
    parser.add_argument("--license", metavar="NAME", help="licence of the model, as the hub names it, like apache-2.0")
    base = "dense model on the hub, where the command that made the folder was given a folder of its own"
    parser.add_argument("--base_model", metavar="OWNER/NAME", help=base)
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to the hub, as this model")
    parser.add_argument("--private", action="store_true", help="with --push: make a new model private")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the card, upload the folder with --push, and print what was done."""
    from sparseforge_ds.export.card_scores import read_results
    from sparseforge_ds.export.model_card import NAME, write_card
    from sparseforge_ds.export.upload import push, require_hub_name

    folder = Path(args.model)
    if args.private and args.push is None:
        raise ValueError("--private: it belongs to --push")
    if args.push is not None:
        require_hub_name(args.push)
    results = read_results(args.results, folder, args.push)
    if write_card(folder, results, args.license, args.push, args.base_model):
        print(f"{folder / NAME}: written")
    else:
        print(f"{folder / NAME}: was written or changed by somebody else, and stays as it is")
    if args.push is not None:
        print(f"uploaded: {push(folder, args.push, args.private)}")
    return 0
