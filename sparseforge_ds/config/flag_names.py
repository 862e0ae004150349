"""Names of flags: those of other trainers for ours, and guesses at mistyped ones."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence

from sparseforge_ds.config.strict import nearest

ALIASES = {
    **dict.fromkeys(("model_name_or_path", "pretrained_model_name_or_path", "base_model", "pretrained"), "model"),
    **dict.fromkeys(("teacher_model_name_or_path", "teacher_model"), "teacher"),
    **dict.fromkeys(("dataset_name", "train_file", "data_path"), "dataset"),
    **dict.fromkeys(("dataset_text_field", "text_column", "text_column_name"), "text_field"),
    **dict.fromkeys(("validation_file", "eval_file"), "eval_dataset"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_length", "block_size", "sequence_len"), "seq_length"),
    **dict.fromkeys(("per_device_train_batch_size", "train_micro_batch_size_per_gpu"), "micro_batch"),
    **dict.fromkeys(("train_batch_size", "global_batch_size", "total_batch_size"), "global_batch"),
    "accumulation_steps": "gradient_accumulation_steps",
    "num_train_epochs": "epochs",
    **dict.fromkeys(("lr", "rate"), "learning_rate"),
    "warmup_ratio": "warmup",
    "lr_scheduler": "lr_scheduler_type",
    "gradient_checkpointing": "activation_checkpointing",
    "attn_impl": "attn_implementation",
    "logging_steps": "log_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "eval_steps": "eval_every",
    "resume_from_checkpoint": "resume",
    "deepspeed_config": "deepspeed",
}
"""Our flag for each flag of transformers, TRL, Axolotl and DeepSpeed that means the same."""
_SUGGESTED = {"batch_size": "global_batch", "per_device_batch_size": "micro_batch", "warmup_steps": "warmup"}
"""Our flag for names that may mean it, but not surely: it is suggested, and not taken."""


def with_our_names(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Return a command line with aliases of known flags replaced; `known` are names without dashes."""
    return [_with_our_name(word, known) for word in words]


def with_home_folders(words: Sequence[str]) -> list[str]:
    """Return a command line with home folders in place of ~, which a shell leaves alone behind `=`."""
    expanded = []
    for word in words:
        flag, equals, value = word.partition("=")
        expanded.append(f"{flag}={expand_home(value)}" if equals and flag.startswith("--") else word)
    return expanded


def expand_home(path: str) -> str:
    """Return a path, or that of a stream, with the home folder in place of ~ at its beginning."""
    return re.sub(r"^(stream:)?(~[^/]*)", lambda match: f"{match[1] or ''}{os.path.expanduser(match[2])}", path)


def unknown_word(word: str, known: Collection[str]) -> str:
    """Return the error message about a word of the command line that belongs to no flag."""
    if not word.startswith("-"):
        return f"{word!r} belongs to no flag; quote a value that has spaces, and give flags as --name value"
    flag = word.partition("=")[0]
    name = name_of(flag).lower()
    likely = _SUGGESTED.get(name, name)
    aliases = [alias for alias, ours in ALIASES.items() if ours in known]
    near = likely if likely in known else nearest(likely, [*known, *aliases])
    near = ALIASES.get(near or "", near)
    return f"{flag}: unknown flag; {f'did you mean --{near}?' if near else '--help lists the flags'}"


def name_of(flag: str) -> str:
    """Return a flag's name without dashes in front, and with underscores inside."""
    return flag.lstrip("-").replace("-", "_")


def _with_our_name(word: str, known: Collection[str]) -> str:
    flag, equals, value = word.partition("=")
    name = name_of(flag)
    if not flag.startswith("--") or name in known or ALIASES.get(name) not in known:
        return word
    return f"--{ALIASES[name]}{equals}{value}"
