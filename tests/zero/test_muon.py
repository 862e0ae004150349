"""DeepSpeed's Muon: matrices are orthogonalized where masks come first, and everywhere else it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_distributed
from tests.zero.case import MODELS, Case, StepText, batch_at, build, gathered, published, train_step

PARAMS = {"lr": 0.02, "adam_lr": 3e-3, "momentum": 0.9, "betas": [0.9, 0.95], "eps": 1e-8}
STEPS = 10
TOLERANCE = 1e-3
"""Newton-Schulz runs in 16 bits; ten steps move a weight by up to 0.2."""
SAVE = 4
"""Masks move after steps 2, 4 and 6, and freeze after 7."""


def muon(stage: int, zero: dict[str, Any] | None = None, **more: Any) -> Case:
    """Return a case whose matrices Muon trains, but for the head's."""
    config = {"curvature": {"source": "training"}, **more.pop("config", {})}
    if zero is None:
        zero = {"reduce_scatter": False} if stage == 3 else {}
    optimizer = {"type": "Muon", "params": PARAMS}
    return Case(stage=stage, zero=zero, config=config, more={"optimizer": optimizer}, steps=STEPS, **more)


def trained(case: Case, folder: str | None = None, resume: bool = False) -> tuple[dict[str, Tensor], ...]:
    """Masks and weights at the end; a checkpoint in `folder` is written at `SAVE`, or gone on from."""
    engine, forge = build(case)
    forge.start(StepText(engine, case, 0))
    if resume:
        engine.load_checkpoint(folder)
    for step in range(SAVE if resume else 0, case.steps):
        train_step(engine, case, step)
        forge.step(StepText(engine, case, step))
        if folder and not resume and step + 1 == SAVE:
            engine.save_checkpoint(folder)
    masks = gathered(forge, "mask")
    forge.finish()
    return masks, published(engine)


FIXED = {"method": "naive_retrain", "importance": "magnitude", "curvature": {}}


def by_hand(masks: dict[str, Tensor], masks_gradients: bool) -> dict[str, Tensor]:
    """Train kept weights alone: momentum of masked gradients, orthogonalized, and the update masked."""
    from deepspeed.runtime.zero.muon.original_muon import adam_update, muon_update

    case = muon(3, config=FIXED)
    model = MODELS[case.model]()
    weights = dict(model.named_parameters())
    # The masks are fixed, and applied before the first step.
    for name, mask in masks.items():
        weights[name].data.mul_(mask.view_as(weights[name]))
    states: dict[str, list[Tensor]] = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in weights.items()}
    for step in range(case.steps):
        model.zero_grad()
        model(**batch_at(step)).loss.backward()
        for name, weight in weights.items():
            first, second = states[name]
            with torch.no_grad():
                # Matrices under a mask: Muon's update, masked after its orthogonalization.
                if name in masks:
                    mask = masks[name].view_as(weight)
                    gradient = weight.grad * mask if masks_gradients else weight.grad
                    update = muon_update(gradient, first, beta=PARAMS["momentum"])
                    weight.mul_(1 - PARAMS["lr"] * case.weight_decay).sub_(PARAMS["lr"] * update).mul_(mask)
                    continue
                # Everything else: Adam, with its own rate.
                update = adam_update(weight.grad, first, second, step + 1, PARAMS["betas"], PARAMS["eps"])
                decay = case.weight_decay if weight.dim() > 1 else 0.0
                weight.mul_(1 - PARAMS["adam_lr"] * decay).sub_(PARAMS["adam_lr"] * update)
    return {name: weight.detach() for name, weight in weights.items()}


def refusal_of(case: Case) -> str:
    try:
        build(case)
    except ValueError as error:
        return str(error)
    return "no error"


def runs(folder: str, folder_0: str) -> dict[str, Any]:
    torch.compiler.set_stance("force_eager")  # compiling Newton-Schulz takes longer than all of it
    offload = {"reduce_scatter": False, "offload_optimizer": {"device": "cpu"}}
    without_curvature = {"importance": "magnitude", "curvature": {}}
    return {
        "stage 0": trained(muon(0), folder_0),
        "resumed at stage 0": trained(muon(0), folder_0, resume=True),
        "stage 3": trained(muon(3), folder),
        "resumed": trained(muon(3), folder, resume=True),
        "mixture": trained(muon(3, model="qwen3_moe")),
        "probed": trained(muon(3, config={"curvature": {"source": "probe"}})),
        "probed at stage 0": trained(muon(0, config={"curvature": {"source": "probe"}})),
        "fixed": (fixed := trained(muon(3, config=FIXED))),
        "by hand": by_hand(fixed[0], masks_gradients=True),
        "of whole gradients": by_hand(fixed[0], masks_gradients=False),
        "refused": {
            "stage 2": refusal_of(muon(2)),
            "stage 0 in 16 bits": refusal_of(muon(0, dtype="bf16")),
            "offload": refusal_of(muon(3, offload)),
            "elements": refusal_of(muon(3, config={"curvature": {"factored": False}})),
            "sr_ste": refusal_of(muon(3, config={"method": "sr_ste", **without_curvature})),
            "cast": refusal_of(muon(3, config={"method": {"name": "cast", "every": 2}, **without_curvature})),
        },
    }


def moved(folder: str) -> tuple[dict[str, Tensor], ...]:
    torch.compiler.set_stance("force_eager")
    return trained(muon(3), folder, resume=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, folder_0 = (str(tmp_path_factory.mktemp("muon")) for _ in range(2))
    return {**run_distributed(runs, 2, folder, folder_0)[0], "moved": run_distributed(moved, 1, folder)[0]}


def is_sparse(masks: dict[str, Tensor], weights: dict[str, Tensor]) -> bool:
    for name, mask in masks.items():
        kept = mask.view(-1, 4).sum(1)
        if not kept.eq(2).all() or weights[name].view_as(mask)[mask == 0].any():
            return False
    return True


def test_stages_agree_and_end_sparse(results: dict[str, Any]) -> None:
    for stage0, stage3 in (("stage 0", "stage 3"), ("probed at stage 0", "probed")):
        masks, weights = results[stage0]
        other_masks, other_weights = results[stage3]
        assert is_sparse(masks, weights) and is_sparse(other_masks, other_weights)
        for name, mask in masks.items():
            assert torch.equal(other_masks[name], mask), name
        for name, weight in weights.items():
            torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=TOLERANCE)
    assert is_sparse(*results["mixture"])


def test_a_resumed_run_has_the_same_bits(results: dict[str, Any]) -> None:
    for stage, resumed in (("stage 3", "resumed"), ("stage 0", "resumed at stage 0")):
        for name, weight in results[stage][1].items():
            assert torch.equal(results[resumed][1][name], weight), (stage, name)


def test_a_run_moves_to_another_number_of_ranks(results: dict[str, Any]) -> None:
    masks, weights = results["moved"]
    for name, mask in results["stage 3"][0].items():
        assert torch.equal(masks[name], mask), name
    for name, weight in results["stage 3"][1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)


def test_frozen_masks_are_those_of_the_loop_by_hand(results: dict[str, Any]) -> None:
    masks, weights = results["fixed"]
    assert is_sparse(masks, weights)
    for name, weight in results["by hand"].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)
    of_gradients = results["of whole gradients"]
    assert all((of_gradients[name] - weights[name]).abs().max() > 10 * TOLERANCE for name in masks), "another training"


def test_where_it_is_not_exact_it_is_refused(results: dict[str, Any]) -> None:
    refused = results["refused"]
    for name in ("stage 2", "stage 0 in 16 bits", "offload"):
        assert "Muon with masks is known to be exact at ZeRO stage 3, and at stage 0 in fp32" in refused[name], name
        assert "use one of these, or AdamW" in refused[name], name
    assert (
        "takes gradients of weights" in refused["elements"] and "with Muon, which orthogonalizes" in refused["elements"]
    )
    assert 'steps of method "sr_ste" with Muon' in refused["sr_ste"]
    assert 'method "cast" works on the moments of Adam' in refused["cast"]
