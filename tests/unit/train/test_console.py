"""Output of a run in a pipe that other processes share."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from sparseforge_ds.train.console import set_up_console


class Pipe(io.StringIO):
    """Remembers each write by itself, as an unbuffered pipe gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        if text:
            self.writes.append(text)
        return super().write(text)


def test_a_line_and_its_newline_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Pipe())
    monkeypatch.setattr(sys, "stderr", Pipe())
    ours = logging.getLogger("sparseforge_ds")
    monkeypatch.setattr(ours, "handlers", list(ours.handlers))
    level = ours.level
    try:
        set_up_console()
        logging.getLogger("sparseforge_ds.train.trainer").info("stopped")
        logging.getLogger("sparseforge_ds.train.trainer").error("broken")
        logging.getLogger("sparseforge_ds.model").info("a table\nand \x1b[2Jits rows")  # a name of a tensor
    finally:
        ours.setLevel(level)
    assert isinstance(sys.stdout, Pipe) and sys.stdout.writes == ["stopped\n", "a table\nand \\x1b[2Jits rows\n"]
    assert isinstance(sys.stderr, Pipe) and sys.stderr.writes == ["error: broken\n"]
