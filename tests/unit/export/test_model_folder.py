"""The model of a checkpoint that DeepSpeed could have written: workers, kills, damage, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from benchmarks.sharded_checkpoint import write_run
from sparseforge_ds.cli.main import main
from sparseforge_ds.export import formats, writer
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.run_source import RunSource
from sparseforge_ds.export.source import Source
from sparseforge_ds.export.verification import check_folder
from tests.forked_interpreter import run_script

ROOT = Path(__file__).resolve().parents[3]
LAYERS = 6


def model_config(hidden: int = 64, layers: int = LAYERS, vocabulary: int = 96) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    write_run(folder, model_config(), ranks=3)
    return folder


@pytest.fixture(scope="module")
def unbroken(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    consolidate(open_source(run), out, "200KB")
    return content(out)


def consolidate(source: Source, out: Path, max_shard_size: str = "5GB", workers: int = 1) -> None:
    export(source, out, "hf", max_shard_size, workers, skip_proof=True)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Interrupted(Source):
    """A source whose `read` raises at a given call, and writes down what was asked."""

    def __init__(self, source: Source, at: int, error: BaseException) -> None:
        self.__dict__.update(source.__dict__)
        self.source = source
        self.left = at
        self.error = error
        self.asked: list[str] = []
        self.lock = threading.Lock()

    def read(self, name: str) -> Tensor:
        with self.lock:
            self.asked.append(name)
            self.left -= 1
            if self.left < 0:
                raise self.error
        return self.source.read(name)

    def read_branch(self, name: str) -> Tensor:
        return self.source.read_branch(name)

    def check_bytes(self, workers: int | None = None) -> None:
        self.source.check_bytes(workers)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_write_the_same_bytes(
    run: Path, unbroken: dict[str, bytes], tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "consolidate",
        "--skip_proof",
        str(run),
        str(tmp_path / "out"),
        "--max_shard_size",
        "200KB",
        "--workers",
        str(workers),
    ]
    assert main(command) == 0
    assert "42 weights in 2:4" in capsys.readouterr().out
    assert content(tmp_path / "out") == unbroken
    assert len([name for name in unbroken if name.endswith(".safetensors")]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_file_is_shared_by_all_workers(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find all workers inside of `read` at some moment: a single file must not mean a single worker."""
    barrier = threading.Barrier(3, timeout=60)
    original = RunSource.read
    met = threading.Event()

    def read(self: RunSource, name: str) -> Tensor:
        if not met.is_set():
            barrier.wait()
            met.set()
        return original(self, name)

    monkeypatch.setattr(RunSource, "read", read)
    consolidate(open_source(run), tmp_path / "out", workers=3)
    assert met.is_set() and (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("workers", ["0", "-2"])
def test_workers_must_be_positive(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    assert main(["consolidate", "--skip_proof", str(run), str(tmp_path / "out"), "--workers", workers]) == 2
    assert f"error: --workers {workers}: use 1 or more" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_ctrl_c_leaves_nothing(run: Path, tmp_path: Path, workers: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        consolidate(Interrupted(open_source(run), 20, KeyboardInterrupt()), tmp_path / "out", "200KB", workers)
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_nothing(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="such a pity"):
        consolidate(Interrupted(open_source(run), 20, ValueError("such a pity")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_proof_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(source: Source, folder: Path, plain: bool, grid: str | None) -> dict[str, Any]:
        assert check_folder(folder).ok and plain and not (tmp_path / "out").exists()
        raise ValueError("not the same logits")

    monkeypatch.setattr(formats, "prove_folder", prove)
    with pytest.raises(ValueError, match="not the same logits"):
        export(open_source(run), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(formats, "prove_folder", lambda source, folder, plain, grid: {"logits": "equal"})
    export(open_source(run), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "sparsity.json").read_text())["proof"] == {"logits": "equal"}


def test_of_two_that_write_the_same_folder_one_is_refused(
    run: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    records: list[str] = []

    class Slow(Interrupted):
        def read(self, name: str) -> Tensor:
            if not records:
                command = [sys.executable, "-m", "sparseforge_ds", "consolidate", "--skip_proof", str(run)]
                command += [str(tmp_path / "out"), "--max_shard_size", "200KB"]
                process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
                records.append(f"{process.returncode} {process.stderr}")
            return super().read(name)

    consolidate(Slow(open_source(run), 10**6, KeyboardInterrupt()), tmp_path / "out", "200KB")
    (refusal,) = records
    assert refusal.startswith(f"2 error: {tmp_path / 'out'}: process {os.getpid()} writes it at the moment")
    assert content(tmp_path / "out") == unbroken
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_written_wrong_is_found(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_bytes = writer.tensor_bytes

    def lie(tensor: Tensor) -> memoryview:
        content = tensor_bytes(tensor)
        return memoryview(bytes(8) + content[:-8]) if len(content) == 2 * 64 * 128 else content

    monkeypatch.setattr(writer, "tensor_bytes", lie)
    with pytest.raises(ValueError, match="the written folder does not verify"):
        consolidate(open_source(run), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", [0.05, 0.5, 0.95])
def test_a_damaged_checkpoint_is_refused_before_anything_is_read(
    run: Path, tmp_path: Path, where: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(run), str(copy)], check=True)
    file = sorted((copy / "checkpoints").glob("*/*optim_states.pt"))[1]
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= 4
    file.write_bytes(content)
    monkeypatch.setattr(RunSource, "read", lambda self, name: pytest.fail("read"))
    with pytest.raises(ValueError, match=rf"{file.name}: .*(checksum|damaged)"):
        consolidate(open_source(copy), tmp_path / "out", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


_KILLS = """
import os, sys
from pathlib import Path
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source

run, out, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ACTIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.copyfile"}
KILLED = 9

def child(last):
    "Export in a process that ends before its file-system action number `last`; its exit code."
    pid = os.fork()
    if pid == 0:
        done = 0
        def hook(event, _):
            nonlocal done
            if event in ACTIONS:
                done += 1
                if done == last:
                    os._exit(KILLED)
        sys.addaudithook(hook)
        export(open_source(run), out, "hf", "200KB", workers, skip_proof=True)
        out.with_name("actions").write_text(str(done))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

assert child(0) == 0
total = int(out.with_name("actions").read_text())
out.with_name("actions").unlink()
out.rename(out.with_name("first"))
killed = begun = 0
for last in [*range(1, total, total // 10), *range(total - 10, total + 1)]:
    killed += child(last) == KILLED
    begun += any(path.suffix == ".tmp" for path in out.parent.iterdir())
    if out.exists():
        out.rename(out.with_name(f"early{last}"))
assert child(0) == 0
out.with_name("actions").unlink()
print(killed, begun)
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_a_killed_export_leaves_no_half_folder(
    run: Path, unbroken: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    """Whatever has the final name is whole, and the next one that writes it removes what a kill has left."""
    arguments = [str(run), str(tmp_path / "out"), str(workers)]
    done = run_script(_KILLS, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    killed, begun = map(int, done.stdout.split())
    assert killed >= 15 and begun >= 10
    folders = sorted(path for path in tmp_path.iterdir() if path.name != "actions")
    assert {"out", "first"} <= {folder.name for folder in folders}
    for folder in folders:
        assert content(folder) == unbroken, folder.name


_PEAK = """
import sys
from pathlib import Path
import torch
from sparseforge_ds.checkpoint import rank_files
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source

torch.set_num_threads(1)
rank_files.RESIDENT_BYTES = 1 << 20  # what stays mapped is a constant; small here, so that the rest shows
small, medium, out, workers = *map(Path, sys.argv[1:4]), int(sys.argv[4])

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

export(open_source(small), out / "small", workers=workers, skip_proof=True)
before = peak()
export(open_source(medium), out / "medium", workers=workers, skip_proof=True)
print(before, peak())
"""


def test_peak_memory_is_of_a_weight_and_not_of_the_model(run: Path, tmp_path: Path) -> None:
    """Measure the process of three workers, each of which holds one weight."""
    workers = 3
    write_run(tmp_path / "run", model_config(hidden=512, layers=17), ranks=2)
    (tmp_path / "out").mkdir()
    arguments = [str(run), str(tmp_path / "run"), str(tmp_path / "out"), str(workers)]
    # The C library keeps freed buffers of a thread for later, how many differs from run to run. With a fixed threshold
    # it gives every larger buffer back at once, so that the peak is what the export itself holds.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    process = subprocess.run(
        [sys.executable, "-c", _PEAK, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert process.returncode == 0, process.stderr
    before, after = map(int, process.stdout.split())
    checkpoint = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.pt"))
    largest = 4 * 512 * 1024  # in fp32
    allowed = workers * 4 * largest + (32 << 20)
    assert after - before < allowed < checkpoint / 8


def test_generated_checkpoint_is_read_as_generated(run: Path) -> None:
    source = open_source(run)
    assert isinstance(source, RunSource) and source.finished
    name = "model.layers.3.mlp.down_proj.weight"
    weight = source.checkpoint.weight(name)
    assert torch.equal(source.read(name), weight.bfloat16())
