"""Chat templates: programs that come with a model, run with limits on time, memory and text."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
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
TEMPLATE_SECONDS = 5.0
"""Processor time that a template may take for an empty conversation."""
_CHARACTERS_PER_SECOND = 2**19
"""Characters of the conversation that allow one second more."""
_MEMORY = 2**28
"""Bytes that a template may take for an empty conversation."""
_BYTES_PER_CHARACTER = 2**8
"""Bytes that each character of the conversation allows beside that."""
_TEXT = 2**16
"""Characters that a template may add to any conversation."""
_GROWTH = 16
"""Times that a template may repeat the conversation."""


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
        ValueError: the template fails, or takes more time, memory or text than the messages allow.
    """
    with _limits((messages, tools)) as most_characters:
        schemas = None if tools is None else list(tools)
        with contextlib.nullcontext() if is_today else _fixed_clock(tokenizer.get_chat_template(tools=schemas)):
            text = str(tokenizer.apply_chat_template(list(messages), tools=schemas, tokenize=False, **options))
        _require_short(text, most_characters)
    return text


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
    with _limits((present, tools)) as most_characters, _fixed_clock(template):
        texts, spans = render_jinja_template(
            [present],
            tools=schemas,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        _require_short(texts[0], most_characters)
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


def _require_short(text: str, most_characters: int) -> None:
    if len(text) > most_characters:
        raise ValueError(f"it makes more than {most_characters:,} characters of them")


@contextlib.contextmanager
def _limits(conversation: object) -> Iterator[int]:
    """Limit the processor time and the memory of a template that runs in the block.

    Time is limited in a process's main thread only, in which all templates of ours are run.

    Yields:
        The most characters that the text may have.
    """
    size = len(str(conversation))
    seconds = TEMPLATE_SECONDS + size / _CHARACTERS_PER_SECOND

    def stop(*_: object) -> None:
        raise ValueError(f"it runs for more than {seconds:.2g} s")

    timed = threading.current_thread() is threading.main_thread()
    # The limit of the address space counts what the process has mapped already.
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + _MEMORY + size * _BYTES_PER_CHARACTER
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
        if timed:
            previous_handler = signal.signal(signal.SIGVTALRM, stop)
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield _TEXT + _GROWTH * size
    except (TemplateError, *_FAILURES) as error:
        cause = "it needs too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
        raise ValueError(f"the tokenizer's chat template refuses the conversation ({cause})") from None
    finally:
        # Other code of the process runs under the limits that it had.
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, previous_handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
