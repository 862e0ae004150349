"""`sparseforge consolidate`: a Hugging Face model from the shards of a run."""

from __future__ import annotations

from typing import Any

from sparseforge_ds.cli.export import add_options, run

_EPILOG = """\
examples:
  sparseforge consolidate runs/qwen3_14b models/qwen3_14b_2to4
  sparseforge consolidate runs/qwen3_14b/checkpoints/step_000400 models/early --dtype float32 --max_shard_size 2GB
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge consolidate`."""
    parser = commands.add_parser(
        "consolidate",
        help="write the newest checkpoint of a run, of any ranks and ZeRO stage, as a Hugging Face folder",
        description="Read the shards of a checkpoint, offline and one weight at a time, and write a Hugging Face "
        "folder that plain transformers loads. OUT appears only when it is complete and proved.",
        epilog=_EPILOG,
    )
    parser.add_argument("source", metavar="RUN", help="a run folder (its newest checkpoint), or one checkpoint folder")
    add_options(parser)
    parser.set_defaults(
        run=run, format="hf", values=None, group_size=None, text=None, text_field=None, exclude=[], pattern=None
    )
