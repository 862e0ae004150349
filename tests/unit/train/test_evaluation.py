"""Steps at which a run is scored, and the checkpoint that counts as its best."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.data.held_out import HeldOut
from sparseforge_ds.train.evaluation import Evaluation

TEXT = HeldOut("text.jsonl", np.zeros((4, 8), dtype=np.uint16))


def evaluation(held_out: HeldOut | None = TEXT, method: str = "sparseforge", **flags: Any) -> Evaluation:
    arguments = SimpleNamespace(**{"eval_every": 4, "save_every": 3, "keep_best": False, **flags})
    config = SparseForgeConfig.from_dict({"max_steps": 10, "method": method})
    spec = SimpleNamespace(arguments=arguments, steps=10, config=config)
    return Evaluation(SimpleNamespace(spec=spec), held_out)  # type: ignore[arg-type]


def steps(result: Evaluation) -> list[int]:
    return [step for step in range(11) if result.due(step)]


def test_scores_are_due_at_intervals_and_at_both_ends() -> None:
    assert steps(evaluation()) == [0, 4, 8, 10]
    assert steps(evaluation(eval_every=0)) == [0, 10]
    assert steps(evaluation(eval_every=0, keep_best=True)) == [0, 3, 6, 9, 10]
    assert steps(evaluation(held_out=None)) == []


def test_a_step_is_scored_once_and_a_step_that_a_stop_left_out_is_scored_later() -> None:
    result = evaluation()
    result.load_state_dict({"key": TEXT.key, "losses": {"0": 2.5, "4": 2.0}})
    assert steps(result) == [8, 10]
    assert result.state_dict()["losses"] == {"0": 2.5, "4": 2.0}


def test_scores_of_another_text_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    result = evaluation()
    with caplog.at_level("INFO"):
        result.load_state_dict({"key": "another", "text": "old.jsonl", "losses": {"0": 2.5}})
    assert result.losses == {} and "other text than before (old.jsonl)" in caplog.text
    result.load_state_dict({})
    with pytest.raises(ValueError, match="its evaluations cannot be read"):
        result.load_state_dict({"key": TEXT.key, "losses": {"first": 2.5}})


@pytest.mark.parametrize(
    ("method", "counted"), [("sparseforge", {2: 3.0, 8: 2.5}), ("sr_ste", {0: 2.0, 2: 3.0, 8: 2.5})]
)
def test_soft_masks_are_never_the_best(method: str, counted: dict[int, float]) -> None:
    """Freeze masks of sparseforge at the second of 10 steps."""
    result = evaluation(keep_best=True, method=method)
    result.losses = {0: 2.0, 2: 3.0, 8: 2.5, 9: float("nan")}
    assert result.ranking() == counted
    assert evaluation(method=method).ranking() is None
