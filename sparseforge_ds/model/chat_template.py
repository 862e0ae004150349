"""Chat templates: programs that come with a model, run with limits that the size of a conversation sets."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.transformers_internals import render_jinja_template

Span = tuple[int, int]
"""First character, and the one behind the last."""
_FAILURES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError)
"""Errors that expressions of a template raise, as Python code would: 1 / 0, or a macro that calls itself."""
_SECONDS, _CHARACTERS_PER_SECOND = 5.0, 2**19
_MEMORY, _BYTES_PER_CHARACTER = 2**28, 2**8
_TEXT, _GROWTH = 2**16, 16
"""Characters that a template may add to any conversation, and times that it may repeat one."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **how: Any) -> str:
    """Return the text that a tokenizer's chat template makes of messages.

    Args:
        tokenizer: has a chat template.
        messages: the conversation.
        **how: of `apply_chat_template`.

    Raises:
        ValueError: the template fails, or takes more time, memory or text than the messages allow.
    """
    with _limits(messages) as most:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, **how))
        if len(text) > most:
            raise ValueError(f"it makes more than {most:,} characters of them")
    return text


def render_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> tuple[list[str], list[Span]]:
    """Return the text of messages, in a list, and where the turns lie in it that the template marks as generated.

    Raises ValueError as `render_chat`.
    """
    # Without keys that are null, as `apply_chat_template` has it.
    told = [{key: value for key, value in message.items() if value is not None} for message in messages]
    with _limits(told):
        texts, spans = render_jinja_template(
            [told],
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    return texts, [(int(start), int(stop)) for start, stop in spans[0]]


@contextlib.contextmanager
def _limits(messages: Sequence[dict[str, Any]]) -> Iterator[int]:
    """Run a template in the block, with limits on its processor time and memory.

    Time is limited in a process's main thread only, in which all templates of ours are run. Yields the characters that
    the text may have.
    """
    size = len(str(messages))
    seconds = _SECONDS + size / _CHARACTERS_PER_SECOND

    def stop(*_: object) -> None:
        raise ValueError(f"it runs for more than {seconds:.2g} s")

    timed = threading.current_thread() is threading.main_thread()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = mapped + _MEMORY + size * _BYTES_PER_CHARACTER
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
        if timed:
            before = signal.signal(signal.SIGVTALRM, stop)
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield _TEXT + _GROWTH * size
    except (TemplateError, *_FAILURES) as error:
        why = "it needs too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
        raise ValueError(f"the tokenizer's chat template refuses the conversation ({why})") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
