"""Runs on a text that is tokenised while they go on."""

from __future__ import annotations

import shutil

import pytest

from tests.end_to_end.test_train import differences, flags_of, launch, states, train
from tests.tiny_folders import deepspeed_json
from tests.tiny_streams import texts, write_stream


def stream_flags(folder, **more):
    stream = write_stream(folder / "text", texts(300))
    return flags_of(folder, deepspeed_json(stage=2, batch=8), max_steps=8, save_every=4, dataset=stream.name, **more)


@pytest.mark.parametrize("cache", ["kept", "lost"])
def test_a_resumed_run_on_a_stream_equals_one_in_one_go(tmp_path, cache):
    flags = stream_flags(tmp_path, keep_checkpoints=0)
    train(*flags)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    shutil.rmtree(copy / "checkpoints" / "step_000008")
    (copy / "checkpoints" / "latest").write_text("step_000004")
    if cache == "lost":
        shutil.rmtree(copy / "data")
    train(*(flag for flag in flags if not flag.startswith("--output_dir")), f"--output_dir={copy}", "--resume")
    one, two = (states(run / "checkpoints" / "step_000008") for run in (tmp_path / "run", copy))
    assert one.keys() == two.keys() and len(one) == 3
    assert differences(one, two) == []


def test_a_record_that_cannot_be_read_ends_the_run_with_one_line(tmp_path):
    flags = stream_flags(tmp_path)
    with (tmp_path / "text" / "1.jsonl").open("a") as file:
        file.write('{"text": 3}\n')
    outcome = launch(*flags)
    assert outcome.returncode == 1
    assert outcome.stderr.count("error: --dataset") == 1
    assert "1.jsonl, line 101: field 'text' is int, not text" in outcome.stderr
    assert "Traceback" not in outcome.stderr + outcome.stdout
