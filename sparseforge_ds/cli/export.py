"""`sparseforge export`: a run, or an exported folder, in one of the formats."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.cli.printing import printable
from sparseforge_ds.cli.verify import EXCLUDE

if TYPE_CHECKING:
    from sparseforge_ds.export.source import Source

FORMATS = ("hf", "packed24", "compressed-tensors")
VALUES = ("int8", "fp8_e4m3", "int4")
TOKENS = 8192
"""Tokens of `--text` that are scored."""
DTYPES = ("auto", "bfloat16", "float16", "float32")

_EPILOG = """\
formats:
  hf        an ordinary Hugging Face folder with exact zeros; what `sparseforge consolidate` writes
  packed24  2:4 weights in 0.5625 of their bf16 bytes, 0.8125 with a low-rank branch of k = 4; transformers loads it
            after `import sparseforge_ds.extras.packed24`. With --values int8 or fp8_e4m3: one scale a row, 5 bits a
            weight, in 0.3125 of their bf16 bytes. With int4: one scale a row or --group_size, about 3 bits, in 0.195 of
            them with groups of 64; a run that was trained so ("quantize": bits 4) is stored bit by bit
  compressed-tensors
            weights that were trained quantized to 4 or 8 bits ("quantize" in the sparseforge block), as codes and
            scales in that library's pack-quantized format, zeros included: transformers and vLLM load it without us

Each is proved before it reports success: it is loaded in a fresh process and gives the source's logits bit by bit.
--skip_proof is for a machine that cannot hold the model. Rounded values are held against the source's own,
rounded alike; what rounding costs is measured on --text, with both models in memory.

examples:
  sparseforge export runs/qwen3_14b models/qwen3_14b_packed24 --format packed24
  sparseforge export runs/qwen3_14b models/qwen3_14b_int8 --format packed24 --values int8 --text c4.jsonl
  sparseforge export models/llama_wanda_2to4 models/llama_packed24 --format packed24   # pruned by another tool
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge export`."""
    parser = commands.add_parser(
        "export",
        help="write a run or an exported folder as hf, packed24 or compressed-tensors, proved",
        description="Write a model in one of three formats, offline, one weight at a time. OUT appears only when it is "
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
    parser.add_argument(
        "--values",
        choices=VALUES,
        help="with packed24: round the kept values to 8 or 4 bits, to nearest (default: they keep their dtype)",
    )
    parser.add_argument(
        "--group_size",
        type=int,
        metavar="N",
        help="with --values int4: kept values that share a scale, a multiple of 16 (default: the run's, or a row)",
    )
    parser.add_argument("--exclude", nargs="+", default=[], metavar="GLOB", help=EXCLUDE)
    parser.add_argument("--pattern", help="like 4:8, of a folder without sparsity.json (default: 2:4)")
    parser.add_argument(
        "--text",
        metavar="TEXT",
        help=f"with --values: text, as for `sparseforge evaluate`, on whose first {TOKENS} tokens the KL divergence to "
        "the model without rounding is measured",
    )
    parser.add_argument("--text_field", metavar="NAME", help="field of a record that holds the text (default: text)")
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
        from sparseforge_ds.export.formats import check_flags, choose_grid, export, without_codes
        from sparseforge_ds.export.model_folder import describe_values
        from sparseforge_ds.export.open import is_model_folder, open_source
        from sparseforge_ds.export.stored import Size
        from sparseforge_ds.export.unused import describe_unused
        from sparseforge_ds.export.writer import require_free
        from sparseforge_ds.packed_format.packed_values import Grid

    # Check what needs no weights: to open a folder without a sparsity.json, all of its weights are read.
    require_free(args.out)
    if args.text is not None and args.values is None:
        raise ValueError(f"--text {args.text}: it is what rounding is measured on; give --values too, or leave it out")
    if args.text_field is not None and args.text is None:
        raise ValueError(f"--text_field {args.text_field}: it belongs to --text; give it, or leave it out")
    if args.group_size is not None and args.values is None:
        raise ValueError(
            f"--group_size {args.group_size}: it is for rounded values; give --values int4, or leave it out"
        )
    grid = None if args.values is None else Grid(args.values, args.group_size)
    check_flags(args.format, grid, args.max_shard_size, args.workers, args.pattern)
    if args.format == "compressed-tensors" and is_model_folder(Path(args.source)):
        raise without_codes(args.source)
    documents = [] if args.text is None else _read_text(args.text, args.text_field)
    source = open_source(args.source, args.model, args.dtype, args.exclude, args.pattern, args.workers)
    grid = None if grid is None else choose_grid(source, args.format, grid)
    if args.format == "packed24" and source.grid is not None:
        print(
            f"note: the values of {args.source} are {source.grid.name}, and are stored unpacked, in "
            f"{str(source.dtype).removeprefix('torch.')}; copy the folder to keep them packed"
        )
    compare = None if args.text is None else _comparison(args.text, documents, source)
    if source.unused:
        print(printable(describe_unused(source.folder, source.unused)))
    # Write and prove the folder, then say what it is.
    limits = (args.max_shard_size, args.workers, args.skip_proof)
    record = export(source, args.out, args.format, *limits, grid, compare)
    if not record["finished"]:
        print(f"note: the run was not finished at step {record['step']}: its mask is soft and was projected here")
    print(f"{args.out}: {_what(args.format, record)}")
    if "bytes" in record:
        print(f"{args.out}: {Size(**record['bytes'])}")
    # Rounding changes what the model computes: print by how much.
    if grid is not None:
        errors = {name: row["error"] for name, row in record["weights"].items()}
        if source.quantize is not None:
            print(f"{args.out}: values: codes and scales of the run, unchanged")
        else:
            print(f"{args.out}: {printable(describe_values(grid, errors))}")
        if source.quantize is None or args.text is not None:
            print(f"{args.out}: {_describe_comparison(record.get('compared'))}")
    if record.get("adapter"):
        fixed = "" if source.low_rank.learned else ". It stores the fixed matrix P too: --format packed24 does not"
        print(
            f"{args.out}: its low-rank branch is a PEFT adapter beside the weights; from_pretrained loads it where "
            f"peft is installed, and without it the weights compute nonsense{fixed}"
        )
    print(_proof_line(record["proof"]))
    return 0


def _read_text(text: str, text_field: str | None) -> list[str]:
    """Return the documents of `--text`; ValueError if it cannot be read."""
    with large_imports():
        from sparseforge_ds.evaluate.scored_text import read_text, require_text_field

    require_text_field([text], text_field)
    return read_text(text, text_field or "text", None)


def _comparison(text: str, documents: list[str], source: Source) -> Callable[[Source, Path], dict[str, Any]]:
    """Return what measures a written folder on the documents of `--text` against its source.

    Raises:
        ValueError: the text has too few tokens to be scored, or the model is no causal language model.
    """
    with large_imports():
        from transformers import AutoModelForCausalLM

        from sparseforge_ds.evaluate.finished_model import load_model, load_tokenizer
        from sparseforge_ds.evaluate.perplexity import Scoring, cut_text, measure
        from sparseforge_ds.evaluate.scored_text import documents_belong_together
        from sparseforge_ds.export.reference import add_branches, filled_model
        from sparseforge_ds.extras.packed24 import register_format
        from sparseforge_ds.model.hub_access import public_name
        from sparseforge_ds.model.registration import load_config, model_class

    # Cut the text before the export starts: an error in it costs no written folder.
    register_format()
    config = load_config(source.model_folder, str(source.model_folder))
    if (kind := model_class(config)) is not AutoModelForCausalLM:
        raise ValueError(f"--text {text}: it is scored by causal language models, not by {kind.__name__}; leave it out")
    scoring = Scoring("windows" if documents_belong_together(text) else "documents", max_tokens=TOKENS)
    try:
        cut_text(load_tokenizer(str(source.model_folder)), documents, scoring, [config])
    except ValueError as error:
        raise ValueError(f"--text {text}: {error}") from None

    def compare(source: Source, folder: Path) -> dict[str, Any]:
        # Score the written model against the source with its weights as they were, branches included.
        rounded = load_model(str(folder))
        exact = filled_model(source).to(rounded.device)
        if source.branches:
            add_branches(exact, source)
        tokenizer = load_tokenizer(str(folder))
        score = measure(rounded, tokenizer, documents, scoring, dense=exact)
        perplexities = {"perplexity": score.perplexity, "perplexity_without_rounding": score.dense_perplexity}
        return {"text": public_name(text), "tokens": score.tokens, "kl": score.kl, **perplexities}

    return compare


def _describe_comparison(compared: dict[str, Any] | None) -> str:
    """Return a line on what rounding costs on a text."""
    if compared is None:
        return "what rounding costs was not measured; give --text TEXT to see it"
    return (
        f"KL to the model without rounding {compared['kl']:.5f} nats a token on {compared['tokens']} tokens of "
        f"{compared['text']}; perplexity {compared['perplexity']:.4f}, without rounding "
        f"{compared['perplexity_without_rounding']:.4f}"
    )


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
