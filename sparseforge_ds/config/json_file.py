"""Reading of JSON files that people write, with errors that name the place and the cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_json_file(path: str | Path, name: str) -> Any:
    """Parse a JSON file, with or without a byte-order mark.

    Args:
        path: the file.
        name: name of the file in messages.

    Raises:
        ValueError: the file cannot be read, is no JSON, has a key twice in one object, or a number that is NaN,
            infinite, or an integer of more than 64 bits.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file; give the path of a JSON file") from None
    except IsADirectoryError:
        raise ValueError(f"{name}: not a readable JSON file (it is a folder); give the file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: not a readable JSON file ({error})") from None
    if not text.strip():
        raise ValueError(f"{name}: not a readable JSON file (it is empty)")
    return parse_json(text, name)


def parse_json(text: str, name: str) -> Any:
    """Parse the text of a JSON file; the errors are those of `parse_json_file`."""
    # Strict JSON, with a hint where people often slip.
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: not a readable JSON file ({error}{_hint(text, error.pos)})") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except RecursionError:
        raise ValueError(f"{name}: not a readable JSON file (it nests too deep)") from None


def keys_of_autos(content: Any, where: str = "") -> list[str]:
    """Return the dotted keys of all values that are "auto"; `where` is the key of `content` itself."""
    if isinstance(content, dict):
        return [
            path for key, value in content.items() for path in keys_of_autos(value, f"{where}.{key}" if where else key)
        ]
    if isinstance(content, list):
        return [path for value in content for path in keys_of_autos(value, where)]
    return [where] if content == "auto" else []


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of some pairs; refuse a key that comes twice, of which the last would silently win."""
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"key {json.dumps(key)} comes twice in one object; keep one of them")
        unique[key] = value
    return unique


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number; write a finite one")


def _integer(digits: str) -> int:
    if len(digits) > 20 or int(digits).bit_length() > 63:
        raise ValueError(f"{digits:.30} is too large; write an integer of 64 bits")
    return int(digits)


def _hint(text: str, position: int) -> str:
    """Return the likely cause of a syntax error at a position, or nothing."""
    before = text[:position].rstrip()
    rest = text[position:].lstrip()
    if before.endswith(",") and rest[:1] in ("}", "]") or rest[:1] == "," and rest[1:].lstrip()[:1] in ("}", "]"):
        return "; no comma may stand before } or ]"
    if rest.startswith(("//", "#", "/*")):
        return "; JSON has no comments"
    return "; strings stand in double quotes" if rest.startswith("'") else ""
