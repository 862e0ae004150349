"""The file of `--json`: it is refused before anything is measured, and replaces nothing but a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparseforge_ds.checkpoint.disk import require_writable
from sparseforge_ds.cli.main import main
from sparseforge_ds.cli.printing import require_json_file, write_report
from tests.sparse_folders import write_dense, write_sparse
from tests.tiny_folders import write_model, write_text
from tests.tiny_models import tiny_llama


def test_a_report_replaces_neither_what_is_read_nor_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    text = write_text(tmp_path / "text.json", documents=1)
    notes = Path("notes.txt")
    notes.write_text("mine")
    Path("settings.json").write_text('{\n  "model": "llama"\n}\n')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    evaluate = ["evaluate", "model", "--text", str(text), "--json"]
    for command in (
        ["verify", "model", "--json", "model/config.json"],
        ["verify", "model", "--json", "model/report.json"],
        [*evaluate, str(text)],
        [*evaluate, "notes.txt"],
        [*evaluate, "settings.json"],
    ):
        assert main(command) == 2, command
        assert f"error: --json {command[-1]}: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_report_goes_through_a_pipe_that_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    require_json_file(str(pipe), [str(tmp_path)])
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_report(str(pipe), {"ok": True})
        assert os.read(reader, 100) == b'{\n  "ok": true\n}\n'
    finally:
        os.close(reader)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"] and pipe.is_fifo()


def test_standard_output_in_a_file_gets_the_report_behind_the_table(tmp_path: Path) -> None:
    """Run the command as a shell does with `> FILE`, where /dev/stdout is a regular file; it must stay a link."""
    tiny_llama().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "sparseforge_ds", "verify", str(tmp_path / "model"), "--json", "/dev/stdout"]
    with (tmp_path / "out.txt").open("w") as output:
        assert subprocess.run(command, stdout=output, check=False).returncode == 1
    printed = (tmp_path / "out.txt").read_text()
    assert printed.index("NOT OK") < printed.index('"ok": false')
    assert Path("/dev/stdout").is_symlink()
    # What is printed later stands behind it.
    script = "from sparseforge_ds.cli.printing import write_report\nwrite_report('/dev/stdout', {})\nprint('last')\n"
    with (tmp_path / "out.txt").open("w") as output:
        assert subprocess.run([sys.executable, "-c", script], stdout=output, check=False).returncode == 0
    assert (tmp_path / "out.txt").read_text() == "{}\nlast\n"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_a_file_in_shared_memory_is_a_file_like_any_other() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights = Path(folder, "model.safetensors")
        weights.write_bytes(b"weights")
        with pytest.raises(ValueError, match="is there already, and is no report"):
            require_json_file(str(weights))
        report = Path(folder, "report.json")
        for count in (1, 2):
            write_report(str(report), {"count": count})
        assert json.loads(report.read_text()) == {"count": 2}


def test_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for content in ("", json.dumps({"ok": True, "pattern": "2:4", "violations": 0})):
        report.write_text(content)
        require_json_file(str(report), ["stdlib:heldout", None])
    # A report of any name, through a link: the link stays, and its target is written.
    link = tmp_path / "latest"
    link.symlink_to(report)
    require_json_file(str(link))
    write_report(str(link), {"ok": False})
    assert link.is_symlink() and report.read_text() == '{\n  "ok": false\n}\n'


def test_a_place_that_allows_no_writing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the system, as a disk that is mounted read-only answers it."""
    link = tmp_path / "dangling.json"
    link.symlink_to(tmp_path / "gone" / "report.json")
    with pytest.raises(ValueError, match=f"there is no folder {tmp_path}/gone"):
        require_json_file(str(link))
    for below in ("", "x"):
        with pytest.raises(ValueError, match="--out old: .*test_printing.py is a file; give another place"):
            require_writable(Path(__file__) / below, "--out old")
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    with pytest.raises(ValueError, match=f"--json .*: cannot be written, {tmp_path} does not allow it"):
        require_json_file(str(tmp_path / "report.json"))
    assert asked == [(tmp_path, os.W_OK)]


_HOSTILE = "\x1b[2Jgone\nOK\n"
"""Part of a tensor's name that clears a terminal, and prints a line of its own."""


def test_names_of_tensors_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Weights of an unknown family: one in the pattern, one out of it, one that no weight is stored as.
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "unheard_of"}')
    sparse = torch.randn(8, 4, 4) * torch.tensor([1.0, 1.0, 0.0, 0.0])
    tensors = {
        f"layers.0.{_HOSTILE}.weight": sparse.view(8, 16),
        f"layers.1.{_HOSTILE}.weight": torch.full((8, 16), torch.nan),
        f"layers.2.{_HOSTILE}.weight": torch.ones(8, 16, dtype=torch.int8),
    }
    save_file(tensors, unknown / "model.safetensors")
    # Tensors that transformers does not load.
    folders = {"made": write_sparse(tmp_path / "made", write_dense(tmp_path / "dense", "llama"), "llama")}
    (folders["made"] / "sparsity.json").unlink()
    folders["own"] = write_model(tmp_path / "own", tiny_llama())
    for folder in folders.values():
        stored = load_file(folder / "model.safetensors")
        save_file({**stored, f"mtp.{_HOSTILE}": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    for command, code in (
        (["verify", str(unknown)], 1),
        (["verify", str(folders["made"])], 0),
        (["export", str(folders["made"]), str(tmp_path / "out"), "--skip_proof"], 0),
        (["permute", str(folders["own"]), str(tmp_path / "permuted")], 0),
    ):
        assert main(command) == code, command
        output = capsys.readouterr()
        printed = output.out + output.err
        assert "\\x1b[2Jgone\\x0aOK\\x0a" in printed and "\x1b" not in printed, command
        assert printed.splitlines().count("OK") == (command == ["verify", str(folders["made"])]), command


def test_the_worst_rounded_weight_is_named_with_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "unheard_of", "dtype": "float32"}')
    sparse = torch.randn(8, 8, 4) * torch.tensor([1.0, 1.0, 0.0, 0.0])
    save_file({f"layers.0.{_HOSTILE}.weight": sparse.view(8, 32)}, unknown / "model.safetensors")
    rounding = ["--format", "packed24", "--values", "int8", "--skip_proof"]
    for command in (["export", str(unknown), str(tmp_path / "out"), *rounding], ["verify", str(tmp_path / "out")]):
        assert main(command) == 0
        output = capsys.readouterr().out
        assert "\\x1b[2Jgone\\x0aOK\\x0a.weight)" in output and "\x1b" not in output
