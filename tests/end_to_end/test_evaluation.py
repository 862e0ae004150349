"""Perplexity while a run goes on: right, the same on any layout, and without a trace; and the best checkpoint by it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from sparseforge_ds.cli.main import main
from tests.end_to_end.test_resume import LAST, continued, generators, inputs
from tests.end_to_end.test_train import differences, flags_of, states, train
from tests.tiny_folders import byte_tokenizer, deepspeed_json, write_text

WINDOWS = 1100
"""Windows of 32 tokens: two passes and a smaller third, which two ranks cannot divide evenly."""


def held_out(folder: Path, **more: Any) -> list[str]:
    """Flags of an evaluation."""
    path = write_text(folder / "held_out.jsonl", documents=500)
    return [f"--{name}={value}" for name, value in {"eval_dataset": path, "eval_sequences": WINDOWS, **more}.items()]


def scored(run: Path) -> dict[int, float]:
    """Perplexity by step, from the log."""
    log = EventAccumulator(str(run / "tensorboard"))
    log.Reload()
    return {event.step: event.value for event in log.Scalars("eval/perplexity")}


def evaluations(checkpoint: Path) -> dict[str, float]:
    """Return the evaluations that a checkpoint remembers, by step."""
    content = next(content for name, content in states(checkpoint).items() if "model_states" in name)
    return content["train"]["evaluations"]["losses"]


def by_hand(model: Path, text: Path) -> float:
    """Perplexity of a model folder on the windows."""
    lines = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    ids = [number for line in lines for number in [256, *byte_tokenizer()(line)["input_ids"]]]
    window_NS = torch.tensor(ids[: WINDOWS * 32]).view(WINDOWS, 32)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total = 0.0
    with torch.no_grad():
        for window_BS in window_NS.split(50):
            logits_BSV = network(input_ids=window_BS).logits[:, :-1].double()
            total += float(cross_entropy(logits_BSV.flatten(0, 1), window_BS[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (WINDOWS * 31))


def without_evaluations(content: dict[str, Any]) -> dict[str, Any]:
    for part in content.values():
        part.get("train", {}).pop("evaluations", None)
    return content


@pytest.mark.parametrize("stage", [0, 3])
def test_it_leaves_no_trace_and_goes_on_after_an_interruption(tmp_path, stage):
    """Evaluate a model with dropout in steps that curvature listens to: nothing of the training state changes."""
    flags = inputs(tmp_path, stage)
    train(*flags)
    plain = tmp_path / "plain"
    (tmp_path / "run").rename(plain)
    flags += held_out(tmp_path, eval_every=1, eval_sequences=8)
    train(*flags)
    run = tmp_path / "run"
    watched = states(run / "checkpoints" / LAST)
    assert differences(states(plain / "checkpoints" / LAST), without_evaluations(watched)) != [], "evaluations are kept"
    assert differences(without_evaluations(states(plain / "checkpoints" / LAST)), watched) == []
    assert generators(run) == generators(plain)
    scores = scored(run)
    assert list(scores) == list(range(13)) and len(set(scores.values())) > 10
    copy = continued(flags, run, 6)
    assert evaluations(copy / "checkpoints" / LAST) == evaluations(run / "checkpoints" / LAST)
    assert scored(copy) == {step: value for step, value in scores.items() if step > 6}, "step 6 was scored before"


def test_it_is_right_and_the_same_on_any_layout(tmp_path, capsys):
    """Compare the first evaluation with the dense model's, bit by bit, and the last one with the export's."""
    first = []
    for ranks, stage, micro in ((2, 3, 1), (1, 0, 4)):
        run = tmp_path / f"stage_{stage}"
        flags = flags_of(tmp_path, deepspeed_json(stage), output_dir=run, max_steps=6, save_every=0, micro_batch=micro)
        train(*flags, *held_out(tmp_path, eval_every=0), ranks=ranks)
        scores = scored(run)
        assert list(scores) == [0, 6]
        first.append(evaluations(run / "checkpoints" / "step_000006")["0"])
    assert first[0] == first[1]
    assert math.exp(first[0]) == pytest.approx(by_hand(tmp_path / "model", tmp_path / "held_out.jsonl"), rel=1e-6)
    assert main(["consolidate", str(run), str(tmp_path / "out"), "--skip_proof"]) == 0
    record = json.loads((run / "result.json").read_text())["evaluation"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| perplexity, held_out.jsonl | {record['perplexity']:g} (sequences {WINDOWS}, seq_length 32) |" in card
    assert "# model 2:4" in card and str(tmp_path) not in card
    assert record["step"] == 6 and record["sequences"] == WINDOWS
    assert record["perplexity"] == pytest.approx(by_hand(tmp_path / "out", tmp_path / "held_out.jsonl"), rel=1e-6)
    assert (
        f"step 6/6  perplexity {record['perplexity']:.4f} on {tmp_path / 'held_out.jsonl'}" in capsys.readouterr().out
    )


def test_the_best_checkpoint_is_kept_and_can_be_taken(tmp_path):
    """Evaluate on letters in any order, which the model knows the less the more it learns of the text."""
    method = {"update_every": 1, "hardening": [0.1, 0.4]}
    content = deepspeed_json(2, batch=8, max_steps=10, method=method, monitor={"histograms_every": 2})
    content["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}
    flags = flags_of(tmp_path, content, save_every=1, keep_checkpoints=1, learning_rate=3e-2)
    letters = "".join(random.choices("abcdefghijklmnop", k=9000))
    (tmp_path / "letters.txt").write_text(letters)
    train(*flags, f"--eval_dataset={tmp_path / 'letters.txt'}", "--eval_every=0", "--keep_best")
    checkpoints = tmp_path / "run" / "checkpoints"
    best = checkpoints / (checkpoints / "best").read_text()
    losses = {int(step): loss for step, loss in evaluations(checkpoints / "step_000010").items()}
    frozen = {step: loss for step, loss in losses.items() if step >= 4}
    assert best.name == f"step_{min(frozen, key=lambda step: frozen[step]):06d}"
    assert best.name != "step_000010"
    assert {path.name for path in checkpoints.glob("step_*")} == {best.name, "step_000010"}
    assert main(["inspect", str(checkpoints / "best")]) == 0
    assert main(["consolidate", str(checkpoints / "best"), str(tmp_path / "out"), "--skip_proof"]) == 0
    assert json.loads((tmp_path / "out" / "sparsity.json").read_text())["source"]["checkpoint"] == best.name
    log = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"histograms": 0})
    log.Reload()
    histograms = [tag for tag in log.Tags()["histograms"] if tag.startswith("mask/")]
    assert [event.step for event in log.Histograms(histograms[0])] == [2, 4, 6, 8, 10]
    rows = (tmp_path / "csv" / "job" / "eval_perplexity.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(11)), "DeepSpeed's own monitor has it too"
