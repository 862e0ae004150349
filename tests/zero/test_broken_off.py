"""A call that breaks off: no rank waits for another on the way out, and nothing goes on from what is half done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
import torch.distributed as dist

import sparseforge_ds as sf
from sparseforge_ds.sharded_weights import DivergedError
from tests.distributed import run_distributed
from tests.zero.case import MODELS, SHORT, Case, build, probe_of, train_step
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


def loses_a_step(stage: int, folder: str) -> list[str]:
    """Return what is said after a step whose optimizer ran out of memory; the run then goes back and on."""
    case = Case(stage, client=True)
    engine, forge = build(case)
    inner = engine.basic_optimizer
    messages = []

    def train(step: int) -> None:
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))

    for step in range(3):
        train(step)
    engine.save_checkpoint(folder, tag="before")
    with pytest.MonkeyPatch.context() as patch:

        def run_out(*_args: Any, **_kwargs: Any) -> None:
            raise torch.OutOfMemoryError(OUT_OF_TEXT)

        patch.setattr(inner, "_init_group", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            train_step(engine, case, 3)
    engine.optimizer.zero_grad()
    engine.zero_grad()
    for call in (lambda: train_step(engine, case, 4), lambda: engine.save_checkpoint(folder, tag="after")):
        with pytest.raises(RuntimeError) as refused:
            call()
        messages.append(str(refused.value))
    engine.load_checkpoint(folder, tag="before")
    for step in range(3, 6):
        train(step)
    return messages


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_broke_off_is_not_gone_on_from(stage: int, tmp_path: Path) -> None:
    for messages in run_distributed(loses_a_step, 2, stage, str(tmp_path)):
        assert all("the optimizer's step broke off" in message and "load_checkpoint" in message for message in messages)


def attaches_to_nan() -> list[str]:
    """Return what the first check of the weights says; the NaN lies in the part of one rank."""
    messages = []
    for case in (Case(stage=1), Case(stage=3, dtype="bf16")):
        model = MODELS[case.model]()
        model.model.layers[0].mlp.down_proj.weight.data[-1, -1] = torch.nan
        _, forge = build(case, model)
        with pytest.raises(DivergedError) as refused:
            forge.require_finite()
        messages.append(str(refused.value))
    return messages


def test_a_weight_that_is_nan_is_no_other_layout() -> None:
    first, second = run_distributed(attaches_to_nan, 2)
    assert first == second and all("down_proj.weight" in message for message in first), first


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


# -- the loop ---------------------------------------------------------------------------------------------------------


def left_behind(model: Any) -> tuple[Any, ...]:
    """Return what measuring in a training step changes."""
    return (
        torch._dynamo.eval_frame._stance.stance,
        bool(model.model.layers[0].self_attn.q_proj._forward_hooks),
        getattr(model.config, "_experts_implementation", None),
    )


def begins_again(name: str) -> tuple[str, list[bool]]:
    """Return why a second forge is refused, and whether nothing is left behind at four points of two runs."""
    case = Case(stage=2, model=name, config={"method": SHORT, "curvature": {"source": "training", "first_probes": 1}})
    model = sf.prepare(MODELS[name](), case.sparseforge)
    before = left_behind(model)
    engine, forge = build(case, model)
    clean = [left_behind(model) == before]
    # The loop ends here, by an error, and another one begins beside it.
    refused = ""
    try:
        second = build(case, model)[1]
        forge.close()
        clean.append(left_behind(model) == before)
        second.close()
    except ValueError as error:
        refused = str(error)
        clean.append(left_behind(model) == before)
        forge.close()
    forge.close()
    clean.append(left_behind(model) == before)
    train_step(engine, case, 0)
    with pytest.raises(sf.ForgeError, match=r"forge.close was called before step 1"):
        forge.step()
    # A whole run in the same process.
    engine, forge = build(case, model)
    for step in range(5):
        train_step(engine, case, step)
        forge.step()
    forge.finish()
    return refused, [*clean, left_behind(model) == before]


def both_begin_again() -> list[tuple[str, list[bool]]]:
    return [begins_again(name) for name in ("llama", "qwen3_moe")]


def test_another_loop_may_begin_once_a_forge_is_closed() -> None:
    plain, mixture = run_distributed(both_begin_again, 1)[0]
    assert plain[1] == mixture[1] == [False, False, True, True]
    assert plain[0] == "" and "another forge measures in this model; end it by its close()" in mixture[0]
