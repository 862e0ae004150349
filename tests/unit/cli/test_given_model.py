"""Refusal of what is no model by every command, before its tokenizer or its config is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseforge_ds.cli.given_model import require_model
from sparseforge_ds.cli.main import main
from sparseforge_ds.model import registration
from tests.tiny_folders import write_model

COMMANDS = {
    "evaluate": ["--text", "stdlib:heldout"],
    "generate": ["Once upon"],
    "bench": [],
    "verify": [],
    "permute": ["out"],
    "rotate": ["out", "--text", "stdlib:heldout"],
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_name_that_is_no_model(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a run/checkpoints").mkdir(parents=True)
    Path("file").write_text("{}")
    for model, message in (
        ("a run", "error: a run: has no config.json, so it is no model; of a run make one first: sparseforge "),
        ("a run", "sparseforge consolidate 'a run' OUT"),
        ("file", "error: file: is a file; give the folder of a model"),
        ("./mitsyped", "error: ./mitsyped: no such folder"),
        ("models/frist", "error: models/frist: no such folder"),
        ("", "error: MODEL is empty; give the folder of a model"),
    ):
        assert main([command, model, *COMMANDS[command]]) == 2
        output = capsys.readouterr()
        assert message in output.err and output.err.count("\n") == 1 and "tokenizer" not in output.err, output.err


@pytest.mark.parametrize("command", ["prune", "prune --dry_run", "permute", "rotate", "evaluate", "verify", "export"])
def test_every_command_refuses_a_pattern_that_removes_nothing(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = command.split()
    flag = "--one_shot" if name == "evaluate" else "--pattern"
    more += [] if name in ("evaluate", "verify") else [str(tmp_path / "out")]
    more += [] if name in ("verify", "export") else ["--text", "stdlib:heldout"]
    model = str(write_model(tmp_path / "model"))
    capsys.readouterr()
    assert main([name, model, *more, flag, "4:4"]) == 2
    output = capsys.readouterr()
    assert output.err == "error: pattern 4:4 keeps everything; a pattern n:m needs n < m, for example 2:4\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("command", "flag"), [("evaluate", "--dense"), ("bench", "--against")])
def test_a_second_model_is_checked_too(
    tmp_path: Path, command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    more = ["--tasks", "piqa"] if command == "evaluate" else []
    assert main([command, str(tmp_path), flag, str(tmp_path / "none"), *more]) == 2
    assert (
        f"{tmp_path / 'none'}: no such folder or file; give a Hugging Face model folder or a hub id"
        in capsys.readouterr().err
    )


def test_hub_ids_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^owner/name: no such folder, .* \(it is not in the cache, and HF_HUB_"):
        require_model("owner/name")
    asked: list[str] = []
    monkeypatch.setattr(registration, "load_config", lambda name, who: asked.append(name))
    require_model("owner/name")
    assert asked == ["owner/name"]
