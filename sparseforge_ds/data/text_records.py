"""The document of one record: its text, its prompt and completion, its messages, or its token ids."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

from sparseforge_ds.data.documents import Conversation, Document, PromptAndCompletion
from sparseforge_ds.data.token_documents import parse_token_record

SHAREGPT_CURE = "write from as role (user for human, assistant for gpt) and value as content"
"""Cure for messages that are written as ShareGPT's."""
DEFAULT_FIELD = "text"
"""Field with the text of a record, unless `--text_field` names another."""
TOKEN_FIELDS = ["input_ids", "labels", "attention_mask"]
"""Fields of a record that is tokenized already; the first one is required."""
TOOLS = "tools"
"""Field beside messages with the JSON schemas of functions, as a list, or as text in which columns can hold it."""


def document_from_record(record: object, text_field: str, where: str) -> Document:
    """Return the document of a record, "" where its text is null.

    Args:
        record: an object with fields.
        text_field: see `sparseforge_ds.data.text_formats.iter_documents`.
        where: file and record, for errors.

    Raises:
        ValueError: the record is no object, lacks the fields, or they hold something else than text or messages.
    """
    # 1. Fields by their conventional names.
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not an object with fields, like {{'text': ...}}")
    conventions = present_conventions(list(record), text_field, where)
    with_text = [fields for fields in conventions if any(record[name] is not None for name in fields)]
    filled = [fields for fields in with_text if any(_is_filled(record[name]) for name in fields)]
    fields = next(iter(filled or with_text), conventions[0])
    if fields == TOKEN_FIELDS[:1]:
        return parse_token_record(record, where)
    # Null is no text, or no messages beside others.
    empty: Any = [] if any(isinstance(record[name], list) for name in fields) else ""
    values: list[Any] = [empty if record[name] is None else record[name] for name in fields]
    # 2. Text, or messages.
    if all(isinstance(value, str) for value in values):
        return PromptAndCompletion(*values) if len(values) > 1 else str(values[0])
    if all(map(_is_conversation, values)):
        prompt = len(values[0]) if len(values) > 1 else None
        messages = itertools.chain.from_iterable(values)
        tools = None if TOOLS in fields else _parse_tools(record.get(TOOLS), where)
        return Conversation(tuple(_with_text(message, where) for message in messages), where, prompt, tools)
    # 3. Anything else is an error.
    for name, value in zip(fields, values, strict=True):
        if not isinstance(value, str) and not _is_conversation(value):
            problem = (
                f"is {type(value).__name__}, not text nor a list of messages with a role, and content or tool_calls"
            )
            cure = "make it one of these, or name another field by --text_field"
            if _is_sharegpt(value):
                cure = f"its messages have from and value, as ShareGPT's: {SHAREGPT_CURE}"
            raise ValueError(f"{where}: field {name!r} {problem}; {cure}")
    raise ValueError(
        f"{where}: of prompt and completion one is text and the other a list of messages; make both text, or both "
        "messages"
    )


def _is_filled(value: object) -> bool:
    """Return True for anything but null, an empty list, and text of blanks."""
    return bool(value.strip()) if isinstance(value, str) else value is not None and value != []


def present_conventions(names: Sequence[str], text_field: str, where: str) -> list[list[str]]:
    """Return the fields of every convention of `datasets` whose fields are all among `names`.

    Merged datasets give every record all fields: its text is in the first of these that are not null. A field that the
    user has named is the only one, where it is there.
    """
    conventions = ([text_field], ["messages"], ["prompt", "completion"], TOKEN_FIELDS[:1])
    if present := [fields for fields in conventions if set(fields) <= set(names)]:
        is_named = text_field != DEFAULT_FIELD and present[0] == [text_field]
        return present[:1] if is_named else present
    cure = "name the one that holds the text with --text_field"
    if "conversations" in names:
        cure = f"rename conversations to messages, and {SHAREGPT_CURE}"
    elif {"prompt", "completion"} & set(names):
        cure = "a prompt and a completion need each other; add the missing one"
    raise ValueError(
        f"{where}: no field {text_field!r}, nor messages, nor prompt and completion, nor input_ids; {cure} "
        f"(there are: {', '.join(map(str, names))})"
    )


def _with_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Join the text parts of a message's content, since most chat templates print a list as it is. Keep null."""
    if "content" not in message:
        return message
    content = message["content"]
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(
            f"{where}: the content of a message is {type(content).__name__} with more than text; remove the rest, or "
            "name another field by --text_field"
        )
    return {**message, "content": content}


def _is_sharegpt(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and {"from", "value"} <= message.keys() for message in value
    )


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and ("content" in message or message.get("tool_calls"))
        for message in value
    )


def _parse_tools(value: object, where: str) -> tuple[dict[str, Any], ...] | None:
    """Return the tools of a record, or None for null or none.

    Raises:
        ValueError: they are no list of objects, nor JSON of one.
    """
    with contextlib.suppress(ValueError, RecursionError):  # other text than JSON is refused below
        value = json.loads(value) if isinstance(value, str) else value
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(
            f"{where}: field 'tools' is no list of JSON schemas, nor JSON of one; repair it, or remove the field"
        )
    return tuple(value)
