"""The flags of `sparseforge train` and `launch/train.py`: what a run reads, how long it is and where it writes.

What decides which weights survive is the `sparseforge` block of the DeepSpeed JSON, and batch size, precision, ZeRO
stage and offload are DeepSpeed's own keys in the same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from sparseforge_ds.config.flag_names import expand_home
from sparseforge_ds.config.strict import LARGEST, LARGEST_RATE, MOST

EMBEDDED_MODEL = "stdlib_llama"
"""Value of `--model` for the model inside the package."""
EMBEDDED_TEXT = "stdlib"
"""Value of `--dataset` for the text inside the package: the documentation of Python's standard library."""

HELD_OUT_TEXT = "stdlib:heldout"
"""Value of `--eval_dataset` for the part of that text that is not trained on."""

DocumentFrame = Literal["auto", "bos", "eos", "both"]
"""Tokens around every document: the tokenizer's BOS, EOS or both; `auto` is BOS, or EOS without a BOS."""

SampleBy = Literal["document", "paragraph", "line"]
"""Unit of a .txt file that is one document, in the words of `datasets`."""

SchedulerName = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "warmup_stable_decay",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
]
"""Schedules of the learning rate, in the words of transformers, that are functions of the step alone."""
_WITHOUT_KWARGS = ("cosine", "constant", "constant_with_warmup")
"""Schedules for which transformers drops `lr_scheduler_kwargs`, or which are ours."""
_WITH_FLOOR = ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")

LossOn = Literal["all", "completion"]
"""Tokens of a record that the loss is the mean over."""

_COUNTS = ("max_steps", "save_every", "keep_checkpoints", "eval_sequences", "eval_every")
"""Flags that must not be negative."""
NOT_OF_A_RUN = ("local_rank", "config", "print_config", "dry_run", "gpus", "gpu_memory")
"""Flags that change nothing in what a run computes."""


def _flag(default: object, text: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar} if metavar else {"help": text})


def _list_flag(text: str, metavar: str) -> Any:
    return field(default_factory=list, metadata={"metavar": metavar, "action": "extend", "help": text})


@dataclass(frozen=True)
class RunArguments:
    """Flags of a run. A wrong value is a ValueError that names the flag and the cure."""

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
    teacher_logits: str | None = _flag(
        None,
        "folder of a teacher's largest logits of this text, which `sparseforge teach` has written, in place of a "
        "teacher in memory",
        "DIR",
    )
    dataset: list[str] = _list_flag(
        "training text: .txt, .jsonl or .json (also with .gz, .zst, .bz2 or .xz), .parquet, .arrow or Megatron's .idx "
        "file, a folder of them, a hub id (owner/name, owner/name:config or owner/name:folder/subfolder), or stdlib, "
        "the documentation of Python's standard library (default: stdlib). A hub id, or stream: before a path, is "
        "tokenized while the run goes on, anything else before it. Several are mixed: SHARE is a source's part of "
        "the tokens, relative to the others; without shares all have the same",
        "SOURCE[=SHARE]",
    )
    split: str = _flag(
        "train",
        "split of a hub dataset or of a folder that is read, or several, like train+validation. Names of files, or of "
        "the folders below the given one, mention their split, as in datasets; without such names they belong to "
        "train. The launch prints which files are read",
        "NAME",
    )
    text_field: str = _flag(
        "text",
        "field of a record that holds the text, or the messages of a conversation, which the tokenizer's chat template "
        "turns into text; null or empty records are skipped. Without that field, or where `text` is null, a record may "
        "have messages, or prompt and completion, as in datasets, or input_ids, the tokens themselves; --loss_on says "
        "which of its tokens are trained on",
        "NAME",
    )
    loss_on: LossOn = _flag(
        "all",
        "tokens that the loss is the mean over: all, or those of the completion alone. In records with prompt and "
        "completion that is all that follows the prompt. With messages it is the assistant's turns, which the chat "
        "template must put between {%% generation %%} and {%% endgeneration %%}. With input_ids it is the tokens whose "
        "labels are not -100. Plain text is then refused",
    )
    sample_by: SampleBy = _flag(
        "document", "unit of a .txt file that is one document: the whole file, a paragraph or a line"
    )
    document_frame: DocumentFrame = _flag(
        "auto",
        "tokens around every document: the tokenizer's BOS in front (bos), its EOS behind (eos), or both, from which a "
        "model also learns to end a text. auto: bos, or eos where there is no BOS, as in all runs measured so far",
    )
    document_attention: bool = _flag(
        False,
        "attention stays inside documents: a token of a sequence sees those of its own document alone, positions begin "
        "anew with each document, and nothing predicts its first token. A model that cannot do that is refused. "
        "Default: a token sees all before it in its sequence",
    )
    max_steps: int | None = _flag(
        None,
        "optimizer steps of the whole run; default: max_steps of the sparseforge block. With --resume, a larger "
        "number than before continues the frozen finetune, once the mask is frozen",
        "N",
    )
    epochs: float | None = _flag(
        None, "passes over the text, instead of --max_steps; for one source that is no stream", "N"
    )
    global_batch: int | None = _flag(
        None,
        "sequences of a step on all GPUs, a multiple of their number (over --sequence_parallel); default: "
        "train_batch_size of the JSON",
        "N",
    )
    micro_batch: int | None = _flag(
        None,
        "sequences that a GPU, or a group of GPUs that shares sequences, computes at a time; default: "
        "train_micro_batch_size_per_gpu of the JSON",
        "N",
    )
    gradient_accumulation_steps: int | None = _flag(
        None,
        "micro-batches of a step, which then has micro-batch x this x GPUs sequences; default: follows from "
        "--global_batch and the JSON",
        "N",
    )
    seq_length: int = _flag(256, "tokens of a training sequence; documents are packed", "N")
    sequence_parallel: int | None = _flag(
        None,
        "GPUs that share one sequence, each with a part of its tokens, for sequences too long for one GPU's "
        "memory (DeepSpeed's Ulysses); a divisor of the number of GPUs, of --seq_length and of the model's attention "
        "heads; default: sequence_parallel_size of the JSON, or 1",
        "N",
    )
    output_dir: str = _flag("runs/stdlib_llama", "run folder: checkpoints, TensorBoard log, token cache", "DIR")
    learning_rate: float | None = _flag(
        None,
        "peak learning rate; default: lr of the JSON's optimizer, and where that is auto "
        "4e-3 * min(1, 64 / hidden size)",
        "LR",
    )
    warmup: float = _flag(0.03, "share of the run over which the learning rate rises", "SHARE")
    min_lr_ratio: float = _flag(
        0.1,
        "the rate ends at this share of the peak, so that the frozen finetune still learns; for cosine, "
        "cosine_with_min_lr, cosine_warmup_with_min_lr and warmup_stable_decay",
        "SHARE",
    )
    lr_scheduler_type: SchedulerName = _flag(
        "cosine",
        "schedule of the learning rate: cosine is ours, which begins above 0 and ends at --min_lr_ratio. The others "
        "are transformers', by get_scheduler: linear, constant, constant_with_warmup, "
        "warmup_stable_decay, cosine_with_restarts, cosine_with_min_lr, cosine_warmup_with_min_lr, polynomial, "
        "inverse_sqrt",
        "NAME",
    )
    lr_scheduler_kwargs: str | None = _flag(
        None,
        "settings of that schedule in transformers' words; warmup_stable_decay needs some, "
        """like '{"num_decay_steps": 200}'""",
        "JSON",
    )
    weight_decay: float | None = _flag(
        None, "AdamW's decay of matrices; default: weight_decay of the JSON's optimizer, 0 where that is auto", "WD"
    )
    save_every: int = _flag(500, "steps between checkpoints; 0: only at the end", "N")
    keep_checkpoints: int = _flag(2, "newest checkpoints that stay on disk, at least the last good one; 0: all", "N")
    eval_dataset: str | None = _flag(
        None,
        "text that is scored while the run goes on: a file, a folder or a hub id as for --dataset, or stdlib:heldout. "
        "Its perplexity, on the mask as it is at that step, is in the log and in every tracker; it is the same on any "
        "number of ranks and changes nothing of the training",
        "SOURCE",
    )
    eval_split: str = _flag("validation", "split of a folder or hub dataset of --eval_dataset", "NAME")
    eval_sequences: int = _flag(
        512, "windows of --seq_length tokens that are scored, the first of the text; 0: all", "N"
    )
    eval_every: int = _flag(
        500, "steps between evaluations; there is one before the first step and one at the end; 0: only these", "N"
    )
    keep_best: bool = _flag(
        False,
        "keep the checkpoint with the lowest perplexity of --eval_dataset, whatever --keep_checkpoints says: "
        "checkpoints/best names it, and consolidate and export take that path. It also evaluates at every save. Only "
        "checkpoints whose mask is frozen, or was never soft, count",
    )
    log_every: int = _flag(10, "steps between lines of the log", "N")
    report_to: list[str] = _list_flag(
        "where metrics go: tensorboard, wandb, mlflow or another tracker of accelerate, several of them, or none "
        "(default: tensorboard). Loggers in the JSON's own sections tensorboard, wandb, comet and "
        "csv_monitor get them too",
        "NAME",
    )
    project: str = _flag(
        "sparseforge_ds", "name under which trackers that have projects or experiments file the run", "NAME"
    )
    seed: int = _flag(0, "seed of the data order and of everything random in training", "N")
    resume: Literal[False, True, "auto"] = field(
        default=False,
        metadata={
            "nargs": "?",
            "const": True,
            "help": "continue from the newest complete checkpoint of the run folder; --resume auto starts the run "
            "where there is none yet, so that one command serves the first launch and every later one",
        },
    )
    resume_other_data: bool = _flag(
        False,
        "with --resume: go on although the text is not the one that the checkpoint was trained on (it is known by "
        "content, so moved or touched files are the same), or is divided into tokens in another way. The launch prints "
        "what differs. The run reads the new text from its present position; a stream is first tokenized up to there",
    )
    allow_dense: list[str] = _list_flag(
        "linear weights that the family table does not know may stay dense where one of these globs names "
        "them; without, a model with more than 2%% of them is refused. Adds to allow_dense of the block",
        "PATTERN",
    )
    any_family: bool = _flag(
        False,
        "prune a model whose family the family table does not know, by the types of its layers: linear layers of "
        "numbered blocks and fused experts, not routers and heads. The launch prints the resulting globs, to be pasted "
        "into the block, where lines can be moved from include to allow_dense",
    )
    attn_implementation: str | None = _flag(
        None,
        "how attention is computed, in transformers' words: eager, sdpa, flash_attention_2, flash_attention_3, "
        "flex_attention or the name of a kernel on the hub; default: the best that the model's family has",
        "NAME",
    )
    activation_checkpointing: bool = _flag(False, "recompute activations in the backward pass to save memory")
    config: str | None = _flag(
        None,
        "YAML file with all of a run: flags by their names, the keys of the sparseforge block below sparseforge, and "
        "below deepspeed the DeepSpeed configuration or its path. Flags of the command line win over it",
        "YAML",
    )
    print_config: bool = _flag(
        False, "print the whole run as YAML, which --config reads back to the same run, and end; it needs no model"
    )
    dry_run: bool = _flag(
        False,
        "check everything that can be checked without weights, text and GPUs, print the whole run with its schedule "
        "and memory, and end; nothing is allocated or written. Needs no launcher, and of the hub at most the model's "
        "config",
    )
    gpus: int | None = _flag(
        None, "with --dry_run: number of GPUs to plan for; default: the launcher's, on this machine", "N"
    )
    gpu_memory: float = _flag(80.0, "with --dry_run: GiB of one GPU", "GIB")
    local_rank: int = field(default=-1, metadata={"help": argparse.SUPPRESS})

    def __post_init__(self) -> None:
        # 1. Sizes and counts.
        for name in ("global_batch", "micro_batch", "gradient_accumulation_steps", "sequence_parallel", "gpus"):
            value = getattr(self, name)
            _require(value is None or 1 <= value <= MOST, name, value, f"use an integer >= 1, at most {MOST:,}")
        _require(
            self.dry_run or self.gpus is None,
            "gpus",
            self.gpus,
            "it belongs to --dry_run; a run has the GPUs that the launcher gives it (deepspeed --num_gpus, --hostfile)",
        )
        rate = self.learning_rate
        steps = self.max_steps
        decay = self.weight_decay
        epochs = self.epochs
        _require(
            epochs is None or (0 < epochs < float("inf") and steps is None),
            "epochs",
            epochs,
            "use a number > 0, without --max_steps"
            + ("" if steps is None else f", which is {steps}; give one of them"),
        )
        _require(
            epochs is None or not self.dry_run,
            "epochs",
            epochs,
            "--dry_run reads no text, and cannot count the steps; give --max_steps instead",
        )
        # 2. Numbers within their ranges.
        for name, is_valid, cure in (
            ("max_steps", steps is None or steps <= MOST, f"use an integer >= 0, at most {MOST:,}"),
            *((n, getattr(self, n) is None or getattr(self, n) >= 0, "use an integer >= 0") for n in _COUNTS),
            ("gpu_memory", 0 < self.gpu_memory <= LARGEST, f"use a number of GiB > 0, at most {LARGEST:g}"),
            ("seq_length", 2 <= self.seq_length <= MOST, f"use an integer >= 2, at most {MOST:,}"),
            (
                "learning_rate",
                rate is None or 0 < rate <= LARGEST_RATE,
                f"use a value > 0, at most {LARGEST_RATE:g}, like 1e-4",
            ),
            ("warmup", 0 <= self.warmup < 1, "use a share of the run, 0 <= share < 1"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "use a share, 0 <= share <= 1"),
            ("weight_decay", decay is None or 0 <= decay <= LARGEST, f"use >= 0, at most {LARGEST:g}"),
            (
                "min_lr_ratio",
                self.min_lr_ratio == 0.1 or self.lr_scheduler_type in _WITH_FLOOR,
                f"--lr_scheduler_type {self.lr_scheduler_type} has no floor; leave it out, or use one of "
                f"{', '.join(_WITH_FLOOR)}",
            ),
            (
                "warmup",
                self.warmup == 0.03 or self.lr_scheduler_type != "constant",
                "--lr_scheduler_type constant has no warm-up; use constant_with_warmup",
            ),
            (
                "lr_scheduler_kwargs",
                self.lr_scheduler_kwargs is None or _is_object(self.lr_scheduler_kwargs),
                """use a JSON object with finite numbers, like '{"num_decay_steps": 200}'""",
            ),
            (
                "lr_scheduler_kwargs",
                self.lr_scheduler_kwargs is None or self.lr_scheduler_type not in _WITHOUT_KWARGS,
                f"--lr_scheduler_type {self.lr_scheduler_type} takes none; leave it out, or give another type",
            ),
            (
                "keep_best",
                not self.keep_best or self.eval_dataset is not None,
                "it needs --eval_dataset, by whose perplexity the best is chosen",
            ),
            ("log_every", self.log_every >= 1, "use an integer >= 1"),
            ("seed", 0 <= self.seed < 2**32, "use 0 <= seed < 2^32"),
        ):
            _require(is_valid, name, getattr(self, name), cure)
        # 3. Flags that others need.
        defaults = {flag.name: flag.default for flag in fields(self)}
        for name, needed, is_there in (
            ("eval_split", "eval_dataset", self.eval_dataset is not None),
            ("eval_sequences", "eval_dataset", self.eval_dataset is not None),
            ("eval_every", "eval_dataset", self.eval_dataset is not None),
            ("gpu_memory", "dry_run", self.dry_run),
        ):
            value = getattr(self, name)
            _require(is_there or value == defaults[name], name, value, f"it belongs to --{needed}; give that too")
        # 4. Names that must not be empty, and names of splits.
        for name in ("model", "output_dir", "teacher", "teacher_logits", "eval_dataset", "dataset"):
            values = self.dataset if name == "dataset" else [getattr(self, name)]
            _require("" not in values, name, "", "give a value or leave the flag out")
        for name, split in (("split", self.split), ("eval_split", self.eval_split)):
            _require(
                all(re.fullmatch(r"[\w.-]+", part) for part in split.split("+")),
                name,
                split,
                "use the name of a split, or several joined by +, like train+validation",
            )
        # 5. A home folder, which a shell leaves alone behind `=` and a run file never sees.
        for name in ("deepspeed", "model", "output_dir", "teacher", "teacher_logits", "eval_dataset"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, expand_home(path))
        object.__setattr__(self, "dataset", list(map(expand_home, self.dataset)))
        # 6. Defaults of lists.
        if not self.dataset:
            object.__setattr__(self, "dataset", [EMBEDDED_TEXT])
        if not self.report_to:
            object.__setattr__(self, "report_to", ["tensorboard"])


def flags(arguments: RunArguments) -> dict[str, object]:
    """Return the flags as plain JSON types, without this process's rank and those of a dry run."""
    return {name: value for name, value in dataclasses.asdict(arguments).items() if name not in NOT_OF_A_RUN}


def _is_object(text: str) -> bool:
    """Return True if a text is a JSON object, with finite numbers."""
    try:
        content = json.loads(text)
        json.dumps(content, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict)


def _require(condition: bool, flag: str, value: object, cure: str) -> None:
    if not condition:
        raise ValueError(f"--{flag} {value} is not valid: {cure}")
