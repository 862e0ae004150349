"""How text from files that are not trusted gets on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text without line breaks and without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
