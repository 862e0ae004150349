"""`sparseforge teach`: a teacher's largest logits of a text, written once for runs without the teacher."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from sparseforge_ds.cli.export import DTYPES
from sparseforge_ds.cli.given_model import register_packed24, require_model
from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.config.arguments import DocumentFrame, LossOn, SampleBy
from sparseforge_ds.config.strict import LARGEST

_EPILOG = """\
A run reads them by --teacher_logits DIR, with the same text, tokenizer, --seq_length and distillation.temperature, in
any order and on any number of GPUs. The KL divergence is then that of the K largest entries and of all others together
(equation 12c). After an interruption the same command goes on.

example:
  sparseforge teach Qwen/Qwen3-32B --text corpus --seq_length 4096 --top_k 64 --batch_size 1 --output logits/qwen3_32b
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge teach`."""
    parser = commands.add_parser(
        "teach",
        help="write a teacher's largest logits of a text, for runs that have no room for the teacher",
        usage="sparseforge teach MODEL --text TEXT --output DIR [flags]",
        description="Run a teacher over a text once, and write its K largest logits of every token.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub id of the teacher")
    add("--text", metavar="TEXT", nargs="+", action="extend", required=True, help="files or folders, as --dataset")
    add("--output", metavar="DIR", required=True, help="folder of the logits")
    add("--top_k", type=int, default=64, metavar="K", help="entries of the vocabulary that are kept (default: 64)")
    add("--temperature", type=float, default=2.0, metavar="T", help="distillation.temperature of the run (default: 2)")
    add("--seq_length", type=int, default=256, metavar="N", help="tokens of a sequence of the run (default: 256)")
    add("--batch_size", type=int, default=8, metavar="N", help="sequences of one forward (default: 8)")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of the weights (default: as saved)")
    # Flags that decide the tokens of a text are those of training.
    add("--text_field", default="text", metavar="NAME", help="as in training")
    add("--split", default="train", metavar="NAME", help="as in training")
    add("--sample_by", default="document", choices=get_args(SampleBy), help="as in training")
    add("--loss_on", default="all", choices=get_args(LossOn), help="as in training")
    add("--document_frame", default="auto", choices=get_args(DocumentFrame), help="as in training")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the logits of every text, and print their size."""
    if not 1 / LARGEST <= args.temperature <= LARGEST:
        raise ValueError(f"--temperature {args.temperature:g}: use a number from {1 / LARGEST:g} to {LARGEST:g}")
    if args.batch_size < 1:
        raise ValueError(f"--batch_size {args.batch_size}: use an integer >= 1")
    require_model(args.model)
    register_packed24(args.model)
    with large_imports():
        from sparseforge_ds.checkpoint.disk import require_writable
        from sparseforge_ds.evaluate.finished_model import find_adapter, load_model, load_tokenizer
        from sparseforge_ds.evaluate.teach import TeachSettings, check_settings, find_texts, teach, tokenize
        from sparseforge_ds.model.registration import load_config

    # Check the folder and the settings, and find and tokenize all texts, before the model is loaded.
    require_writable(Path(args.output), f"--output {args.output}")
    settings = TeachSettings(args.seq_length, args.top_k, args.temperature, args.document_frame, args.batch_size)
    check_settings(settings, load_config(args.model, args.model))
    sources = find_texts(args.text, args.text_field, args.split, args.sample_by, args.loss_on)
    tokenizer = load_tokenizer(args.model)
    for source in sources:
        tokenize(source, tokenizer, Path(args.output), settings)
    model = load_model(args.model, args.dtype, find_adapter(args.model, None))
    for source in sources:
        record = teach(model, tokenizer, source, Path(args.output), settings)
        tokens = record.windows * record.seq_length
        print(
            f"{source.name}: {record.windows:,} windows of {record.seq_length} tokens, the {record.top_k} largest of "
            f"{record.vocabulary:,} logits at temperature {record.temperature:g}: {record.bytes_per_token} bytes a "
            f"token, {tokens * record.bytes_per_token / 2**20:,.1f} MiB in {args.output}"
        )
    return 0
