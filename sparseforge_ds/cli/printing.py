"""Output of commands: text from untrusted files on a terminal, and the file of `--json`."""

from __future__ import annotations

from pathlib import Path


def printable(text: str) -> str:
    """Return a text with escapes for line breaks and for all characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def require_json_file(name: str | None) -> None:
    """Reject a file of `--json` that cannot be written, before anything is measured; None passes."""
    if name is None:
        return
    if not Path(name).absolute().parent.is_dir():
        raise ValueError(f"--json {name}: cannot be written, there is no folder {Path(name).parent}")
    if Path(name).is_dir():
        raise ValueError(f"--json {name}: is a folder; give a file")
