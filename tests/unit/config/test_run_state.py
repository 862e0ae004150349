"""Comparison of the run in a checkpoint with the run that resumes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.run_state import RunState, SparseWeight, differences

WEIGHTS = [SparseWeight("a.weight", (8, 16), -1), SparseWeight("b.weight", (16, 4), -2)]


def run_of(**block: Any) -> RunState:
    return RunState.from_weights(SparseForgeConfig.from_dict({"max_steps": 100, **block}), WEIGHTS)


def saved(**block: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(run_of(**block).to_dict()))
    return {**state, "step": 3, "refreshes": 1, "param_groups": [["a.weight"]]}


@pytest.mark.parametrize("block", [{}, {"importance": "hutchinson"}, {"preset": "paper_like"}, {"method": "ast"}])
def test_a_state_is_read_as_it_was_written(block: dict[str, Any]) -> None:
    run = run_of(**block)
    result = RunState.parse(saved(**block), "here")
    assert result == RunState(run.config, tuple(WEIGHTS), 3, 1)
    assert result.changes(run) == []


def test_all_that_differs_is_named() -> None:
    block = {"curvature": {"factored": False}, "method": {"straight_through": True, "update_every": 5}}
    assert RunState.parse(saved(**block), "here").changes(run_of()) == [
        "sparseforge.curvature.factored was false, is true",
        'sparseforge.curvature.source was "probe", is "training"',
        "sparseforge.method.straight_through was true, is false",
        "sparseforge.method.update_every was 5, is 1",
    ]


def test_settings_without_effect_may_differ() -> None:
    block: dict[str, Any] = {"importance": "magnitude", "method": {"hardening": [0, 0]}}
    result = RunState.parse(saved(**block, curvature={"factored": False}), "here")
    block["method"] = {**block["method"], "straight_through": True}
    assert result.changes(run_of(**block)) == []


def test_a_source_that_is_chosen_is_the_one_that_is_given() -> None:
    result = RunState.parse(saved(), "here")
    assert result.changes(run_of(curvature={"source": "training"})) == []
    changed = ['sparseforge.curvature.source was "training", is "probe"']
    assert result.changes(run_of(curvature={"source": "probe"})) == changed


def test_what_cannot_change_the_result_may_differ() -> None:
    for block in (
        {"monitor": {"gap_every": 5}},
        {"distillation": {"hold": "replicated"}},
        {"allow_dense": ["vision.*"]},
    ):
        assert RunState.parse(saved(), "here").changes(run_of(**block)) == []


def test_other_weights_are_another_run() -> None:
    now = RunState(run_of().config, (WEIGHTS[0], SparseWeight("b.weight", (16, 4), -1)))
    assert run_of().changes(now) == ["weights.b.weight was [[16, 4], -2], is [[16, 4], -1]"]
    assert run_of().changes(RunState(now.config, now.weights[:1])) == ["weights.b.weight was [[16, 4], -2], is null"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, "was not saved by SparseForge: engine.save_checkpoint saves its state once"),
        (lambda state: {**state, "version": 3}, "state version 3, this is 4: use the release that wrote it"),
        (lambda state: {key: value for key, value in state.items() if key != "version"}, "state version None"),
        (lambda state: {**state, "config": [1]}, r"damaged config: \[1\]"),
        (lambda state: {**state, "config": {"pattern": "2:x"}}, "damaged config: .*2:x"),
        (lambda state: {**state, "weights": None}, "damaged weights: None"),
        (lambda state: {**state, "step": -1}, "damaged step: -1"),
        (lambda state: {**state, "step": True}, "damaged step: True"),
        (lambda state: {**state, "refreshes": "1"}, "damaged refreshes: '1'"),
        (lambda state: {**state, "weights": [3]}, "lists a damaged weight, 3"),
        (lambda state: {**state, "weights": [{**state["weights"][0], "input_axis": 1}]}, "lists a damaged weight"),
        (lambda state: {**state, "weights": [{**state["weights"][0], "shape": [8, 0]}]}, "lists a damaged weight"),
        (lambda state: {**state, "weights": [{**state["weights"][0], "shape": [8]}]}, "lists a damaged weight"),
        (lambda state: {**state, "weights": [{**state["weights"][0], "shape": [8, 6]}]}, "a.weight cannot be 2:4"),
        (lambda state: {**state, "weights": state["weights"] * 2}, "lists a weight twice"),
    ],
)
def test_damage_is_named(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^runs/a.*{message}"):
        RunState.parse(change(saved()), "runs/a")


def test_shapes_are_held_against_the_checkpoint() -> None:
    run_of().check_shapes({"a.weight": (8, 16), "b.weight": (16, 4), "c": (3,)}, "here")
    for shapes, message in (({}, "a.weight is missing"), ({"a.weight": (8, 4)}, r"a.weight is \(8, 4\)")):
        with pytest.raises(ValueError, match=f"here: {message}, its sparseforge state says .8, 16."):
            run_of().check_shapes(shapes, "here")


def test_differences_of_nested_dicts_are_named() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": [2]}}, "x") == [
        "x.a.c was 2, is null",
        "x.a.d was null, is [2]",
    ]


def test_a_long_value_that_is_cut_ends_in_dots() -> None:
    (line,) = differences({"start": {"tokens": "1" * 100}}, {"start": None}, "x")
    assert line == f"""x.start was {{"tokens": "{"1" * 65}..., is null"""
