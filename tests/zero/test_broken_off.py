"""A call that breaks off: no rank waits for another on the way out, and nothing goes on from what is half done."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
import torch.distributed as dist

import sparseforge_ds as sf
from tests.distributed import run_distributed
from tests.zero.case import MODELS, SHORT, Case, build, build_engine, probe_of, states, train_step
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
OUT_OF_MEMORY = "CUDA out of memory, in AdamW.step"


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


def breaks_off(case: Case, is_gap: bool, folder: str) -> tuple[list[str], list[str], str]:
    """Return the collectives after the error of a probe, the messages of what is called then, and that of a load."""
    engine, forge = build(case)
    engine.save_checkpoint(folder, tag="begin")
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
    attempts = (
        lambda: forge.step(probe_of(engine, case, 1)),
        lambda: forge.soft_to_hard_gap(probe_of(engine, case, 1)),
        forge.state_dict,
        forge.finish,
    )
    collectives = [name for name, _ in calls[probe.before :]]
    for attempt in attempts:
        with pytest.raises(sf.ForgeError) as refused:
            attempt()
        messages.append(str(refused.value))
    # A load goes back, unless the engine holds gradients of the probe.
    try:
        engine.load_checkpoint(folder, tag="begin")
        train_step(engine, case, 0)
        forge.step(probe_of(engine, case, 0))
        loaded = f"step {forge.step_count}"
    except sf.ForgeError as error:
        loaded = str(error)
    return collectives, messages, loaded


def all_break_off(folder: str) -> dict[str, tuple[list[str], list[str], str]]:
    results = {}
    for stage in STAGES:
        for name, config in CURVATURES.items():
            case = Case(stage, config={**config, "method": SHORT})
            results[f"{stage} {name}"] = breaks_off(case, False, f"{folder}/{stage} {name}")
        results[f"{stage} gap"] = breaks_off(Case(stage), True, f"{folder}/{stage} gap")
    return results


def test_nothing_is_collective_after_an_error_in_a_probe(tmp_path: Path) -> None:
    """Nothing goes on from what is half done, either."""
    for rank in run_distributed(all_break_off, 2, str(tmp_path)):
        for name, (collectives, messages, loaded) in rank.items():
            assert collectives == [], name
            holds_gradients = name.endswith("of weights")
            what = "a probe" if holds_gradients else "forge.soft_to_hard_gap" if name.endswith("gap") else "forge.step"
            assert all(f"{what} broke off" in message and "load_checkpoint" in message for message in messages), name
            assert ("make a new engine" in loaded) if holds_gradients else (loaded == "step 1"), (name, loaded)


# -- a mistake that costs nothing -------------------------------------------------------------------------------------


def goes_on_after_mistakes(stage: int, folder: str) -> int:
    """Return the step to which a load goes back, after a method and a probe that were refused."""
    sgd = {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    case = Case(stage, config={**CURVATURES["hutchinson of weights"], "method": SHORT}, more=sgd)
    engine = build_engine(case)
    with pytest.raises(ValueError, match="works on the moments of Adam"):
        sf.SparseForge(engine, sf.SparseForgeConfig.from_dict({"max_steps": 20, "distillation": None, "method": "ast"}))
    forge = sf.SparseForge(engine, case.sparseforge)
    train_step(engine, case, 0)
    forge.step(probe_of(engine, case, 0))
    engine.save_checkpoint(folder)
    train_step(engine, case, 1)
    with pytest.raises(ValueError, match="the probe returned list, not a scalar loss"):
        forge.step(lambda: [probe_of(engine, case, 1)()])
    engine.load_checkpoint(folder)
    return forge.step_count


def all_go_on(folder: str) -> list[int]:
    return [goes_on_after_mistakes(stage, f"{folder}/{stage}") for stage in STAGES]


def test_a_refused_method_and_a_refused_probe_leave_the_engine_as_it_was(tmp_path: Path) -> None:
    assert run_distributed(all_go_on, 2, str(tmp_path)) == [[1, 1, 1]] * 2


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


# -- a start ----------------------------------------------------------------------------------------------------------


def start_twice(case: Case) -> bool:
    """Return whether a start after one whose probe has failed chooses the masks of a first start."""
    masks = []
    for failures in (0, 1):
        engine, forge = build(case)
        for _ in range(failures):
            with pytest.raises(ValueError, match=OUT_OF_TEXT):
                forge.start(Passes(FailingProbe(engine, case, [])))
        forge.start(Passes(probe_of(engine, case, 0)))
        masks.append(states(forge, "mask")["mask"])
    first, second = masks
    return all(torch.equal(mask, second[name]) for name, mask in first.items())


def starts_again() -> tuple[dict[str, bool], str]:
    """Return the results of `start_twice`, and the message of a second start that is refused."""
    stage_of = {"fisher": 1, "wanda": 2, "hutchinson of outputs": 3}
    cases = {
        name: Case(stage, config={**CURVATURES[name], "method": "naive_retrain"}) for name, stage in stage_of.items()
    }
    # An estimate of elements displaces weights.
    engine, forge = build(Case(2, config={**CURVATURES["hutchinson of weights"], "method": "naive_retrain"}))
    with pytest.raises(ValueError, match="the probe returned int, not a scalar loss"):
        forge.start(lambda: 0)
    with pytest.raises(sf.ForgeError) as refused:
        forge.start(probe_of(engine, cases["fisher"], 0))
    return {name: start_twice(case) for name, case in cases.items()}, str(refused.value)


def test_a_start_whose_probe_has_failed_can_be_called_again() -> None:
    """Not where the probe displaces weights."""
    for results, refused in run_distributed(starts_again, 2):
        assert results == dict.fromkeys(results, True)
        assert "forge.start broke off" in refused


# -- the optimizer's step ---------------------------------------------------------------------------------------------


def out_of_memory(*_args: Any) -> None:
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def optimizer_breaks_off(case: Case, folder: str) -> list[str]:
    """Return the messages of a loop that goes on after an error of the optimizer."""
    engine, forge = build(case)
    forge.start(probe_of(engine, case, 0))
    train_step(engine, case, 0)
    forge.step()
    engine.save_checkpoint(folder, tag="good")
    # A loop that lives through the error, and skips the batch.
    inner = engine.basic_optimizer
    inner._init_group = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        train_step(engine, case, 1)
    del inner._init_group
    engine.optimizer.zero_grad()
    engine.zero_grad()
    load = partial(engine.load_checkpoint, folder, tag="good")
    calls = [partial(engine.save_checkpoint, folder, tag="bad"), forge.step, forge.finish, load]
    if case.stage not in (1, 2):  # where DeepSpeed has lost its param groups, and says so in the backward pass
        calls.append(partial(train_step, engine, case, 2))
    messages = []
    for call in calls:
        with pytest.raises(sf.ForgeError) as refused:
            call()
        messages.append(str(refused.value))
    # What the message advises.
    forge.close()
    engine, forge = build(case)
    engine.load_checkpoint(folder, tag="good")
    train_step(engine, case, 1)
    forge.step(probe_of(engine, case, 1))
    assert forge.step_count == 2
    return messages


def optimizers_break_off(cases: dict[str, Case], folder: str) -> dict[str, list[str]]:
    return {name: optimizer_breaks_off(case, f"{folder}/{name}") for name, case in cases.items()}


OPTIMIZERS: dict[str, Case] = {
    **{str(stage): Case(stage, client=True) for stage in (0, 2)},
    "3 in bf16": Case(3, "bf16", client=True, zero={"sub_group_size": 300}),
    "2 offload": Case(2, client=True, zero={"offload_optimizer": {"device": "cpu"}}),
}


def test_a_loop_that_lives_through_an_error_of_its_optimizer_is_told_to_go_back(tmp_path: Path) -> None:
    for rank in run_distributed(optimizers_break_off, 2, OPTIMIZERS, str(tmp_path)):
        for name, messages in rank.items():
            assert all("the last optimizer step broke off" in m and "load_checkpoint" in m for m in messages), name


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
