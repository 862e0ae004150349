"""The flags of evaluations, without what they need to run, so that help is there at once."""

from __future__ import annotations

import argparse

from sparseforge_ds.evaluate.published import PUBLISHED, SUITES

DTYPES = ("auto", "float32", "bfloat16", "float16")
NO_ADAPTER = "none"
"""In place of an adapter's folder: without any."""


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every evaluation: which model, in which form, and how much is asked of it."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub id of a Hugging Face model")
    add("--one_shot", metavar="PATTERN", help="prune by magnitude in memory first, for example 2:4")
    add(
        "--adapter",
        metavar="FOLDER",
        help="PEFT adapter to put on the model (needs peft); default: the one in the model's own folder, like the "
        f"low-rank branch that export writes; {NO_ADAPTER}: without",
    )
    add("--dtype", default="auto", choices=DTYPES, help="default: what the model was saved in")
    add("--batch_size", type=int, default=8, metavar="N", help="sequences of one forward (default: 8)")
    add("--limit", type=int, metavar="N", help="at most this many documents of a text and items of a task, the first")
    add("--json", metavar="FILE", help="also write the result to a file")
    add("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it


def add_text_flags(parser: argparse._ActionsContainer, required: bool = False) -> None:
    """The flags of perplexity: which text, and how it is scored."""
    add = parser.add_argument
    add(
        "--text",
        metavar="TEXT",
        required=required,
        help="a file of any kind that training reads, stdlib:heldout, stdlib:train, wikitext2 (from the hub) or "
        "wikitext2:PATH (its rows)",
    )
    add("--text_field", default="text", metavar="NAME", help="field of a record that holds the text (default: text)")
    add("--protocol", choices=["documents", "windows"], help="default: by the kind of text")
    add("--seq_length", type=int, metavar="N", help="tokens of a window or of a document at most")
    add("--stride", type=int, metavar="N", help="distance of window starts (default: seq_length, no overlap)")
    add("--keep_tail", action="store_true", help="also score what does not fill the last window")


def add_task_flags(parser: argparse._ActionsContainer, required: bool = False) -> None:
    """The flags of zero-shot accuracy: which tasks, and what is put beside ours."""
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--tasks", metavar="NAMES", help="names of the harness, with commas between")
    which.add_argument("--suite", choices=list(SUITES), help="a named list of tasks")
    add = parser.add_argument
    add("--data", action="append", default=[], metavar="DIR|TASK=PATH", help="local data; repeatable")
    add("--dense", metavar="MODEL", help="run the dense model too, in the same dtype")
    add("--paper", choices=list(PUBLISHED), help="put the paper's numbers of this model beside ours")
    add("--markdown", metavar="FILE", help="also write the table to a file")
