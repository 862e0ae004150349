"""The last lines of a run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
import torch._inductor.config

from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.train.trainer import closing_lines, require_compiler


def test_suggested_commands_can_be_pasted() -> None:
    folder = Path("my runs/it's the first")
    lines = closing_lines(folder, {"steps": 3, "tokens": 384, "seconds": 1.0}, has_tensorboard=True).splitlines()
    assert [shlex.split(line) for line in lines[1:]] == [
        ["tensorboard", "--logdir", str(folder / "tensorboard")],
        ["sparseforge", "consolidate", str(folder), str(folder / "export")],
    ]
    without = closing_lines(folder, {"steps": 3, "tokens": 384, "seconds": 1.0}, has_tensorboard=False).splitlines()
    assert without == [lines[0], lines[2]], "no log, no command to look at it"


CPU = torch.device("cpu")


def test_a_compiler_that_fails_is_told_in_one_line() -> None:
    require_compiler(CPU)  # nothing is compiled there
    torch._dynamo.reset()
    without = {"force_disable_caches": True, "cpp.cxx": ("/nowhere/g++",)}
    with (
        fusing.compiled(True),
        torch._inductor.config.patch(without),
        pytest.raises(
            ValueError, match="torch.compile does not work for cpu on this machine .*apt install g"
        ) as refusal,
    ):
        require_compiler(CPU)
    assert "\n" not in str(refusal.value) and "/nowhere/g++" in str(refusal.value)
    torch._dynamo.reset()
    with fusing.compiled(True):
        require_compiler(CPU)
