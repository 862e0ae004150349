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


def evaluation(
    held_out: HeldOut | None = TEXT, method: Any = "sparseforge", block: Any = None, **flags: Any
) -> Evaluation:
    arguments = SimpleNamespace(**{"eval_every": 4, "save_every": 3, "keep_best": False, **flags})
    config = SparseForgeConfig.from_dict({"max_steps": 10, "method": method, **(block or {})})
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
    ("method", "block", "counted"),
    [
        ("sparseforge", {}, {2: 3.0, 8: 2.5}),
        ("sr_ste", {}, {0: 2.0, 2: 3.0, 8: 2.5}),
        ("cast", {}, {}),
        ({"name": "elsa", "frozen": 0.2}, {}, {8: 2.5}),
        ({"name": "pat", "warmup": 0.5}, {}, {8: 2.5}),
        ("sparseforge", {"quantize": {"bits": 4, "from": 0.8}}, {8: 2.5}),
        ({"name": "sr_ste", "frozen": 0.2}, {"quantize": {"bits": 4, "from": "freeze"}}, {8: 2.5}),
    ],
)
def test_a_network_that_is_not_what_is_exported_is_never_the_best(
    method: Any, block: dict[str, Any], counted: dict[int, float]
) -> None:
    """Soft masks, dense weights and weights that are not quantized yet have the lower losses.

    Masks of sparseforge freeze at the second of 10 steps.
    """
    result = evaluation(keep_best=True, method=method, block=block)
    result.losses = {0: 2.0, 2: 3.0, 8: 2.5, 9: float("nan")}
    assert result.ranking() == counted
    assert evaluation(method=method).ranking() is None
