"""The last lines of a run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
import torch._inductor.config

from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.train import trainer
from sparseforge_ds.train.trainer import closing_lines, main, require_compiler
from tests.tiny_folders import deepspeed_json, write_json, write_model


def test_suggested_commands_can_be_pasted() -> None:
    folder = Path("my runs/it's the first")
    lines = closing_lines(folder, {"steps": 3, "tokens": 384, "seconds": 1.0}, has_tensorboard=True).splitlines()
    assert [shlex.split(line) for line in lines[1:]] == [
        ["curves:", "tensorboard", "--logdir", str(folder / "tensorboard")],
        ["next:", "sparseforge", "consolidate", str(folder), str(folder / "export")],
    ]
    without = closing_lines(folder, {"steps": 3, "tokens": 384, "seconds": 1.0}, has_tensorboard=False).splitlines()
    assert without == [lines[0], lines[2]], "no log, no command to look at it"


def test_a_mistake_is_found_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Connecting the processes compiles for minutes on a machine without a GPU."""
    monkeypatch.setattr(trainer.deepspeed, "init_distributed", lambda: pytest.fail("the processes were connected"))
    monkeypatch.setattr(trainer, "clear_before_training", lambda: pytest.fail("a lock was waited for"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    flags = {
        "deepspeed": write_json(tmp_path / "ds.json", deepspeed_json(1)),
        "model": write_model(tmp_path / "model"),
        "dataset": tmp_path / "nope.jsonl",
        "output_dir": tmp_path / "run",
        "seq_length": 32,
    }
    assert main([f"--{name}={value}" for name, value in flags.items()]) == 1
    printed = capsys.readouterr()
    assert f"--dataset {tmp_path / 'nope.jsonl'}: no such file" in printed.out + printed.err
    assert not (tmp_path / "run").exists()


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
