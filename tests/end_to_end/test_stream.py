"""Runs on a mixture of a stream, which is tokenized while they go on, and a text that is tokenized before."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading

import datasets
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparseforge_ds.data.stream_chunks import ChunkSizes
from tests.distributed import run_distributed
from tests.end_to_end.test_train import differences, flags_of, states
from tests.tiny_folders import deepspeed_json
from tests.tiny_streams import texts, write_stream

STEPS = 10
"""Steps of 8 windows each, 6 of them of the stream, whose first two chunks have 48 windows."""


def small_sizes(seq_length):
    return ChunkSizes(seq_length, 256, 512)


def main_on_small_chunks(command_line, dies_at, stalls=False):
    """Run the launcher's body with chunks of some windows; the tokenizing process ends before it makes a chunk.

    If it `stalls`, it lives on and gives nothing, and rank 0 gets SIGTERM while it waits.
    """
    from sparseforge_ds.data import producer
    from sparseforge_ds.train import open_batches
    from sparseforge_ds.train.trainer import main

    wait = producer.Producer.wait

    def die_or_wait(self, chunk):
        if chunk == dies_at:
            if stalls:
                os.kill(self.process.pid, signal.SIGSTOP)
                threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            else:
                self.close()
            for path in self.spec.folder.glob("chunk_*"):  # what was made ahead
                if int(path.stem[6:]) >= chunk:
                    path.unlink()
        return wait(self, chunk)

    open_batches.ChunkSizes = small_sizes
    producer.Producer.wait = die_or_wait
    return main(command_line)


def train(*flags, dies_at=None, stalls=False, exit_code=0):
    assert run_distributed(main_on_small_chunks, 2, list(flags), dies_at, stalls) == [exit_code] * 2


def write_texts(folder):
    """Write a folder of files and a saved DatasetDict, with more than is read, and a record without text."""
    assert write_stream(folder / "text", texts(300)).name == f"stream:{folder / 'text'}"
    for name in ("test.jsonl", ".0.jsonl"):
        (folder / "text" / name).write_text('{"text": "read"}\n{"text": 4}\n')  # would end the run
    of_split = {"train": [*(f"the saved document {i}" for i in range(200)), None], "validation": ["read"] * 100}
    saved = datasets.DatasetDict({split: datasets.Dataset.from_dict({"text": own}) for split, own in of_split.items()})
    saved.save_to_disk(folder / "saved")


def flags_in(folder, run, **more):
    if not (folder / "text").exists():
        write_texts(folder)
    settings = {"max_steps": STEPS, "save_every": 4, "keep_checkpoints": 0, "log_every": 1, "seq_length": 16, **more}
    flags = flags_of(folder, deepspeed_json(stage=2, batch=8), output_dir=folder / run, **settings)
    flags = [flag for flag in flags if not flag.startswith("--dataset")]
    return [*flags, "--dataset", f"stream:{folder / 'text'}=0.75", f"{folder / 'saved'}=0.25"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Train a run in one go."""
    folder = tmp_path_factory.mktemp("mixture")
    train(*flags_in(folder, "run"))
    return folder


def same_end(straight, run):
    first, second = (states(straight / name / "checkpoints" / f"step_{STEPS:06d}") for name in ("run", run))
    assert first.keys() == second.keys() and len(first) == 3
    assert differences(first, second) == []


def test_the_log_says_what_every_source_gave(straight):
    log = EventAccumulator(str(straight / "run" / "tensorboard")).Reload()
    tags = sorted(tag for tag in log.Tags()["scalars"] if tag.startswith("data/"))
    assert [tag.rpartition("/")[2] for tag in tags] == ["epochs", "tokens", "without_text", "epochs", "tokens"]
    tokens = [{event.step: event.value for event in log.Scalars(tag)} for tag in tags if tag.endswith("tokens")]
    assert [of_source[8] for of_source in tokens] == [0.75 * 16 * 64, 0.25 * 16 * 64]
    assert sum(of_source[STEPS] for of_source in tokens) == 16 * 8 * STEPS


def test_a_resumed_run_equals_one_in_one_go(straight):
    """Also when its texts were copied elsewhere, with other times."""
    copy = straight / "copy"
    shutil.copytree(straight / "run", copy)
    for step in (8, 10):
        shutil.rmtree(copy / "checkpoints" / f"step_{step:06d}")
    for name in ("text", "saved"):
        shutil.copytree(straight / name, straight / "moved" / name, copy_function=shutil.copyfile)
    flags = flags_in(straight, "copy")[:-2]
    train(*flags, f"stream:{straight / 'moved/text'}=0.75", f"{straight / 'moved/saved'}=0.25", "--resume")
    same_end(straight, "copy")


def test_text_that_ends_costs_no_step_and_one_command_starts_and_continues(straight, capfd):
    """Stop, then end the tokenizing process under the ninth step; the run goes on, also without the cache."""
    flags = [*flags_in(straight, "died", save_every=100), "--resume", "auto"]
    train(*flags, dies_at=2, stalls=True, exit_code=143)
    output = capfd.readouterr().out  # a failed rank's stderr is in it
    assert "saved: 200 documents (1 without text were skipped), 4,490 tokens" in output
    assert re.search("text: 3 files of split train: 0.jsonl to 2.jsonl, .* bytes; left out: 1 of split test", output)
    assert re.search("train/data-00000-of-00001.arrow, .* bytes; left out: 1 of split validation", output)
    assert "nothing to resume: there is no run in" in output
    assert "stopped by SIGTERM at step 8; continue with --resume" in output
    saved = [path.name for path in (straight / "died" / "checkpoints").glob("step_*")]
    assert saved == ["step_000008"], "its first two chunks have 48 windows, as many as eight steps need"
    train(*flags, dies_at=2, exit_code=1)
    assert "the process that tokenizes it ended" in capfd.readouterr().out
    shutil.rmtree(straight / "died" / "data")
    train(*flags)
    assert "resumed from" in capfd.readouterr().out
    same_end(straight, "died")


def test_a_record_that_cannot_be_read_ends_the_run_with_one_line(tmp_path, capfd):
    flags = flags_in(tmp_path, "run")
    with (tmp_path / "text" / "1.jsonl").open("a") as file:
        file.write('{"text": 3}\n')
    train(*flags, exit_code=1)
    output = capfd.readouterr().out
    assert output.count("error: ") == 1
    assert "1.jsonl, line 101: field 'text' is int, not text" in output
    assert "Traceback" not in output
