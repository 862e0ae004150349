from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec
from sparseforge_ds.export.writer import parse_size, require_free, unfinished_folder, write_tensors

TENSORS = {
    "matrix": torch.randn(5, 7),
    "half": torch.randn(3).bfloat16(),
    "scalar": torch.tensor(3.5),
    "count": torch.arange(9),
    "empty": torch.zeros(0, 4),
    "flag": torch.tensor([True, False]),
}
SPECS = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in TENSORS.items()}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("limit", [1, 60, 10_000])
def test_safetensors_reads_what_we_write(tmp_path: Path, limit: int, workers: int) -> None:
    write_tensors(tmp_path, "model", SPECS, lambda name: {name: TENSORS[name]}, max_shard_bytes=limit, workers=workers)
    files = sorted(tmp_path.glob("*.safetensors"))
    read = {name: value for file in files for name, value in load_file(file).items()}
    assert set(read) == set(TENSORS)
    for name, value in TENSORS.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value)
    assert (len(files) == 1) == (limit == 10_000) == (not (tmp_path / "model.safetensors.index.json").exists())
    folder = TensorFolder(tmp_path)
    assert folder.shapes == {name: tuple(value.shape) for name, value in TENSORS.items()}
    assert all(torch.equal(folder.read(name), value) for name, value in TENSORS.items())


def test_a_tensor_that_nobody_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="half"):
        write_tensors(tmp_path, "model", SPECS, lambda name: {name: TENSORS[name]}, [*SPECS.keys() - {"half"}])


def test_an_empty_folder_may_be_there_but_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced, this one would be gone under the feet of whoever works in it."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for source in (".", tmp_path / "empty", "../empty"):
        with pytest.raises(ValueError, match="is the folder that this command runs in"):
            require_free(source)
    monkeypatch.chdir(tmp_path)
    with unfinished_folder("empty") as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "empty" / "a").read_text() == "a"


def test_no_export_becomes_a_checkpoint(tmp_path: Path) -> None:
    """Export beside checkpoints, of which a run goes on from the newest `step_*`."""
    run = tmp_path / "run"
    trainer = tmp_path / "trainer"
    for folder in (run / "checkpoints" / "step_000004", trainer / "checkpoint-4", tmp_path / "own"):
        folder.mkdir(parents=True)
    (run / "sparseforge.json").write_text("{}")
    (tmp_path / "own" / "latest").write_text("step_000001")
    for name in ("latest", "trainer_state.json"):
        (trainer / "checkpoint-4" / name).write_text("")
    for out in ("checkpoints/step_000009", "checkpoints/mine", "checkpoints/step_000004/export", "model", "data/out"):
        with pytest.raises(ValueError, match="lies in the folder (checkpoints|model|data) of the run"):
            require_free(run / out)
    for out in (trainer / "checkpoint-9", tmp_path / "own" / "step_000009"):
        with pytest.raises(ValueError, match="would be taken for a checkpoint of those beside it"):
            require_free(out)
    for out in (run / "export", trainer / "export", tmp_path / "own" / "export", tmp_path / "step_000009"):
        require_free(out)


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("20KB", 20_000), ("17", 17), ("1 mb", 10**6)])
def test_sizes_have_units_of_ten(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "5XB", "-1GB", "GB", "\N{SUPERSCRIPT TWO}", "9" * 5000, "1.5GB"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a number of bytes"):
        parse_size(text)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    for process in (ended.pid, os.getpid()):  # a container may give out the same id again
        (tmp_path / f".out.{host}.{process}.tmp").mkdir()
    # So may a machine after a restart: this process began when the folder was no longer written to.
    reused = tmp_path / f".out.{host}.{os.getppid()}.tmp"
    reused.mkdir()
    os.utime(reused, (0, psutil.Process(os.getppid()).create_time() - 2 * 3600))
    require_free(tmp_path / "out")
    other_values = [f".out.{host}.x.tmp", ".out.elsewhere.99999.tmp", f".out2.{host}.99999.tmp"]
    for other in other_values:
        (tmp_path / other).mkdir()
    with unfinished_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*other_values, "out"])
    assert (tmp_path / "out" / "a").read_text() == "a"


def test_of_two_processes_that_write_one_folder_the_later_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    temporary = tmp_path / f".out.{socket.gethostname()}.{os.getppid()}.tmp"
    temporary.mkdir()
    for refuse in (require_free, lambda out: unfinished_folder(out).__enter__()):
        # The clock of a file server may be late.
        for late in (0, 1800):
            os.utime(temporary, (0, psutil.Process(os.getppid()).create_time() - late))
            with pytest.raises(ValueError, match=f"^{out}: process {os.getppid()} writes it at the moment; give "):
                refuse(out)
    temporary.rmdir()
    # The other may also begin at the same time, or be on another machine.
    with (
        pytest.raises(ValueError, match=f"^{out}: another process has written it meanwhile; give another name$"),
        unfinished_folder(out) as folder,
    ):
        (folder / "a").write_text("a")
        out.mkdir()
        (out / "b").write_text("b")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "b"]


def test_a_place_that_allows_no_writing_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    out = tmp_path / "new" / "out"
    with pytest.raises(
        ValueError, match=f"^{out}: cannot be written, {tmp_path} does not allow it; give another place"
    ):
        require_free(out)
    assert asked == [(tmp_path, os.W_OK)]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    of_library = SafetensorError("I/O error: No space left on device (os error 28)")
    for error, raised in ((full, ValueError), (of_library, ValueError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with pytest.raises(raised), unfinished_folder(tmp_path / "new" / "out") as folder:
            (folder / "a").write_text("a")
            raise error
    assert list(tmp_path.iterdir()) == []


def test_errors_name_what_the_folder_is_going_to_be_called(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=f"^{out}: is bad$"), unfinished_folder(out) as folder:
        raise ValueError(f"{folder}: is bad")
    message = f"^{out}: cannot be written .*{out / 'a' / 'b'}"
    with pytest.raises(ValueError, match=message), unfinished_folder(out) as folder:
        (folder / "a" / "b").write_text("no folder for it")


def test_a_file_that_cannot_be_read_is_no_fault_of_the_folder(tmp_path: Path) -> None:
    missing = tmp_path / "source" / "tokenizer.json"
    message = f"^{missing}: No such file or directory; nothing was written$"
    with pytest.raises(ValueError, match=message), unfinished_folder(tmp_path / "out"):
        missing.read_text()
    assert not list(tmp_path.iterdir())
    # A copy that fills the disk names its source first, and is no fault of that.
    message = f"^{tmp_path / 'out'}: cannot be written .*No space left on device"
    with pytest.raises(ValueError, match=message), unfinished_folder(tmp_path / "out") as folder:
        raise OSError(errno.ENOSPC, "No space left on device", str(missing), None, str(folder / missing.name))
