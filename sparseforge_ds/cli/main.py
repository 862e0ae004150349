"""The parser of all subcommands, and what an error looks like: one line on stderr and exit code 2.

A subcommand is a module with `register`, which adds its parser and sets `run` to a function of the parsed arguments
that returns the exit code. What it does is imported when it runs, so that help is there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparseforge_ds.cli import consolidate, verify


def parser() -> argparse.ArgumentParser:
    """The parser of `sparseforge`."""
    top = argparse.ArgumentParser(
        prog="sparseforge",
        description="Turn checkpoints of a SparseForge run into 2:4 sparse models, and look into both.",
        epilog="`sparseforge COMMAND --help` shows an example of each. Training: deepspeed launch/train.py --help",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (consolidate, verify):
        command.register(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit code, or 2 after an error."""
    args = parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
