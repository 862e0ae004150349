"""The last lines of a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from sparseforge_ds.train.trainer import _closing_lines


def test_suggested_commands_can_be_pasted() -> None:
    folder = Path("my runs/it's the first")
    lines = _closing_lines(folder, {"steps": 3, "tokens": 384, "seconds": 1.0}, has_tensorboard=True).splitlines()
    assert [shlex.split(line) for line in lines[1:]] == [
        ["tensorboard", "--logdir", str(folder / "tensorboard")],
        ["sparseforge", "consolidate", str(folder), str(folder / "export")],
    ]
    without = _closing_lines(folder, {"steps": 3, "tokens": 384, "seconds": 1.0}, has_tensorboard=False).splitlines()
    assert without == [lines[0], lines[2]], "no log, no command to look at it"
