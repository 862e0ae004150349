"""The file of `--json`: it is refused before anything is measured, and replaces nothing but a report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparseforge_ds.cli.main import main
from sparseforge_ds.cli.printing import require_json_file, require_writable, write_report
from tests.tiny_folders import write_text


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
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    evaluate = ["evaluate", "model", "--text", str(text), "--json"]
    for command in (
        ["verify", "model", "--json", "model/config.json"],
        ["verify", "model", "--json", "model/report.json"],
        [*evaluate, str(text)],
        [*evaluate, "notes.txt"],
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


def test_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text("{}")
    require_json_file(str(report), ["stdlib:heldout", None])


def test_a_place_that_allows_no_writing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the system, as a disk that is mounted read-only answers it."""
    link = tmp_path / "dangling.json"
    link.symlink_to(tmp_path / "gone" / "report.json")
    with pytest.raises(ValueError, match=f"there is no folder {tmp_path}/gone"):
        require_json_file(str(link))
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    with pytest.raises(ValueError, match=f"--json .*: cannot be written, {tmp_path} does not allow it"):
        require_json_file(str(tmp_path / "report.json"))
    with pytest.raises(ValueError, match="--out new: cannot be written"):
        require_writable(tmp_path / "new" / "folder", "--out new")
    assert asked == [(tmp_path, os.W_OK)] * 2
