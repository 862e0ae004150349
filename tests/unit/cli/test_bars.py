from __future__ import annotations

import os
import pty
import subprocess
import sys

from tests.distributed import PATIENCE

# As a command does it: ours has disable=None, a library's bar says nothing of it.
BARS = """
from sparseforge_ds.cli.bars import set_up_bars
set_up_bars()
from tqdm import tqdm
for _ in tqdm(range(2), unit=" ours", disable=None): pass
for _ in tqdm(range(2), unit=" theirs"): pass
"""


def test_bars_are_seen_on_a_terminal_without_a_size() -> None:
    """Open a terminal like a container's, on which tqdm draws nothing."""
    ours, reference = pty.openpty()
    assert os.get_terminal_size(reference) == (0, 0)
    subprocess.run([sys.executable, "-c", BARS], stderr=reference, timeout=PATIENCE, check=True)
    os.close(reference)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert b"2/2" in shown and b" ours/s" in shown and b" theirs/s" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # nobody has the other end any more
        return b""


def test_bars_are_silent_in_a_log_file() -> None:
    process = subprocess.run([sys.executable, "-c", BARS], stderr=subprocess.PIPE, timeout=PATIENCE, check=True)
    assert process.stderr == b""
