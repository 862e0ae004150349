"""`sparseforge export`: a run, or an exported folder, in one of the formats."""

from __future__ import annotations

import argparse
from typing import Any

from sparseforge_ds.cli.imports import large_imports

FORMATS = ("hf", "packed24")
DTYPES = ("auto", "bfloat16", "float16", "float32")

_EPILOG = """\
formats:
  hf        an ordinary Hugging Face folder with exact zeros; what `sparseforge consolidate` writes
  packed24  2:4 weights in 0.5625 of their bf16 bytes, 0.8125 with a low-rank branch of k = 4; transformers loads it
            after `import sparseforge_ds.extras.packed24`

Each is proved before it reports success: it is loaded in a fresh process and gives the source's logits bit by bit.
--skip_proof is for a machine that cannot hold the model.

examples:
  sparseforge export runs/qwen3_14b models/qwen3_14b_packed24 --format packed24
  sparseforge export models/llama_wanda_2to4 models/llama_packed24 --format packed24   # pruned by another tool
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge export`."""
    parser = commands.add_parser(
        "export",
        help="write a run or an exported folder as hf or packed24, proved",
        description="Write a model in one of two formats, offline, one weight at a time. OUT appears only when it is "
        "complete and proved.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run folder (its newest checkpoint), one checkpoint, an exported folder, or any other 2:4 model folder",
    )
    add_options(parser)
    parser.add_argument("--format", default="hf", choices=FORMATS, help="see below (default: hf)")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `export` and `consolidate` share."""
    parser.add_argument("out", metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--max_shard_size", default="5GB", help="largest safetensors file (default: 5GB)")
    parser.add_argument("--workers", type=int, help="threads (default: one per processor, at most 8)")
    parser.add_argument("--skip_proof", action="store_true", help="do not load the model that was written")

    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="dtype of the weights (default: config.json's)")
    parser.add_argument("--model", metavar="DIR", help="folder with config.json and tokenizer (default: the source's)")


def run(args: argparse.Namespace) -> int:
    """Export a model, and print what was made and how it was proved."""
    with large_imports():
        from sparseforge_ds.export.formats import export
        from sparseforge_ds.export.open import open_source
        from sparseforge_ds.export.stored import Size
        from sparseforge_ds.export.unused import describe_unused
        from sparseforge_ds.export.writer import require_free

    require_free(args.out)
    source = open_source(args.source, args.model, args.dtype)
    if source.unused:
        print(describe_unused(source.model_folder, source.unused))
    record = export(source, args.out, args.format, args.max_shard_size, args.workers, args.skip_proof)
    if not record["finished"]:
        print(f"note: the run was not finished at step {record['step']}: its mask is soft and was projected here")
    print(f"{args.out}: {_what(args.format, record)}")
    if "bytes" in record:
        print(f"{args.out}: {Size(**record['bytes'])}")
    if record.get("adapter"):
        fixed = "" if source.low_rank.learned else ". It stores the fixed matrix P too: --format packed24 does not"
        print(
            f"{args.out}: its low-rank branch is a PEFT adapter beside the weights; from_pretrained loads it where "
            f"peft is installed, and without it the weights compute nonsense{fixed}"
        )
    print(_proof_line(record["proof"]))
    return 0


def _what(format: str, record: dict[str, Any]) -> str:
    weights = len(record["weights"])
    groups = sum(entry["groups"] for entry in record["weights"].values())
    packed = ", packed into values and positions" if format == "packed24" else ""
    return f"{weights} weights in {record['pattern']}, {groups:,} groups, verified{packed}"


def _proof_line(proof: dict[str, Any] | None) -> str:
    """Return a line that tells how an export was proved."""
    if proof is None:
        return "not proved: --skip_proof"
    text = f"proved: loaded by {proof['loaded_by']}, logits {proof['logits']}"
    return f"{text}; adapter: logits {proof['adapter']['logits']}" if "adapter" in proof else text
