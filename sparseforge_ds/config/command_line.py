"""Parser of the command line of `sparseforge train` and `launch/train.py`, and its errors."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import NoReturn

from transformers import HfArgumentParser

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.flag_names import expand_home, name_of, unknown_word, with_our_names
from sparseforge_ds.config.run_file import UnknownKeyError, read_run_file

_EXAMPLES = """\
exit code: 0 the run is complete; 1 an error, said in one line; 2 a flag that does not exist; 143 SIGTERM
stopped it; 130 Ctrl-C did

Flags of transformers that mean the same are taken too, like --per_device_train_batch_size for --micro_batch,
--num_train_epochs for --epochs or --logging_steps for --log_every.

examples:
  sparseforge train --deepspeed zero3
  deepspeed launch/train.py --deepspeed ds_configs/zero3.json
  deepspeed --no_local_rank --module sparseforge_ds train --deepspeed zero3 \\
      --model Qwen/Qwen3-14B --dataset allenai/c4:en --max_steps 20000 --output_dir runs/qwen3_14b
  sparseforge train --deepspeed zero3 --max_steps 20000 --print_config > run.yaml
  sparseforge train --config run.yaml --seed 1
  ... --dataset allenai/c4:en=0.7 allenai/dolmino-mix-1124:flan=0.2 stream:/data/own=0.1

`sparseforge train` is one process on one GPU. deepspeed starts one for every GPU: launch/train.py in a checkout,
--no_local_rank --module sparseforge_ds train elsewhere. torchrun starts them by -m sparseforge_ds train. On a
machine without an accelerator deepspeed starts one process; ask it for more with --num_gpus 2.
The run folder holds everything of a run; `sparseforge consolidate RUN OUT` makes a model of it.

SIGTERM (pre-emption) saves at the end of the step, on a GPU of the next one, and ends all ranks with
exit code 143, also when it reaches one rank only. Before the first step the ranks that get it end at once.
Ctrl-C does the same with exit code 130, and a second one ends them without saving. A launcher's death counts
as SIGTERM.
deepspeed and torchrun leave their ranks 30 s for it: where two steps and a save take longer, send the signal to
the ranks. --resume goes on from the newest complete checkpoint, on any number of ranks and at any ZeRO stage,
with the same number of sequences a step; --resume auto also starts the run, so that a job that is put back into
the queue needs one command only.
"""


_LAUNCHER_FLAGS = ("num_gpus", "num_nodes", "hostfile", "master_port", "master_addr", "launcher", "no_ssh")
_DEEPSPEED_CURE = "give the DeepSpeed JSON, for example --deepspeed ds_configs/zero3.json"
_NAMES = [item.name for item in dataclasses.fields(RunArguments) if item.name != "local_rank"]


class UnknownFlagError(ValueError):
    """Error about a word of the command line that belongs to no flag."""


class _Parser(HfArgumentParser):
    """Parser whose errors are ValueErrors of one line; argparse's usage would be printed by every rank."""

    def error(self, message: str) -> NoReturn:
        spellings = {"/".join(action.option_strings): action.option_strings[0] for action in self._actions}
        for spelled, flag in spellings.items():
            message = message.replace(f"argument {spelled}: ", f"{flag}: ") if spelled else message
        if message.endswith(" required: --deepspeed"):
            message = f"--deepspeed is missing: {_DEEPSPEED_CURE}"
        if message.startswith("--resume: "):
            message = f"{message.partition(' (')[0]}; give --resume, --resume auto, or leave it out"
        message = message.replace("invalid int value", "not an integer").replace("invalid float value", "not a number")
        raise ValueError(message)


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.HelpFormatter):
    """Formatter of the help, with one spelling of each flag, and defaults where they say something."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0 or action.const is True:
            return ", ".join(option for option in action.option_strings if "_" in option or "-" not in option[2:])
        return f"{action.option_strings[0]} {self._format_args(action, action.dest.upper())}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, argparse.SUPPRESS, []) or action.default is False or action.required:
            return text
        return f"{text} (default: %(default)s)"


def argument_parser() -> HfArgumentParser:
    """Return the parser of the launcher's command line."""
    return _Parser(
        RunArguments,
        prog="sparseforge train",
        usage="sparseforge train --deepspeed JSON [flags]\n       sparseforge train --config YAML [flags]\n"
        "       deepspeed launch/train.py --deepspeed JSON [flags]",
        description="Train a dense causal language model into an exact N:M sparse one (SparseForge on DeepSpeed).",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


def parse_arguments(command_line: Sequence[str] | None = None) -> RunArguments:
    """Parse a command line, by default that of this process.

    Raises:
        ValueError: a flag is unknown, missing, or has a value that cannot work.
    """
    # Parse the words alone, without defaults, to know which flags are given.
    words = with_our_names(sys.argv[1:] if command_line is None else command_line, _NAMES)
    parser = argument_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        if "--deepspeed" in action.option_strings:
            action.required = not any(word.partition("=")[0] == "--config" for word in words)
    given_flags, unknown = parser.parse_known_args(words)
    if unknown:
        raise UnknownFlagError(_unknown(unknown[0]))

    # Flags win over the file of --config.
    values = vars(given_flags)
    if values.get("config") is not None:
        values["config"] = expand_home(values["config"])
        try:
            in_file = read_run_file(values["config"]).flags
            # A run has one of these two lengths.
            if len({"epochs", "max_steps"} & values.keys()) == 1:
                in_file = {key: value for key, value in in_file.items() if key not in ("epochs", "max_steps")}
            values = in_file | values
        except UnknownKeyError as error:
            raise ValueError(f"--config {values['config']}: {_unknown(f'--{error.key}')}") from None
        if "deepspeed" not in values:
            raise ValueError(f"--config {values['config']}: key deepspeed is missing: {_DEEPSPEED_CURE}")
    arguments = RunArguments(**values)
    if arguments.resume_other_data and not arguments.resume:
        raise ValueError("--resume_other_data is not valid: it belongs to --resume")
    # A file may name the project of launches with trackers; a launch without any leaves it unread.
    if "project" in vars(given_flags) and set(arguments.report_to) <= {"tensorboard", "none"}:
        raise ValueError(
            f"--project {arguments.project} is not valid: no tracker of --report_to has projects; leave it out, or "
            "give one that has, like wandb or mlflow"
        )
    return arguments


def _unknown(word: str) -> str:
    """Return the error message about a word of the command line that belongs to no flag."""
    flag = word.partition("=")[0]
    name = name_of(flag).lower()
    if not flag.startswith("-") or name in _NAMES:
        return unknown_word(word, _NAMES)
    if name in _LAUNCHER_FLAGS:
        return (
            f"{flag}: the deepspeed launcher has this flag: write it before the script, deepspeed {flag} ... train.py"
        )
    # These imports are slow, so they wait until there is an error.
    from sparseforge_ds.config import SparseForgeConfig
    from sparseforge_ds.config.deepspeed_keys import KEYS

    if name in {item.name for item in dataclasses.fields(SparseForgeConfig)}:
        return f'{flag}: not a flag, but a key of the "sparseforge" block of the DeepSpeed JSON: "{name}"'
    if name in KEYS:
        return f'{flag}: not a flag, but a key of the DeepSpeed JSON: "{name}"'
    return unknown_word(word, _NAMES)
