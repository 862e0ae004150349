"""The parser of all subcommands; an error becomes one line on stderr and exit code 2.

A subcommand is a module with `register`, which adds its parser (whose epilog is printed as it is) and sets `run` to a
function that takes the parsed arguments and returns the exit code. A subcommand imports its work when it runs, so that
help appears at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from typing_extensions import override

from sparseforge_ds import __version__
from sparseforge_ds.cli import (
    advise,
    bench,
    card,
    compare,
    consolidate,
    evaluate,
    export,
    generate,
    inspect,
    permute,
    plan,
    prune,
    rotate,
    teach,
    train,
    verify,
)
from sparseforge_ds.cli.printing import printable
from sparseforge_ds.config.flag_names import unknown_word, with_home_folders, with_our_names

COMMANDS = (
    train,
    teach,
    permute,
    rotate,
    prune,
    inspect,
    consolidate,
    export,
    verify,
    generate,
    evaluate,
    card,
    plan,
    advise,
    compare,
    bench,
)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
TERMINATED = 143
"""Exit code after SIGTERM."""
NOT_READ = 141
"""Exit code after the reader of our output, such as `head`, has closed the pipe; also as shells have it."""
_EXIT_CODES = "exit code: 0 done; 2 an error, printed as one line\n\n"
_KEY = re.compile(r"(?<![\w./-])sparseforge\.(?:start\.)?(\w+)(?: =)?")
"""Key of the `sparseforge` block in an error; a command without a JSON sets `keys_are_flags`."""
_SIZE = {"TQDM_NCOLS": 80, "TQDM_NROWS": 24}
"""Size for a terminal that does not tell its own, as in a container; tqdm would show no bar there."""


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line."""

    @override
    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        self.exit(_fail(f"{message}; {self.prog} --help shows all flags"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of `sparseforge`."""
    top = _Parser(
        prog="sparseforge",
        description="Train 2:4 sparse language models, turn checkpoints into them, and look into both.",
        epilog="`sparseforge COMMAND --help` shows an example of each.",
    )
    top.add_argument("--version", action="version", version=f"sparseforge {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(commands)
    for subcommand in commands.choices.values():
        subcommand.formatter_class = argparse.RawDescriptionHelpFormatter
        epilog = subcommand.epilog or ""
        if "exit code:" not in epilog:
            subcommand.epilog = _EXIT_CODES + epilog
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code, or 2 after an error."""
    # Read the command line; common names of other tools' flags mean ours.
    top = parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    flags = _flags_of(top, words)
    words = with_home_folders(with_our_names(words, flags))
    args, unknown = top.parse_known_args(words)
    if unknown:
        return _fail(unknown_word(unknown[0], flags))

    # SIGTERM must remove half-written files, and names in a file may hold characters that a terminal cannot show.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")

    # Run.
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except ValueError as error:
        return _fail(_with_flags(str(error), args) if getattr(args, "keys_are_flags", False) else str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush complains
        return NOT_READ
    except OSError as error:
        file = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{file}{error.strerror or error}")
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (RuntimeError, MemoryError) as error:
        # torch's own class is told by its name: importing torch here would slow down every command.
        is_on_host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if type(error).__name__ != "OutOfMemoryError" and not is_on_host:
            raise
        flags_of_size = ("batch_size", "batch", "batches", "prompt", "seq_length", "sequences")
        smaller = [f"--{flag}" for flag in flags_of_size if getattr(args, flag, None) is not None]
        larger = "take a machine with more memory" if is_on_host else "take a larger GPU"
        cure = f"lower {' or '.join(smaller)}" if smaller else getattr(args, "cure_of_memory", larger)
        if not is_on_host and hasattr(args, "device"):
            cure += ", or give --device cpu"
        if is_on_host:
            return _fail(f"not enough memory; free some, or {cure}")
        return _fail(f"{str(error).partition('. ')[0]}; free the GPU's memory, or {cure}")
    return code


def _flags_of(top: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the names of the flags of the subcommand that a command line begins with."""
    (commands,) = (action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction))
    options = commands[words[0]]._option_string_actions if words and words[0] in commands else {}
    return [flag.lstrip("-") for flag in options if flag.startswith("--")]


def command(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `main` as all that a process does."""
    set_up_bars()
    sys.exit(main(arguments))


def set_up_bars() -> None:
    """Silence progress bars where stderr is no terminal, and give them a size where the terminal has none.

    All bars, also those of libraries, are tqdm's, which reads the environment. It must not be imported yet.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    elif 0 in os.get_terminal_size(sys.stderr.fileno()):
        for variable, size in _SIZE.items():
            os.environ.setdefault(variable, str(size))


def _with_flags(message: str, args: argparse.Namespace) -> str:
    """Return an error about a key of the `sparseforge` block as one about the flag of that name, if there is one."""
    from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig

    # A path may read like a key, as sparseforge.model does: MODEL is no key of the block.
    keys = {field.name for kind in (SparseForgeConfig, BlockStartConfig) for field in dataclasses.fields(kind)}
    flags = keys & vars(args).keys()
    named = _KEY.sub(lambda key: f"--{key[1]}" if key[1] in flags else key[0], message)
    return named.replace(" use null or ", " leave it out, or use ")


def _fail(message: str) -> int:
    """Print an error as one line; return its exit code."""
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    command()
