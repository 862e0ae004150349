"""The launcher and the `sparseforge` command in processes of their own, watched: seconds and memory."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rank_memory import RankMemory
from sparseforge_ds.train.launcher import free_port

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


@dataclass
class Trained:
    """Times and memory of the launcher and its ranks."""

    step_seconds: list[float]
    losses: list[float]
    seconds: dict[str, float]
    """Seconds of loading with the first step, and of the save at the end."""
    memory: RankMemory
    before: int
    """Own bytes of a rank before it builds anything."""
    allocated: int | None
    """Peak bytes on the GPU of rank 0."""


def train(arguments: argparse.Namespace, folder: Path) -> Trained:
    """Run the launcher.

    Raises:
        CalledProcessError: it failed; `output` ends with what it said.
    """
    launcher = Path(sys.executable).with_name("deepspeed")
    line = [launcher, "--num_gpus", arguments.ranks, "--master_port", str(free_port()), ROOT / "launch" / "train.py"]
    line += ["--deepspeed", folder / "deepspeed.json", "--model", folder / "model", "--dataset", folder / "text.jsonl"]
    line += ["--output_dir", folder / "run", "--seq_length", arguments.seq_length, "--max_steps", arguments.steps]
    line += ["--save_every", 0, "--log_every", 1, "--learning_rate", 1e-5, "--seed", arguments.seed]
    line += ["--activation_checkpointing"] if arguments.activation_checkpointing else []
    threads = max(1, (os.cpu_count() or 1) // arguments.ranks)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    if not arguments.gpu_memory:
        environment["DS_ACCELERATOR"] = "cpu"
    environment["PATH"] = f"{launcher.parent}:{environment['PATH']}"
    words = [str(word) for word in line]
    running = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    memory = RankMemory(running.pid)
    memory.start()
    messages: list[str] = []
    before = 0
    marks = [("start", time.perf_counter())]
    assert running.stdout is not None
    try:
        for text in running.stdout:
            messages.append(text)
            if text.startswith("  output"):  # the last line of the banner
                before = max(memory.last.values(), default=0)
                memory.moment = "load, first step"
                marks.append(("load", time.perf_counter()))
            elif text.startswith(f"step {arguments.steps}/"):
                memory.moment = "save"
                marks.append(("save", time.perf_counter()))
            elif text.startswith("step "):
                memory.moment = text.partition("tokens/s")[2].split()[0]  # the phase
                marks.append(("step", time.perf_counter()))
            elif text.startswith("saved "):
                marks.append(("end", time.perf_counter()))
            if sys.stderr.isatty():
                print(text, end="", file=sys.stderr)
        code = running.wait()
    finally:
        running.terminate()
        memory.stop()
    if code:
        raise subprocess.CalledProcessError(code, words, "".join(messages[-40:]))
    when = dict(reversed(marks))
    log = _scalars(folder / "run" / "tensorboard")
    tokens = arguments.ranks * arguments.micro_batch * arguments.seq_length
    return Trained(
        step_seconds=[tokens / rate for rate in log["train/tokens_per_second"]],
        losses=log["loss/total"],
        seconds={"load": when["step"] - when["load"], "save": when["end"] - when["save"]},
        memory=memory,
        before=before,
        allocated=int(log["train/memory_gib"][-1] * GIB) if arguments.gpu_memory else None,
    )


def _scalars(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    return {tag: [event.value for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def command(*words: str | Path) -> dict[str, float]:
    """Seconds and peak resident bytes of a `sparseforge` subcommand.

    Raises:
        CalledProcessError: it failed.
    """
    line = [sys.executable, "-m", "sparseforge_ds", *map(str, words)]
    begun = time.perf_counter()
    running = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    message = running.stdout.read()
    _, status, usage = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begun
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, line, message)
    return {"seconds": seconds, "peak": usage.ru_maxrss * 1024}
