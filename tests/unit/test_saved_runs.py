"""Runs of an earlier release: what they left out of their saved block is read as that release behaved."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from benchmarks.sharded_checkpoint import write_run
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.export.run_source import RunSource
from sparseforge_ds.inspection import inspect
from sparseforge_ds.saved_state import check_saved_state
from sparseforge_ds.train.resume import _open

# What `to_dict` gave before `curvature.factored` and `schedule.straight_through` existed, for three JSON blocks.
DEFAULT: dict[str, Any] = {
    "method": "sparseforge",
    "preset": "default",
    "max_steps": 100,
    "pattern": "2:4",
    "importance": "fisher",
    "threshold": "midpoint",
    "include": [],
    "exclude": [],
    "allow_dense": [],
    "seed": 0,
    "schedule": {
        "update_every": 5,
        "temperature": 1.0,
        "temperature_min": 0.05,
        "temperature_decay": None,
        "blend": [0.0, 0.1],
        "mid_penalty": 0.3,
        "mid_penalty_ramp": [0.0, 0.1],
        "penalty_rate": 0.2,
        "mask_rate": 0.1,
        "hardening": [0.0, 0.3],
        "hard": False,
    },
    "curvature": {
        "decay": 0.9,
        "probes": 1,
        "first_probes": 4,
        "damping": 0.0001,
        "per_token": True,
        "radius": None,
    },
    "low_rank": None,
    "distillation": {"weight": 1.0, "task_weight": 1.0, "temperature": 1.0, "hold": "zero3", "chunk_tokens": 1024},
    "monitor": {"histograms_every": 0, "gap_every": 0},
    "refresh": None,
    "sampling": None,
    "reconstruction": None,
}
PAPER: dict[str, Any] = {
    **DEFAULT,
    "preset": "paper_no_low_rank",
    "importance": "hutchinson",
    "threshold": "nth",
    "schedule": {
        **DEFAULT["schedule"],
        "update_every": 10,
        "temperature_decay": 0.98,
        "blend": [0.1, 0.85],
        "mid_penalty_ramp": [0.0, 0.025],
        "hardening": [0.1, 0.85],
    },
    "curvature": {**DEFAULT["curvature"], "decay": 0.98},
    "distillation": {**DEFAULT["distillation"], "temperature": 2.0},
}
AST: dict[str, Any] = {
    **DEFAULT,
    "method": "ast",
    "importance": "magnitude",
    "curvature": {**DEFAULT["curvature"], "first_probes": 16},
    "distillation": {**DEFAULT["distillation"], "weight": 2 / 3, "task_weight": 1 / 3, "temperature": 2.0},
    "refresh": {"every": 10, "decay": 6e-05, "ramp": [0.0, 0.25], "frozen": 0.0, "scaling": False},
}
WRITTEN_OUT: dict[str, Any] = {
    "max_steps": 100,
    "schedule": {"update_every": 5, "hardening": [0.0, 0.3], "straight_through": True},
    "curvature": {"factored": False},
    "distillation": {"task_weight": 1.0},
}
"""Today's JSON for what DEFAULT did."""


@pytest.mark.parametrize(
    ("saved", "block"),
    [
        (DEFAULT, WRITTEN_OUT),
        (PAPER, {"preset": "paper_no_low_rank", "max_steps": 100}),
        (AST, {"method": "ast", "max_steps": 100}),
        (
            {**DEFAULT, "importance": "hutchinson"},
            {**WRITTEN_OUT, "importance": "hutchinson", "curvature": {"per_token": False}},
        ),
        (  # a mask that never was soft, made without curvature
            {**DEFAULT, "importance": "wanda", "schedule": {**DEFAULT["schedule"], "hardening": [0.0, 0.0]}},
            {
                "max_steps": 100,
                "importance": "wanda",
                "schedule": {"hardening": [0, 0]},
                "distillation": {"task_weight": 1.0},
            },
        ),
        (  # from between the two new keys: null was by elements except for hutchinson
            {**DEFAULT, "curvature": {**DEFAULT["curvature"], "factored": None}},
            WRITTEN_OUT,
        ),
        (
            {**DEFAULT, "importance": "hutchinson", "curvature": {**DEFAULT["curvature"], "factored": None}},
            {**WRITTEN_OUT, "importance": "hutchinson", "curvature": {}},
        ),
        (  # branches that were not there from the start
            {**DEFAULT, "low_rank": {"k": 16, "start": None}},
            {**WRITTEN_OUT, "low_rank": {"k": 16, "shift": False}},
        ),
        ({**AST, "low_rank": {"k": 16, "start": None}}, {"method": "ast", "max_steps": 100, "low_rank": {}}),
    ],
    ids=[
        "default",
        "paper",
        "ast",
        "hutchinson",
        "fixed_wanda",
        "between_fisher",
        "between_hutchinson",
        "slorb",
        "ast_slorb",
    ],
)
def test_an_old_block_is_what_its_run_did(saved: dict[str, Any], block: dict[str, Any]) -> None:
    before = copy.deepcopy(saved)
    config, present = SparseForgeConfig.from_saved(saved), SparseForgeConfig.from_dict(block)
    assert config.comparable() == present.comparable() and saved == before
    assert (config.factored, config.curvature.per_token) == (present.factored, present.curvature.per_token)
    check_saved_state(state_of(saved), present, [])


def test_the_paper_probed_weights_and_moved_them_by_whole_steps() -> None:
    config = SparseForgeConfig.from_saved(PAPER)
    assert (config.curvature.per_token, config.curvature.factored) == (False, False)
    assert config.schedule.straight_through and config.schedule.hardening == (0.1, 0.85)


@pytest.mark.parametrize("block", [{}, {"importance": "hutchinson"}, {"preset": "paper"}, {"method": "ast"}])
def test_a_block_of_this_release_is_left_as_it_is(block: dict[str, Any]) -> None:
    config = SparseForgeConfig.from_dict(block)
    assert SparseForgeConfig.from_saved(config.to_dict()) == config


@pytest.mark.parametrize("key", ["schedule", "curvature", "importance", "method"])
def test_a_damaged_block_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"sparseforge.{key}"):
        SparseForgeConfig.from_saved({**DEFAULT, key: [1]})


def test_a_state_under_other_defaults_is_refused_with_all_that_differs() -> None:
    with pytest.raises(ValueError, match="the checkpoint was made with") as caught:
        check_saved_state(state_of(DEFAULT), SparseForgeConfig(max_steps=100), [])
    assert re.findall(r"(\S+) = (.*?), this run has (.*?)[;:] ", str(caught.value)) == [
        ("sparseforge.curvature.factored", "False", "True"),
        ("sparseforge.distillation.task_weight", "1.0", "0.25"),
        ("sparseforge.schedule.hardening", "[0.0, 0.3]", "[0.0, 0.2]"),
        ("sparseforge.schedule.straight_through", "True", "False"),
        ("sparseforge.schedule.update_every", "5", "1"),
    ]


def test_what_has_no_effect_may_differ() -> None:
    block: dict[str, Any] = {"importance": "magnitude", "schedule": {"hardening": [0, 0]}}
    saved = SparseForgeConfig.from_dict({**block, "curvature": {"factored": False}}).to_dict()
    block["schedule"]["straight_through"] = True
    check_saved_state(state_of(saved), SparseForgeConfig.from_dict(block), [])


def test_monitoring_may_differ() -> None:
    check_saved_state(state_of(DEFAULT), SparseForgeConfig.from_dict({**WRITTEN_OUT, "monitor": {"gap_every": 5}}), [])


def state_of(block: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "config": block, "weights": [], "step": 1, "refreshes": 1}


@pytest.fixture(scope="module")
def paper_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the paper's preset."""
    folder = tmp_path_factory.mktemp("paper") / "run"
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3Config(vocab_size=70, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, **tiny)
    checkpoint = write_run(folder, model, ranks=1)

    def age(content: dict[str, Any]) -> None:
        content["sparseforge"]["config"] = PAPER
        content["train"] = {"data": {}}

    change(checkpoint, age)
    return folder


def change(checkpoint: Path, how: Callable[[dict[str, Any]], None]) -> None:
    file = next(checkpoint.glob("*model_states.pt"))
    content = torch.load(file, weights_only=False)
    how(content)
    torch.save(content, file)


def test_a_finished_paper_run_is_exported_and_inspected(paper_run: Path) -> None:
    source = RunSource(paper_run)
    assert source.finished and source.record["config"]["curvature"]["per_token"] is False
    name = next(iter(source.prunable))
    assert ((source.read(name) != 0).reshape(-1, 4).sum(1) <= 2).all()
    found = inspect(paper_run)
    assert found.contents is not None and found.contents.phase == "finished"
    assert found.contents.masks and all((mask.binary, mask.density) == (1.0, 0.5) for mask in found.contents.masks)


def test_its_checkpoint_is_opened_for_a_run_of_the_same_json_only(paper_run: Path) -> None:
    folder = next((paper_run / "checkpoints").glob("step_*"))
    manifest: Any = SimpleNamespace(folder=folder, world_size=1, stage=3, step=100)
    weights = [SimpleNamespace(name=w.name, shape=w.shape) for w in RunSource(paper_run).prunable.values()]
    config = SparseForgeConfig.from_dict({"preset": "paper_no_low_rank", "max_steps": 100})
    plan: Any = SimpleNamespace(config=config, weights=weights)
    assert _open(plan, manifest).forge_state["step"] == 100
    at_outputs = {"preset": "paper_no_low_rank", "max_steps": 100, "curvature": {"per_token": True, "factored": None}}
    plan.config = SparseForgeConfig.from_dict(at_outputs)
    with pytest.raises(ValueError, match="curvature.factored was false, is true; .*per_token was false, is true"):
        _open(plan, manifest)
