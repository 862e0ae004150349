"""Strict parsing of JSON into frozen dataclasses: an unknown key or a wrong type is a ValueError with its cure."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

MOST = 10**9
"""Most steps, sequences of a batch and tokens of a sequence: no machine reaches the end of more."""
LARGEST_RATE = 1e30
"""Largest learning rate. Its product with another number of an optimizer, over 1 - beta, fits fp32."""
LARGEST = 1e6
"""Largest other number of an optimizer, weight or temperature of a loss, and size of a GPU."""
_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def require(condition: bool, key: str, value: object, cure: str) -> None:
    """Raise ValueError with a key of the `sparseforge` block, its value and the cure, unless `condition` holds."""
    if not condition:
        raise ValueError(f"sparseforge.{key} = {json.dumps(value)} is not valid: {cure}")


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known word that resembles `word` most, whatever the case; None if none is at least so alike."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=likeness)
    return by_lower[matches[0]] if matches else None


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `under` with the values of `over`; objects are merged key by key."""
    merged = dict(under)
    for key, value in over.items():
        both_dicts = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_dicts else value
    return merged


def build(kind: type, block: dict[str, Any], where: str) -> Any:
    """Build a dataclass from a parsed JSON object.

    Args:
        kind: the dataclass.
        block: the object.
        where: dotted path of the object, for messages.

    Raises:
        ValueError: a key is unknown or missing, or a value has the wrong type.
    """
    every_hint = typing.get_type_hints(kind)
    hints = {key_of(item.name): every_hint[item.name] for item in dataclasses.fields(kind)}
    for key in block:
        if key not in hints:
            raise ValueError(f"{where}.{key}: unknown key; did you mean {where}.{_nearest(key, hints)}?")
    for item in dataclasses.fields(kind):
        if key_of(item.name) not in block and item.default is item.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}.{item.name}: missing; it has no default")
    field_of = {key_of(item.name): item.name for item in dataclasses.fields(kind)}
    return kind(**{field_of[key]: convert(value, hints[key], f"{where}.{key}") for key, value in block.items()})


def key_of(field: str) -> str:
    """Return the JSON key of a field: its name, without the `_` behind a word of Python like `from`."""
    return field.rstrip("_")


def dataclass_options(hint: Any) -> list[Any]:
    """Return the dataclasses among the options of a type."""
    return [option for option in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(option)]


def _nearest(key: str, hints: dict[str, Any]) -> str:
    """Return the known key for an unknown one: an equal key of an inner object, else the most similar key."""
    for outer, hint in hints.items():
        if any(key == item.name for kind in dataclass_options(hint) for item in dataclasses.fields(kind)):
            return f"{outer}.{key}"
    return str(nearest(key, hints, likeness=0.0))


def _tagged(value: Any, kinds: list[Any], where: str) -> Any:
    """Build one of several dataclasses, chosen by its `name`; the first without a name."""
    if isinstance(value, tuple(kinds)):
        return value
    block = {"name": value} if isinstance(value, str) else value
    names = [kind.name for kind in kinds]
    if not isinstance(block, dict):
        raise ValueError(f'{where} = {value!r}: expected a name, or an object like {{"name": "{names[0]}"}}')
    name = block.get("name", names[0])
    if name not in names:
        raise ValueError(f"{where} = {name!r} is not valid: use one of {', '.join(names)}")
    for key in block:
        users = [kind.name for kind in kinds if key in {item.name for item in dataclasses.fields(kind)}]
        if users and name not in users:
            raise ValueError(
                f'{where}.{key}: {where.rpartition(".")[2]} "{name}" does not use it, only {", ".join(users)} '
                f"{'does' if len(users) == 1 else 'do'}; leave it out"
            )
    return build(kinds[names.index(name)], block, where)


def convert(value: Any, hint: Any, where: str) -> Any:
    """Return a parsed JSON value as a value of the type `hint`, or raise ValueError."""
    origin = typing.get_origin(hint)
    options = typing.get_args(hint)
    # 1. One of several types.
    if len(kinds := dataclass_options(hint)) > 1:
        return _tagged(value, kinds, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        kinds = [option for option in options if option is not type(None)]
        # Text means one of the names, if there are names; else the first type is meant.
        by_name = isinstance(value, str)
        kind = next((option for option in kinds if (typing.get_origin(option) is Literal) == by_name), kinds[0])
        try:
            return convert(value, kind, where)
        except ValueError as error:
            if type(None) in options and ": expected " in str(error) and str(error).startswith(f"{where} = "):
                raise ValueError(f"{error}, or null") from None
            raise
    if hint is Any:
        return value
    # 2. Objects.
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} = {value!r}: expected an object with keys, like {{}}")
        return {key: convert(item, options[1], f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"{where} = {value!r}: expected an object with keys, like {{}}")
        return build(typing.cast(type, hint), value, where)
    # 3. Choices and lists.
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{where} = {value!r} is not valid: use one of {', '.join(map(str, options))}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} = {value!r}: expected a list")
        if origin is list:
            return [convert(item, options[0], f"{where}[{i}]") for i, item in enumerate(value)]
        if Ellipsis in options:
            return tuple(convert(item, options[0], f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(options):
            raise ValueError(f"{where} = {value!r}: expected {len(options)} values")
        return tuple(convert(item, option, where) for item, option in zip(value, options, strict=True))
    # 4. Numbers, text and switches. JSON writes 1 for 1.0, and Python takes true for 1.
    if hint in (int, float) and isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"{where} = {str(value):.30}...: expected {_KINDS[hint]} of 64 bits at most")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} = {value!r}: expected {_KINDS[hint]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} = {value!r}: expected a finite number")
    return value
