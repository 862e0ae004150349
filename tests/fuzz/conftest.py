"""The counts of the fuzzer, at the end of a test run."""

from __future__ import annotations

import pytest

SUMMARY = pytest.StashKey[str]()
"""Key of the counts, which the test leaves for the end of the test run."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print one line of counts, and a few that divide them."""
    if text := config.stash.get(SUMMARY, None):
        terminalreporter.section("fuzzer")
        terminalreporter.write_line(text)
