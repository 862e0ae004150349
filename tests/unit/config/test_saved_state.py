"""A checkpoint's own block, held against that of the run that resumes it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.saved_state import check_saved_state


def state_of(**block: Any) -> dict[str, Any]:
    saved = SparseForgeConfig.from_dict({"max_steps": 100, **block}).to_dict()
    return {"version": 1, "config": saved, "weights": [], "step": 1, "refreshes": 1}


def run_of(**block: Any) -> SparseForgeConfig:
    return SparseForgeConfig.from_dict({"max_steps": 100, **block})


@pytest.mark.parametrize("block", [{}, {"importance": "hutchinson"}, {"preset": "paper"}, {"method": "ast"}])
def test_a_block_is_read_as_it_was_written(block: dict[str, Any]) -> None:
    config = run_of(**block)
    assert SparseForgeConfig.from_dict(config.to_dict()) == config
    check_saved_state(state_of(**block), config, [])


def test_a_state_of_another_method_is_refused_with_all_that_differs() -> None:
    with pytest.raises(ValueError, match="the checkpoint was made with") as caught:
        check_saved_state(
            state_of(curvature={"factored": False}, schedule={"straight_through": True, "update_every": 5}),
            run_of(),
            [],
        )
    assert re.findall(r"(\S+) = (.*?), this run has (.*?)[;:] ", str(caught.value)) == [
        ("sparseforge.curvature.factored", "False", "True"),
        ("sparseforge.curvature.source", "probe", "training"),
        ("sparseforge.schedule.straight_through", "True", "False"),
        ("sparseforge.schedule.update_every", "5", "1"),
    ]


def test_what_has_no_effect_may_differ() -> None:
    block: dict[str, Any] = {"importance": "magnitude", "schedule": {"hardening": [0, 0]}}
    state = state_of(**block, curvature={"factored": False})
    block["schedule"] = {**block["schedule"], "straight_through": True}
    check_saved_state(state, run_of(**block), [])


def test_a_source_that_is_chosen_is_the_one_that_is_given() -> None:
    check_saved_state(state_of(), run_of(curvature={"source": "training"}), [])
    with pytest.raises(ValueError, match="curvature.source = training, this run has probe"):
        check_saved_state(state_of(), run_of(curvature={"source": "probe"}), [])


def test_monitoring_may_differ() -> None:
    check_saved_state(state_of(), run_of(monitor={"gap_every": 5}), [])
