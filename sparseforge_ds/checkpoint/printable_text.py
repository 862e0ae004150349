"""Text from untrusted files, such as names of tensors, as a terminal may get it."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text with escapes for line breaks and for all characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
