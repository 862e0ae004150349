"""`sparseforge train`: a run in this process. Its flags stand in config/arguments.py."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.config.flag_names import name_of

if TYPE_CHECKING:
    from sparseforge_ds.config.arguments import RunArguments


def register(commands: Any) -> None:
    """Add the parser of `sparseforge train`."""
    parser = commands.add_parser(
        "train",
        help="train a dense model into a sparse one in this process; deepspeed and torchrun start more",
        add_help=False,  # the trainer has its own
        prefix_chars="\0",  # so that all flags are left to the trainer
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    smaller = "lower --micro_batch or --seq_length, give --activation_checkpointing, or raise the ZeRO stage"
    parser.set_defaults(run=run, cure_of_memory=f"{smaller}; sparseforge plan tells what fits")


def run(args: argparse.Namespace) -> int:
    """Train, and return the trainer's exit code."""
    with large_imports():
        from sparseforge_ds.config.command_line import argument_parser

    # Help needs no import of DeepSpeed.
    if {"-h", "--help"} & set(args.flags):
        argument_parser().print_help()
        raise SystemExit(0)
    # During the import of DeepSpeed both signals end the process without a traceback.
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # A printed configuration is YAML alone, and DeepSpeed prints to stdout, while it is imported, that there is no GPU.
    is_printed = any(name_of(word).startswith("print_config") for word in args.flags)
    with contextlib.redirect_stdout(sys.stderr) if is_printed else contextlib.nullcontext(), large_imports():
        from sparseforge_ds.train.trainer import main

    return main(args.flags, _dry_run)


def _dry_run(arguments: RunArguments) -> Iterator[str]:
    from sparseforge_ds.extras.planner.dry_run import dry_run

    return dry_run(arguments)
