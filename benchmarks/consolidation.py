#!/usr/bin/env python3
"""Time and memory of consolidating a sharded checkpoint, against a plain copy of the same files.

python benchmarks/consolidation.py /scratch/consolidation                 # about 3 GB of Qwen3-1.7B layers
python benchmarks/consolidation.py /scratch/consolidation --cold --json consolidation.json
python benchmarks/consolidation.py /scratch/consolidation --layers 8      # about 10 GB

The checkpoint is generated (random numbers in DeepSpeed's ZeRO-3 files) unless FOLDER has it already. Variants take
turns, so that other load on the machine affects all of them; ratios are of medians. Each variant is a process of its
own; the start of Python and its imports do not count. All variants sync their output to disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

GOAL_COPY = 2.0
"""Seconds of a consolidation, in seconds of the copy."""
GOAL_READ = 3.0
"""Seconds of a verification, in seconds of reading the bytes."""
BLOCK = 1 << 20


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Consolidation against a plain copy of the checkpoint's files")
    parser.add_argument("folder", type=Path, help="scratch folder, with room for twice the checkpoint")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size; the rest follows Qwen3-1.7B")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers, 1.2 GB of checkpoint each")
    parser.add_argument("--vocabulary", type=int, default=24576, help="rows of the tied embedding")
    parser.add_argument("--ranks", type=int, default=4, help="world size of the checkpoint")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="threads of consolidate and verify")
    parser.add_argument("--repeats", type=int, default=5, help="times that every variant has its turn")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each turn")
    parser.add_argument("--json", type=Path, help="also write the numbers to a file")
    parser.add_argument("--turn", nargs=4, help=argparse.SUPPRESS)  # one variant, in this process
    arguments = parser.parse_args(argv)
    arguments.folder = arguments.folder.absolute()  # turns run in the checkout
    return arguments


def main() -> int:
    """Generate the checkpoint, run all variants in turns, and print the table."""
    arguments = parse_arguments()
    if arguments.turn:
        print(json.dumps(take_turn(*arguments.turn)))
        return 0
    # The checkpoint, and a model to verify.
    run = generate(arguments)
    checkpoint = next((run / "checkpoints").glob("step_*"))
    sizes = {"checkpoint": folder_bytes(checkpoint)}
    variants = [("copy", 1), *(("consolidate", n) for n in arguments.workers)]
    variants += [("read", 1), *(("verify", n) for n in arguments.workers)]
    turns: dict[tuple[str, int], list[dict[str, float]]] = {variant: [] for variant in variants}
    model = run.with_name(f"model_{run.name}")
    if not model.exists():
        one_turn("consolidate", run, model, 1)
    sizes["model"] = folder_bytes(model)
    # All variants in turns, with the files in the page cache or out of it.
    for _ in range(arguments.repeats):
        for kind, workers in variants:
            source = {"copy": checkpoint, "consolidate": run, "read": model, "verify": model}[kind]
            out = arguments.folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            for file in source.rglob("*"):
                if file.is_file():
                    drop(file) if arguments.cold else read_file(file)
            turns[kind, workers].append(one_turn(kind, source, out, workers))
    shutil.rmtree(arguments.folder / "out", ignore_errors=True)
    report = summary(turns, sizes, arguments.cold)
    print_table(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def generate(arguments: argparse.Namespace) -> Path:
    """Return the run to consolidate, and generate it unless FOLDER has one of the same shape."""
    from transformers import Qwen3Config

    from benchmarks.sharded_checkpoint import write_run

    # Shapes like those of Qwen3-1.7B.
    config = Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 128,
        num_key_value_heads=max(1, arguments.hidden // 256),
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    name = f"run_{arguments.hidden}_{arguments.layers}_{arguments.vocabulary}_{arguments.ranks}"
    run: Path = arguments.folder / name
    # A run appears under its name when it is complete.
    if not run.exists():
        print(f"generating {run}", file=sys.stderr)
        unfinished = arguments.folder / f"{name}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(run.with_name(f"model_{name}"), ignore_errors=True)
        write_run(unfinished, config, arguments.ranks)
        for file in unfinished.rglob("*"):
            if file.is_file():
                drop(file)  # or its way to the disk would slow the first turns
        unfinished.replace(run)
    return run


def one_turn(kind: str, source: Path, out: Path, workers: int) -> dict[str, float]:
    """Run `take_turn` in a process of its own."""
    command = [sys.executable, __file__, str(out.parent), "--turn", kind, str(source), str(out), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def variant(kind: str, source: Path, out: Path, workers: int) -> Callable[[], object]:
    """Return the function to time, after its imports."""
    if kind == "copy":
        return partial(copy, source, out)
    if kind == "read":
        return partial(read_folder, source)
    if kind == "consolidate":
        from sparseforge_ds.export.formats import export
        from sparseforge_ds.export.open import open_source

        return lambda: export(open_source(source), out, workers=workers, skip_proof=True)
    from sparseforge_ds.export.verification import check_folder

    return partial(check_folder, source, workers=workers)


def read_folder(folder: Path) -> None:
    """Read every byte of a folder."""
    for file in folder.rglob("*"):
        if file.is_file():
            read_file(file)


def take_turn(kind: str, source: str, out: str, workers: str) -> dict[str, float]:
    """Run one variant, and return its seconds and memory in bytes: before, peak, and peak without mapped files."""
    work = variant(kind, Path(source), Path(out), int(workers))
    before = memory("VmHWM")
    own = [memory("RssAnon")]
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(own, done), daemon=True)  # an error of the work ends the process
    watcher.start()
    begun = time.perf_counter()
    processor = time.process_time()
    work()
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    return {
        "seconds": seconds,
        "processor": time.process_time() - processor,
        "before": before,
        "peak": memory("VmHWM"),
        "own": max(own),
    }


def watch(own: list[int], done: threading.Event) -> None:
    """Sample this process's own memory, without mapped files."""
    while not done.wait(0.01):
        own.append(memory("RssAnon"))


def memory(key: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024


def copy(source: Path, out: Path) -> None:
    """Copy a folder and sync each file."""
    out.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, out / file.name)
        with open(out / file.name, "rb+") as written:
            os.fsync(written.fileno())


def read_file(path: Path) -> None:
    """Read all bytes into the same block."""
    block = memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def summary(turns: dict[tuple[str, int], list[dict[str, float]]], sizes: dict[str, int], cold: bool) -> dict[str, Any]:
    """Summarize the turns as medians, and their ratios to the copy or to reading."""
    rows = []
    seconds = {key: median(turn["seconds"] for turn in repeats) for key, repeats in turns.items()}
    for (kind, workers), repeats in turns.items():
        bytes_read = sizes["checkpoint" if kind in ("copy", "consolidate") else "model"]
        base = seconds["copy" if kind in ("copy", "consolidate") else "read", 1]
        goal = {"consolidate": GOAL_COPY, "verify": GOAL_READ}.get(kind)
        ratio = seconds[kind, workers] / base
        rows.append(
            {
                "what": kind,
                "workers": workers,
                "seconds": seconds[kind, workers],
                "all_seconds": [turn["seconds"] for turn in repeats],
                "mb_per_second": bytes_read / seconds[kind, workers] / 1e6,
                "ratio": ratio,
                "processor": median(turn["processor"] for turn in repeats),
                "goal": goal,
                "met": None if goal is None else ratio <= goal,
                "before": max(turn["before"] for turn in repeats),
                "peak": max(turn["peak"] for turn in repeats),
                "own": max(turn["own"] for turn in repeats),
            }
        )
    return {"page_cache": "cold" if cold else "warm", "bytes": sizes, "rows": rows}


def print_table(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    sizes = report["bytes"]
    print(
        f"checkpoint {sizes['checkpoint'] / 1e9:.2f} GB, model {sizes['model'] / 1e9:.2f} GB, "
        f"page cache {report['page_cache']}, medians of {len(report['rows'][0]['all_seconds'])}"
    )
    print("what         workers  seconds  processor     MB/s  ratio  goal  peak MB  of it own  before")
    for row in report["rows"]:
        goal = "" if row["goal"] is None else f"{row['goal']:.0f} {'ok' if row['met'] else 'NO'}"
        print(
            f"{row['what']:<12} {row['workers']:>7}  {row['seconds']:>7.2f}  {row['processor']:>9.2f}  "
            f"{row['mb_per_second']:>7.0f}  "
            f"{row['ratio']:>5.2f}  {goal:>4}  {row['peak'] / 1e6:>7.0f}  {row['own'] / 1e6:>9.0f}  "
            f"{row['before'] / 1e6:>6.0f}"
        )


if __name__ == "__main__":
    sys.exit(main())
