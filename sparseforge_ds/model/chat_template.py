"""Chat templates: programs that come with a model, whose failures are one error, and whose clock is fixed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.transformers_internals import _compile_jinja_template, render_jinja_template

_NOON = datetime(2024, 7, 26, 12)
"""Time for texts: its day is the one that Llama 3.1's template prints where it cannot ask for the present one."""
TextSpan = tuple[int, int]
"""Index of the first character, and of the one behind the last."""
_FAILURES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError)
"""Errors that expressions of a template raise, as Python code would: 1 / 0, or a macro that calls itself."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    is_today: bool = False,
    **options: Any,
) -> str:
    """Return the text that a tokenizer's chat template makes of messages.

    Args:
        tokenizer: has a chat template.
        messages: the conversation.
        tools: JSON schemas of functions that the assistant may call; None for none.
        is_today: give a template that prints the date the present one. Otherwise it is always the same, so that a text
            has the same tokens on every day.
        **options: passed to `apply_chat_template`.

    Raises:
        ValueError: the template fails.
    """
    with _one_error():
        schemas = None if tools is None else list(tools)
        with contextlib.nullcontext() if is_today else _fixed_clock(tokenizer.get_chat_template(tools=schemas)):
            return str(tokenizer.apply_chat_template(list(messages), tools=schemas, tokenize=False, **options))


def render_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
) -> tuple[list[str], list[TextSpan]]:
    """Return the text of messages, in a list, and the spans of it that the template marks as generated.

    The date is always the same one, as in `render_chat`.

    Raises:
        ValueError: as `render_chat`.
    """
    # Keys that are null are left out, as `apply_chat_template` does it.
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    schemas = None if tools is None else list(tools)
    template = tokenizer.get_chat_template(tools=schemas)
    with _one_error(), _fixed_clock(template):
        texts, spans = render_jinja_template(
            [present],
            tools=schemas,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    return texts, [(int(start), int(stop)) for start, stop in spans[0]]


@contextlib.contextmanager
def _fixed_clock(template: str) -> Iterator[None]:
    """Give a template the clock of `_NOON` in the block; all others keep the real one."""
    # transformers keeps the programs of templates. Each has variables of its own before those that all share.
    variables = _compile_jinja_template(template).globals
    variables["strftime_now"] = _NOON.strftime
    try:
        yield
    finally:
        variables.pop("strftime_now", None)


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Turn any error of a template that runs in the block into a ValueError."""
    try:
        yield
    except (TemplateError, *_FAILURES) as error:
        cause = str(error) or type(error).__name__
        raise ValueError(f"the tokenizer's chat template refuses the conversation ({cause})") from None
