"""The command line of `sparseforge train` and `launch/train.py`: what a run reads, how long it is and where it writes.

What decides which weights survive is the `sparseforge` block of the DeepSpeed JSON, and batch size, precision, ZeRO
stage and offload are DeepSpeed's own keys in the same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from transformers import HfArgumentParser

EMBEDDED_MODEL = "stdlib_llama"
"""`--model` of the model that is shipped inside the package."""
EMBEDDED_TEXT = "stdlib"
"""`--dataset` of the documentation of the running interpreter's standard library."""

DocumentFrame = Literal["auto", "bos", "eos", "both"]
"""Which of the tokenizer's BOS and EOS tokens stand around every document."""

SampleBy = Literal["document", "paragraph", "line"]
"""What is a document of a .txt file; the words are those of `datasets`."""

_EXAMPLES = """\
exit code: 0 the run is complete; 1 an error, said in one line; 2 a flag that does not exist; 143 SIGTERM
stopped it; 130 Ctrl-C did

examples:
  sparseforge train --deepspeed zero3
  deepspeed launch/train.py --deepspeed ds_configs/zero3.json
  deepspeed --module sparseforge_ds.train --deepspeed zero3 \\
      --model Qwen/Qwen3-14B --dataset allenai/c4:en --max_steps 20000 --output_dir runs/qwen3_14b
  ... --dataset allenai/c4:en=0.7 allenai/dolmino-mix-1124:flan=0.2 stream:/data/own=0.1

`sparseforge train` is one process on one GPU. deepspeed starts one for every GPU, in a checkout by launch/train.py
and elsewhere by --module sparseforge_ds.train; torchrun does by -m sparseforge_ds.train. On a machine without an
accelerator deepspeed starts one process; ask it for more with --num_gpus 2.
The run folder holds everything of a run; `sparseforge consolidate RUN OUT` makes a model of it.

SIGTERM (pre-emption) saves at the end of the step and ends all ranks with exit code 143, also when it reaches
one rank only; before training it ends them at once. Ctrl-C does the same with exit code 130, and a second one
ends them without saving. To lose the launcher counts as SIGTERM. deepspeed and torchrun leave their ranks 30 s
for it: where a step and a save take longer, send the signal to the ranks. --resume goes on from the newest
complete checkpoint, on any number of ranks and at any ZeRO stage, with the same number of sequences a step;
--resume auto also starts the run, so that a job that is put back into the queue needs one command only.
"""


_OF_THE_LAUNCHER = ("num_gpus", "num_nodes", "hostfile", "master_port", "master_addr", "launcher", "no_ssh")
_SHORT = {
    **dict.fromkeys(("lr", "rate"), "learning_rate"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "global_batch"),
    **dict.fromkeys(("per_device_train_batch_size", "train_micro_batch_size_per_gpu"), "micro_batch"),
    **dict.fromkeys(("model_name_or_path", "pretrained"), "model"),
}
"""What other trainers call our flags."""
NOT_OF_A_RUN = ("local_rank", "dry_run", "gpus", "gpu_memory")
"""Flags that change nothing of what a run does."""


def _flag(default: object, text: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar} if metavar else {"help": text})


@dataclass(frozen=True)
class RunArguments:
    """The run flags. A wrong value is a ValueError that names the flag and the cure."""

    deepspeed: str = field(
        metadata={
            "metavar": "JSON",
            "help": 'DeepSpeed configuration with a "sparseforge" block: a file, or the name of one in the package, '
            "which are zero1, zero2, zero3 and zero3_offload",
        }
    )
    model: str = _flag(
        EMBEDDED_MODEL,
        "the dense model: a Hugging Face folder, a hub id, or the small model embedded in the package",
    )
    teacher: str | None = _flag(None, "dense model to distil from: folder or hub id; default: the same as --model")
    dataset: list[str] = field(
        default_factory=list,
        metadata={
            "metavar": "SOURCE[=WEIGHT]",
            "action": "extend",
            "help": "training text: .txt, .jsonl, .json, .csv or .tsv (also with .gz, .zst, .bz2 or .xz), .parquet or "
            ".arrow file, a folder of them, a hub id (owner/name, owner/name:config or owner/name:folder/subfolder), "
            "or stdlib, the documentation of Python's standard library (default: stdlib). A hub id, or stream: before "
            "a path, is tokenised while the run goes on, anything else before it. Several are mixed: WEIGHT is a "
            "source's share of the tokens, relative to the others; without weights all have the same",
        },
    )
    split: str = _flag(
        "train",
        "split of a hub dataset or of a folder that is read, or several, like train+validation. A folder's files are "
        "of the split that their names, or those of the folders below it, speak of, as in datasets; without such names "
        "they are of train. The start says which files are read",
        "NAME",
    )
    text_field: str = _flag("text", "field of a record that holds the text; null or empty records are skipped", "NAME")
    sample_by: SampleBy = _flag("document", "what is a document of a .txt file: all of it, a paragraph or a line")
    document_frame: DocumentFrame = _flag(
        "auto",
        "tokens around every document: the tokenizer's BOS in front (bos), its EOS behind (eos), or both, from which a "
        "model also learns to end a text. auto: bos, or eos where there is no BOS, as in all runs measured so far",
    )
    max_steps: int | None = _flag(
        None, "optimizer steps of the whole run; default: max_steps of the sparseforge block", "N"
    )
    global_batch: int | None = _flag(
        None, "sequences of a step on all GPUs, a multiple of their number; default: train_batch_size of the JSON", "N"
    )
    micro_batch: int | None = _flag(
        None, "sequences of a GPU at a time; default: train_micro_batch_size_per_gpu of the JSON", "N"
    )
    seq_length: int = _flag(256, "tokens of a training sequence; documents are packed", "N")
    output_dir: str = _flag("runs/stdlib_llama", "run folder: checkpoints, TensorBoard log, token cache", "DIR")
    learning_rate: float | None = _flag(
        None,
        "peak learning rate; default: lr of the JSON's optimizer, and where that is auto "
        "1e-3 * min(1, 128 / hidden size)",
        "LR",
    )
    warmup: float = _flag(0.03, "share of the run over which the learning rate rises", "SHARE")
    min_lr_ratio: float = _flag(
        0.1, "the cosine ends at this share of the peak, so that the frozen finetune still learns", "SHARE"
    )
    weight_decay: float | None = _flag(
        None, "AdamW's decay of matrices; default: weight_decay of the JSON's optimizer, 0 where that is auto", "WD"
    )
    save_every: int = _flag(500, "steps between checkpoints; 0: only at the end", "N")
    keep_checkpoints: int = _flag(2, "newest checkpoints that stay on disk, at least the last good one; 0: all", "N")
    log_every: int = _flag(10, "steps between lines of the log", "N")
    seed: int = _flag(0, "seed of the data order and of everything random in training", "N")
    resume: Literal[False, True, "auto"] = field(
        default=False,
        metadata={
            "nargs": "?",
            "const": True,
            "help": "continue from the newest complete checkpoint of the run folder; --resume auto starts the run "
            "where there is none yet, so that one command serves the first start and every later one",
        },
    )
    resume_other_data: bool = _flag(
        False,
        "with --resume: go on although the text is not the one that the checkpoint was trained on (it is known by "
        "content, so moved or touched files are the same), or is divided into tokens in another way. What differs is "
        "said. The run reads the new text from its present position on; a stream that merely got files behind those "
        "that it has read goes on where it was, any other is first tokenised up to that position",
    )
    allow_dense: list[str] = field(
        default_factory=list,
        metadata={
            "metavar": "PATTERN",
            "action": "extend",
            "help": "linear weights that the family table does not know may stay dense where one of these globs names "
            "them; without, a model with more than 2%% of them is refused. Adds to allow_dense of the block",
        },
    )
    activation_checkpointing: bool = _flag(False, "recompute activations in the backward pass to save memory")
    dry_run: bool = _flag(
        False,
        "check everything that can be checked without weights, text and GPUs, print the whole run with its schedule "
        "and memory, and end; nothing is allocated or written. Needs no launcher and no hub",
    )
    gpus: int | None = _flag(
        None, "with --dry_run: GPUs of the machines that are meant; default: the launcher's, on this machine", "N"
    )
    gpu_memory: float = _flag(80.0, "with --dry_run: GiB of one GPU", "GIB")
    local_rank: int = field(default=-1, metadata={"help": argparse.SUPPRESS})

    def __post_init__(self) -> None:
        _require(self.max_steps is None or self.max_steps >= 0, "max_steps", self.max_steps, "use an integer >= 0")
        for name in ("global_batch", "micro_batch", "gpus"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "use an integer >= 1")
        _require(0 < self.gpu_memory < float("inf"), "gpu_memory", self.gpu_memory, "use a number of GiB > 0")
        _require(
            self.dry_run or self.gpus is None,
            "gpus",
            self.gpus,
            "it belongs to --dry_run; a run has the GPUs that the launcher gives it (deepspeed --num_gpus, --hostfile)",
        )
        _require(self.seq_length >= 2, "seq_length", self.seq_length, "use an integer >= 2")
        rate = self.learning_rate
        _require(rate is None or 0 < rate < float("inf"), "learning_rate", rate, "use a value > 0, like 1e-4")
        _require(0 <= self.warmup < 1, "warmup", self.warmup, "use a share of the run, 0 <= share < 1")
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "use a share, 0 <= share <= 1")
        _require(self.weight_decay is None or self.weight_decay >= 0, "weight_decay", self.weight_decay, "use >= 0")
        _require(self.save_every >= 0, "save_every", self.save_every, "use an integer >= 0")
        _require(self.keep_checkpoints >= 0, "keep_checkpoints", self.keep_checkpoints, "use an integer >= 0")
        _require(self.log_every >= 1, "log_every", self.log_every, "use an integer >= 1")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "use 0 <= seed < 2^32")
        for name, values in (("model", [self.model]), ("output_dir", [self.output_dir]), ("dataset", self.dataset)):
            _require(all(values), name, "", "give a value or leave the flag out")
        _require(
            all(re.fullmatch(r"[\w.-]+", name) for name in self.split.split("+")),
            "split",
            self.split,
            "use the name of a split, or several joined by +, like train+validation",
        )
        if not self.dataset:
            object.__setattr__(self, "dataset", [EMBEDDED_TEXT])


class _Parser(HfArgumentParser):
    """Errors are ValueErrors of one line; a usage would be printed by every rank."""

    def error(self, message: str) -> NoReturn:
        spellings = {"/".join(action.option_strings): action.option_strings[0] for action in self._actions}
        for spelled, flag in spellings.items():
            message = message.replace(f"argument {spelled}: ", f"{flag}: ") if spelled else message
        if message.endswith(" required: --deepspeed"):
            message = "--deepspeed is missing: give the DeepSpeed JSON, for example --deepspeed ds_configs/zero3.json"
        message = message.replace("invalid int value", "not an integer").replace("invalid float value", "not a number")
        raise ValueError(message)


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.HelpFormatter):
    """Help with one spelling per flag, and defaults where they say something."""

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
    """The parser of the launcher's command line."""
    return _Parser(
        RunArguments,
        prog="sparseforge train",
        usage="sparseforge train --deepspeed JSON [flags]\n       deepspeed launch/train.py --deepspeed JSON [flags]",
        description="Train a dense causal language model into an exact N:M sparse one (SparseForge on DeepSpeed).",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


def parse_arguments(command_line: Sequence[str] | None = None) -> RunArguments:
    """Parse the command line (default: this process's).

    Raises:
        ValueError: a flag is unknown, missing, or has a value that cannot work.
        SystemExit: --help.
    """
    arguments, *unknown = argument_parser().parse_args_into_dataclasses(
        args=None if command_line is None else list(command_line),
        look_for_args_file=False,
        return_remaining_strings=True,
    )
    if unknown[-1]:
        raise ValueError(_unknown(unknown[-1][0]))
    assert isinstance(arguments, RunArguments)
    _require(
        not arguments.resume_other_data or bool(arguments.resume), "resume_other_data", "", "it belongs to --resume"
    )
    return arguments


def _unknown(word: str) -> str:
    """What is said of a word of the command line that belongs to no flag."""
    if not word.startswith("-"):
        return f"{word!r} belongs to no flag; quote a value that has spaces, and give flags as --name value"
    flag = word.partition("=")[0]
    name = flag.lstrip("-").replace("-", "_").lower()
    known = [item.name for item in dataclasses.fields(RunArguments) if item.name != "local_rank"]
    if name in _OF_THE_LAUNCHER:
        return (
            f"{flag}: the deepspeed launcher has this flag: write it before the script, deepspeed {flag} ... train.py"
        )
    near = [name] if name in known else difflib.get_close_matches(_SHORT.get(name, name), known, n=1, cutoff=0.6)
    # Not imported before something is wrong, so that --help need not wait for DeepSpeed.
    from sparseforge_ds.config import SparseForgeConfig
    from sparseforge_ds.train.deepspeed_keys import KEYS

    if name not in known and name in {item.name for item in dataclasses.fields(SparseForgeConfig)}:
        return f'{flag}: not a flag, but a key of the "sparseforge" block of the DeepSpeed JSON: "{name}"'
    if name in KEYS and not (name == "train_batch_size" or name.startswith("train_micro_batch")):
        return f'{flag}: not a flag, but a key of the DeepSpeed JSON: "{name}"'
    return f"{flag}: unknown flag; {f'did you mean --{near[0]}?' if near else '--help lists the flags'}"


def flags(arguments: RunArguments) -> dict[str, object]:
    """The run flags as plain JSON types, without this process' rank and what belongs to a dry run."""
    return {name: value for name, value in dataclasses.asdict(arguments).items() if name not in NOT_OF_A_RUN}


def _require(condition: bool, flag: str, value: object, cure: str) -> None:
    if not condition:
        raise ValueError(f"--{flag} {value} is not valid: {cure}")
