"""A run is decided by its sequences: equal flags give equal masks on any ranks, micro-batches and ZeRO stages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.data.micro_batch import IGNORED, BatchLayout
from sparseforge_ds.data.windows import CachedWindows
from tests.distributed import run_distributed
from tests.end_to_end.test_train import flags_of, train
from tests.tiny_folders import deepspeed_json

STEPS = 8
"""Masks move after 1 to 5, hardening begins after 2, and the frozen finetune takes the last two."""


def flags(folder: Path, block: dict[str, Any], stage: int, micro: int, run: Path, **more: Any) -> list[str]:
    """Return the flags of a run of 12 sequences a step; `run` is the last."""
    content = deepspeed_json(stage, batch=12, max_steps=STEPS, **block)
    return flags_of(
        folder, content, global_batch=12, micro_batch=micro, save_every=3, keep_checkpoints=0, output_dir=run, **more
    )


def states(run: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """(mask, weight) of every weight at the end, where masks are frozen."""
    checkpoint = Checkpoint(run / "checkpoints" / f"step_{STEPS:06d}")
    results = {}
    for weight in checkpoint.client_state["sparseforge"]["weights"]:
        dense = checkpoint.weight(weight["name"]).flatten()
        results[weight["name"]] = (dense != 0).float(), dense
    return results


def assert_same(run: Path, expected: dict[str, tuple[Tensor, Tensor]], bound: float = 1e-6) -> None:
    saved = states(run)
    assert saved.keys() == expected.keys()
    for name, (mask, dense) in expected.items():
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert (saved[name][0] != mask).sum() == 0, (run.name, name)
        assert (saved[name][1] - dense).abs().max() < bound, (run.name, name)


def taken_back(run: Path, step: int, to: Path) -> Path:
    """Copy a run as it was after `step`."""
    shutil.copytree(run, to)
    for path in (to / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return to


LAYOUTS = [(1, 4, 0), (2, 3, 1), (2, 2, 3), (3, 1, 2), (3, 4, 3)]
"""(ranks, micro-batch, ZeRO stage): 1 to 4 accumulation steps."""


TRAINING = {"curvature": {"source": "training"}}
BLOCKS: dict[str, tuple[dict[str, Any], int]] = {
    "probe": ({"curvature": {"source": "probe"}}, 5),
    "training": (TRAINING, 3),
    # The one mask update, after step 4, reads steps 1 to 4; what is resumed was saved after 3 of them.
    "training-four-steps": ({**TRAINING, "method": {"update_every": 4, "hardening": [0.25, 0.75]}}, 3),
    "hidden states": ({"distillation": {"hidden": {"weight": 4.0, "until": 0.9}}}, 3),
}
"""Blocks, and how many of `LAYOUTS` they are tried on from the first step; what is resumed goes on in the fourth."""


@pytest.mark.parametrize("name", BLOCKS)
def test_any_layout_trains_alike_and_goes_on_in_another(tmp_path: Path, name: str) -> None:
    block, layouts = BLOCKS[name]
    expected = None
    for ranks, micro, stage in LAYOUTS[:layouts]:
        run = tmp_path / f"{ranks}x{micro}-{stage}"
        recomputed = ["--activation_checkpointing"] if stage == 2 else []
        train(*flags(tmp_path, block, stage, micro, run), *recomputed, ranks=ranks)
        expected = states(run) if expected is None else expected
        assert_same(run, expected)
    assert expected is not None
    for start, (ranks, micro, stage) in (("1x4-0", LAYOUTS[3]), ("2x2-3", LAYOUTS[0])):
        run = taken_back(tmp_path / start, 3, tmp_path / f"{start}-to-{ranks}x{micro}-{stage}")
        train(*flags(tmp_path, block, stage, micro, run), "--resume", ranks=ranks)
        assert_same(run, expected)


def divisors(command_line: list[str]) -> list[float | None]:
    """Return the divisors of the losses of each sample of the curvature."""
    from sparseforge_ds.curvature.fisher_sums import FisherSums
    from sparseforge_ds.train.trainer import main

    results: list[float | None] = []
    finish = FisherSums.finish

    def seen(sums: FisherSums) -> Any:
        results.append(sums.divisor)
        return finish(sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FisherSums, "finish", seen)
        assert main(command_line) == 0
    return results


@pytest.mark.parametrize("source", ["training", "probe"])
def test_a_loss_on_completions_is_that_of_the_whole_step(tmp_path: Path, source: str) -> None:
    """Micro-batches have few trained tokens, many or none, and every layout divides a step in another way."""
    block = {"curvature": {"source": source}, "distillation": {"hidden": {"weight": 4.0}}}
    text = tmp_path / "pairs.jsonl"
    lines = ({"prompt": f"What is {i}? " * (i % 12 + 1), "completion": f"{i * i} " * (i % 3)} for i in range(200))
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    completions = {"dataset": text, "loss_on": "completion"}
    expected = None
    from_run = run_distributed(divisors, 1, flags(tmp_path, block, 0, 4, tmp_path / "1x4-0", **completions))[0]
    for ranks, micro, stage in LAYOUTS[:3]:
        run = tmp_path / f"{ranks}x{micro}-{stage}"
        if expected is not None:
            train(*flags(tmp_path, block, stage, micro, run, **completions), ranks=ranks)
        expected = states(run) if expected is None else expected
        assert_same(run, expected)
    assert expected is not None
    (tokens,) = (tmp_path / "1x4-0" / "data").glob("*.bin")
    windows = CachedWindows(np.fromfile(tokens, dtype="uint16,?"), "text", 32, seed=0, at_least=12)
    batches = Batches([windows], [1], BatchLayout(micro_batch=4, accumulation=3, world_size=1, rank=0))
    counts = []
    for _ in range(24):
        counts.append(int((batches.step()[0].label_BS[:, 1:] != IGNORED).sum()))
        batches.advance()
    assert 0 in counts and len(set(counts)) > 5
    of_steps = {max(1, sum(counts[first : first + 3])) / 3 for first in range(0, 24, 3)}
    assert from_run and None not in from_run
    assert {round(item, 6) for item in from_run} <= {round(item, 6) for item in of_steps}

    again = taken_back(tmp_path / "1x4-0", 3, tmp_path / "again")
    train(*flags(tmp_path, block, 3, 3, again, **completions), "--resume", ranks=2)
    assert_same(again, expected)
    # A start reads single sequences, some of them without a trained token.
    started = block | {"start": {"tokens": 640, "epochs": 1, "batch": 1}}
    train(*flags(tmp_path, started, 0, 4, tmp_path / "started", **completions), ranks=1)
    run = tmp_path / "all"
    train(*flags(tmp_path, block, 0, 4, run, dataset=text), ranks=1)
    assert any((dense - expected[name][1]).abs().max() > 1e-3 for name, (_, dense) in states(run).items())


PASSES_OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "fisher of elements": {"curvature": {"factored": False}},
    "fisher of two batches": {"curvature": {"source": "probe", "probes": 2}},
    "wanda of six sequences": {"importance": "wanda", "curvature": {"sequences": 6}},
    # Differences of gradients are rounded: a large step and damping leave the rounding no say.
    "hutchinson": {"importance": "hutchinson", "curvature": {"radius": 0.3, "damping": 0.05}},
    "hutchinson of weights": {
        "importance": "hutchinson",
        "curvature": {"per_token": False, "radius": 0.1, "damping": 0.05},
    },
    "a fixed mask of wanda": {"method": "naive_retrain", "importance": "wanda", "curvature": {"first_probes": 2}},
    "a fixed mask of sparsegpt": {
        "method": "naive_retrain",
        "importance": "sparsegpt",
        "curvature": {"first_probes": 2},
    },
}


@pytest.mark.parametrize("block", PASSES_OF_THEIR_OWN.values(), ids=PASSES_OF_THEIR_OWN)
def test_probes_and_starting_masks_read_sequences(tmp_path: Path, block: dict[str, Any]) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    train(*flags(tmp_path, block, 1, 6, first), ranks=1)
    train(*flags(tmp_path, block, 3, 3, second), ranks=2)
    # The inverse of a matrix magnifies rounding, which decides the way of weights that have next to no gradient.
    assert_same(second, states(first), bound=1e-3 if block.get("importance") == "sparsegpt" else 1e-6)
