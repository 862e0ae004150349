"""`sparseforge train`: the trainer as one process. Its flags are its own (config/arguments.py)."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparseforge_ds.cli.imports import large_imports

if TYPE_CHECKING:
    from sparseforge_ds.config.arguments import RunArguments


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a dense model into a sparse one in this process; deepspeed and torchrun start more",
        add_help=False,  # the trainer has its own
        prefix_chars="\0",  # whatever follows, flags too, is for the trainer
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train; the exit code is the trainer's."""
    with large_imports():
        from sparseforge_ds.config.command_line import argument_parser

    if {"-h", "--help"} & set(args.flags):  # without waiting for DeepSpeed to be imported
        argument_parser().print_help()
        raise SystemExit(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # while that is imported, both end us without a traceback
    with large_imports():
        from sparseforge_ds.train.trainer import main

    return main(args.flags, _dry_run)


def _dry_run(arguments: RunArguments) -> Iterator[str]:
    from sparseforge_ds.extras.planner.dry_run import dry_run

    return dry_run(arguments)
