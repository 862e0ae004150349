"""A call that breaks off: no rank waits for another on the way out, and nothing goes on from what is half done."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import sparseforge_ds as sf
from tests.distributed import run_distributed
from tests.zero.case import SHORT, Case, build, probe_of, train_step
from tests.zero.test_communication import counted

STAGES = (1, 2, 3)
CURVATURES: dict[str, dict[str, Any]] = {
    "hutchinson of weights": {"importance": "hutchinson", "curvature": {"per_token": False}},
    "hutchinson of outputs": {"importance": "hutchinson"},
    "fisher": {"importance": "fisher"},
    "fisher of elements": {"importance": "fisher", "curvature": {"factored": False}},
    "wanda": {"importance": "wanda"},
}
OUT_OF_TEXT = "the text has come to its end"


class FailingProbe:
    """Probe whose second pass raises on one rank, or on all."""

    def __init__(self, engine: Any, case: Case, calls: list[Any], rank: int | None = None) -> None:
        self._loss = probe_of(engine, case, 0)
        self._calls = calls
        self._rank = rank
        self._passes = 0
        self.before = 0
        """Collectives before the error."""

    def __call__(self) -> Any:
        self._passes += 1
        if self._passes == 2 and self._rank in (None, dist.get_rank()):
            self.before = len(self._calls)
            raise ValueError(OUT_OF_TEXT)
        return self._loss()


class Passes:
    """Batches of two passes."""

    def __init__(self, closure: Any) -> None:
        self._closure = closure

    def passes(self, _batch: int) -> list[Any]:
        return [self._closure, self._closure]


def breaks_off(case: Case, is_gap: bool) -> tuple[list[str], list[str]]:
    """Return the collectives after the error of a probe, and the messages of what is called then."""
    engine, forge = build(case)
    train_step(engine, case, 0)
    with counted() as calls:
        probe = FailingProbe(engine, case, calls)
        with pytest.raises(ValueError, match=OUT_OF_TEXT):
            if is_gap:
                forge.soft_to_hard_gap(probe)
            else:
                forge.step(Passes(probe))
    messages = []
    train_step(engine, case, 1)
    for call in (lambda: forge.step(probe_of(engine, case, 1)), forge.state_dict, forge.finish):
        with pytest.raises(sf.ForgeError) as refused:
            call()
        messages.append(str(refused.value))
    return [name for name, _ in calls[probe.before :]], messages


def all_break_off() -> dict[str, tuple[list[str], list[str]]]:
    results = {}
    for stage in STAGES:
        for name, config in CURVATURES.items():
            results[f"{stage} {name}"] = breaks_off(Case(stage, config={**config, "method": SHORT}), is_gap=False)
        results[f"{stage} gap"] = breaks_off(Case(stage), is_gap=True)
    return results


def test_nothing_is_collective_after_an_error_in_a_probe() -> None:
    for rank in run_distributed(all_break_off, 2):
        for name, (collectives, messages) in rank.items():
            assert collectives == [], name
            call = "forge.soft_to_hard_gap" if name.endswith("gap") else "forge.step"
            assert all(f"{call} broke off" in message and "load_checkpoint" in message for message in messages), name


def fails_on_one_rank(call: str) -> None:
    case = Case(stage=3, config={**CURVATURES["hutchinson of weights"], "method": SHORT})
    engine, forge = build(case)
    train_step(engine, case, 0)
    probe = FailingProbe(engine, case, [], rank=1)
    if call == "step":
        forge.step(Passes(probe))
    forge.soft_to_hard_gap(probe)


@pytest.mark.parametrize("call", ["step", "gap"])
def test_the_error_of_one_rank_ends_all(call: str) -> None:
    with pytest.raises(ValueError, match=OUT_OF_TEXT):
        run_distributed(fails_on_one_rank, 2, call)
