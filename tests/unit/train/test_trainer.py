"""What a run says at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

from sparseforge_ds.train.trainer import _farewell


def test_suggested_commands_can_be_pasted() -> None:
    folder = Path("my runs/it's the first")
    said = _farewell(folder, {"steps": 3, "tokens": 384, "seconds": 1.0}, logged=True).splitlines()
    assert [shlex.split(line) for line in said[1:]] == [
        ["tensorboard", "--logdir", str(folder / "tensorboard")],
        ["sparseforge", "consolidate", str(folder), str(folder / "export")],
    ]
    without = _farewell(folder, {"steps": 3, "tokens": 384, "seconds": 1.0}, logged=False).splitlines()
    assert without == [said[0], said[2]], "no log, no command to look at it"
