"""The command's frame: help, exit codes, and errors in one line."""

from __future__ import annotations

import argparse
import importlib
import os
import pty
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

import sparseforge_ds
from sparseforge_ds.cli import verify
from sparseforge_ds.cli.main import main, parser
from sparseforge_ds.cli.printing import printable
from sparseforge_ds.config import arguments, block_sections
from sparseforge_ds.evaluate import paper_accuracies, perplexity
from sparseforge_ds.export import formats, source
from sparseforge_ds.extras.basis.permutation import channels
from sparseforge_ds.extras.packed24 import compared_models, graph_speed, speed
from sparseforge_ds.packed_format import packed_values
from tests.distributed import PATIENCE

HEAVY = ("torch", "transformers", "deepspeed", "numpy", "safetensors", "tqdm")


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


@pytest.mark.parametrize("name", subcommands())
def test_help_has_an_example_that_parses_and_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert re.search(r"exit code: 0 .*\b2 ", text)
    examples = re.findall(r"^  sparseforge (.*)$", text.split("example", 1)[1], flags=re.MULTILINE)
    assert examples
    for example in examples:
        arguments = shlex.split(example, comments=True)
        assert arguments[0] == name
        assert callable(parser().parse_args(arguments).run)


def options(command: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {flag: action for action in command._actions for flag in action.option_strings}


def test_help_shows_the_choices_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the parsers with what they choose from, which they name without importing it."""
    # What the parsers offer, and where the code keeps the same choices.
    options_of_command = {name: options(command) for name, command in subcommands().items()}
    expected = {
        ("export", "--format"): get_args(formats.Format),
        ("export", "--values"): tuple(packed_values.GRIDS),
        ("export", "--dtype"): ("auto", *source.DTYPES),
        ("consolidate", "--dtype"): ("auto", *source.DTYPES),
        ("generate", "--dtype"): ("auto", *source.DTYPES),
        ("bench", "--dtype"): ("auto", *source.DTYPES),
        ("bench", "--shapes"): graph_speed.SHAPES,
        ("bench", "--engine"): speed.ENGINES,
        ("bench", "--rivals"): compared_models.RIVALS,
        ("permute", "--dimensions"): channels.PARTS,
        ("prune", "--mask"): get_args(block_sections.BlockStartMask),
    }
    expected |= {
        ("evaluate", "--dtype"): ("auto", *source.DTYPES),
        ("evaluate", "--protocol"): get_args(perplexity.Protocol),
        ("evaluate", "--backend"): ("hf", "vllm"),
        ("teach", "--dtype"): ("auto", *source.DTYPES),
        ("teach", "--sample_by"): get_args(arguments.SampleBy),
        ("teach", "--loss_on"): get_args(arguments.LossOn),
        ("teach", "--document_frame"): get_args(arguments.DocumentFrame),
    }
    expected |= {
        ("evaluate", "--suite"): paper_accuracies.SUITES,
        ("evaluate", "--paper"): paper_accuracies.PAPER_ACCURACIES,
    }
    # No flag with choices is missing above, and each shows the words that can be typed.
    with_choices = {
        (name, flag): action
        for name, some in options_of_command.items()
        for flag, action in some.items()
        if action.choices
    }
    assert with_choices.keys() == expected.keys()
    for key, action in with_choices.items():
        assert set(action.choices or ()) == set(expected[key]) and action.metavar is None, key
    # A value that is no choice is refused with the list.
    with pytest.raises(SystemExit):
        main(["export", "run", "out", "--format", "onnx"])
    assert "--format: invalid choice: 'onnx' (choose from" in capsys.readouterr().err


def test_top_level_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert {"consolidate", "verify", "inspect"} <= set(subcommands())
    for name in subcommands():
        assert re.search(rf"^    {name}\b", text, flags=re.MULTILINE)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"sparseforge {sparseforge_ds.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    names = [name for name in subcommands() if name != "train"]  # transformers parses its flags
    code = f"""
import contextlib, io, sys
from sparseforge_ds.cli.main import main
for name in {["", *names]}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([name, "--help"] if name else ["--help"])
print(*sorted(set({HEAVY}) & set(sys.modules)))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == ""


def test_help_of_training_imports_no_deepspeed() -> None:
    trace = [sys.executable, "-X", "importtime", "-m", "sparseforge_ds", "train", "--help"]
    process = subprocess.run(trace, capture_output=True, text=True, check=True)
    assert process.stdout.startswith("usage: sparseforge train --deepspeed JSON [flags]\n")
    imported = {line.split("|")[-1].strip() for line in process.stderr.splitlines()}
    assert "transformers" in imported and not {"torch", "deepspeed"} & imported


def test_flags_of_training_are_its_own() -> None:
    words = ["train", "--deepspeed", "zero3", "--version", "-h", "--", "--allow_dense", "*.a"]
    assert parser().parse_args(words).flags == words[1:]


def test_help_is_there_at_once() -> None:
    """Count processor time, which other work on the machine leaves alone."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "sparseforge_ds", "verify", "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("runs/x: is\n  damaged\x1b[2J"), 2, "error: runs/x: is damaged\\x1b[2J\n"),
        (PermissionError(13, "Permission denied", "runs/x"), 2, "error: runs/x: Permission denied\n"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            2,
            "error: CUDA out of memory; free the GPU's memory, or take a larger GPU\n",
        ),
        (MemoryError(), 2, "error: not enough memory; free some, or take a machine with more memory\n"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            2,
            "error: not enough memory; free some, or take a machine with more memory\n",
        ),
    ],
)
def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(verify, "run", fail)
    assert main(["verify", "models/x"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["train", "--micro_batch", "8"], "lower --micro_batch or --seq_length, give --activation_checkpointing"),
        (["prune", "model", "out", "--text", "a.txt"], "lower --batch or --seq_length, or give --device cpu"),
        (["evaluate", "model", "--text", "a.txt", "--batch_size", "4"], "lower --batch_size"),
    ],
    ids=lambda value: value[0],
)
def test_a_lack_of_memory_names_what_makes_less_of_it_do(
    words: list[str], cure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr(importlib.import_module(f"sparseforge_ds.cli.{words[0]}"), "run", fail)
    assert main(words) == 2
    assert f"error: CUDA out of memory; free the GPU's memory, or {cure}" in capsys.readouterr().err


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise RuntimeError("ours")

    monkeypatch.setattr(verify, "run", fail)
    with pytest.raises(RuntimeError, match="ours"):
        main(["verify", "models/x"])


@pytest.mark.parametrize("arguments", [[], ["verify"], ["conslidate", "a", "b"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "--help shows all flags" in error


def test_a_home_folder_behind_an_equals_sign_is_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["evaluate", "nowhere", "--text", "x.txt", "--json=~/absent/a.json"]) == 2
    error = capsys.readouterr().err
    assert "~" not in error and str(tmp_path / "absent") in error


def test_unprintable_characters_are_escaped() -> None:
    assert printable("Größe 3") == "Größe 3"
    assert printable("a\nb\x1b[0m\ud800") == r"a\x0ab\x1b[0m\xd800"


# As a command does it: ours has disable=None, a library's bar says nothing of it.
BARS = """
from sparseforge_ds.cli.main import set_up_bars
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
