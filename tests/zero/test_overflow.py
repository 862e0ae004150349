"""Overflow: a training step that DeepSpeed skips is no step of ours, and a probe that is not finite changes nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from sparseforge_ds.forge import ForgeError
from tests.distributed import run_distributed
from tests.zero.case import Case, batch_at, build, gathered, my_part, published, train_step

STAGES = [1, 2, 3]  # stage 0 has no loss scaling and is refused with one


def fp16(stage: int, importance: str = "fisher", **scale: Any) -> Case:
    return Case(stage=stage, dtype="fp16", config={"importance": importance}, more={"fp16": scale})


def overflow_in_training(stage: int, source: str) -> dict[str, Any]:
    """Train with a first loss scale that is far too large, so that DeepSpeed skips steps until it has come down."""
    case = fp16(stage, initial_scale_power=32, hysteresis=1, loss_scale_window=1000)
    case = dataclasses.replace(case, config={"curvature": {"source": source}})
    engine, forge = build(case)
    records = []
    for step in range(40):
        before = published(engine)
        engine.backward(engine(**my_part(batch_at(step))).loss)
        engine.step()
        skipped = engine.skipped_steps
        count = forge.step_count
        updated = forge.step(lambda step=step: engine(**my_part(batch_at(step))).loss)
        same = all(torch.equal(value, before[name]) for name, value in published(engine).items())
        records.append((skipped, count, forge.step_count, updated, same))
        if forge.step_count == 9:
            break
    forge.finish()
    finite = all(curvature.isfinite().all() for curvature in gathered(forge, "curvature").values())
    return {"seen": records, "mask": gathered(forge, "mask"), "finite": finite}


def overflow_in_probe(case: Case, too_large: float) -> dict[str, Any]:
    """Probe once with a loss that is too large: no update; the next one is fine and updates."""
    engine, forge = build(case)
    result: dict[str, Any] = {"updated": []}
    for step in range(4):
        train_step(engine, case, step)
        before = published(engine)
        scale = forge.sharded.layout.loss_scale
        factor = too_large if step == 1 else 1.0
        batch = my_part(batch_at(step))
        result["updated"].append(forge.step(lambda factor=factor, batch=batch: engine(**batch).loss * factor))
        if step == 1:
            result["refreshes"] = forge.curvature.refreshes
            result["same"] = all(torch.equal(value, before[name]) for name, value in published(engine).items())
            result["mask_one"] = all((mask == 1).all().item() for mask in gathered(forge, "mask").values())
            result["curvature_zero"] = all((c == 0).all().item() for c in gathered(forge, "curvature").values())
            result["scale_kept"] = forge.sharded.layout.loss_scale == scale
    result["count"] = forge.step_count
    result["finite"] = all(curvature.isfinite().all() for curvature in gathered(forge, "curvature").values())
    return result


def never_a_probe(stage: int) -> None:
    """Let every probe overflow: the run must not freeze a mask that was never formed."""
    case = fp16(stage, initial_scale_power=4)
    engine, forge = build(case)
    for step in range(case.steps):
        train_step(engine, case, step)
        batch = my_part(batch_at(step))
        forge.step(lambda batch=batch: engine(**batch).loss * 1e30)


def accumulated_probe(stage: int) -> tuple[list[bool], dict[str, Any], dict[str, Any]]:
    """Probe with accumulation, as far from overflow as a micro-batch of training, and with the same curvature."""
    plain = Case(stage=stage, gas=1)
    scaled = fp16(stage, initial_scale_power=12)
    curvature = []
    updated: list[bool] = []
    for case in (plain, dataclasses.replace(scaled, gas=8)):
        engine, forge = build(case)
        largest = []
        handle = engine.module.get_output_embeddings().register_full_backward_hook(
            lambda _m, _i, output, largest=largest: largest.append(output[0].abs().max().item())
        )
        for _ in range(2):
            train_step(engine, case, 0)
            batch = my_part(batch_at(5))
            trained = max(largest)
            largest.clear()
            updated.append(forge.step(lambda engine=engine, batch=batch: engine(**batch).loss))
            if updated[-1]:
                updated[-1] = max(largest) < 2 * trained
        handle.remove()
        curvature.append(gathered(forge, "curvature"))
    return updated, curvature[0], curvature[1]


def test_accumulation_does_not_make_probes_overflow() -> None:
    for updated, plain, scaled in run_distributed(accumulated_probes, 2)[0]:
        assert updated == [False, True, False, True]
        for name, curvature in plain.items():
            ratio = scaled[name].sum() / curvature.sum()
            assert 0.5 < ratio < 2, (name, ratio)


def accumulated_probes() -> list[Any]:
    return [accumulated_probe(stage) for stage in STAGES]


def start_overflows(importance: str, dtype: str) -> None:
    more = {"fp16": {"initial_scale_power": 4}} if dtype == "fp16" else {}
    case = Case(stage=2, dtype=dtype, config={"importance": importance, "method": {"hardening": [0, 0]}}, more=more)
    engine, forge = build(case)
    batch = my_part(batch_at(0))
    if importance == "wanda":  # its inputs overflow, and not the loss
        engine.module.model.embed_tokens.register_forward_hook(lambda _module, _args, output: output * math.inf)
    forge.start(lambda: engine(**batch).loss * (1e30 if dtype == "fp16" else math.inf))


@pytest.mark.parametrize(
    ("importance", "dtype", "cure"),
    [
        ("fisher", "fp16", r"every probe overflowed; use bf16, or lower fp16.initial_scale_power"),
        ("wanda", "fp16", r"every probe overflowed; use bf16, or lower fp16.initial_scale_power"),
        ("fisher", "bf16", r"every probe was infinite or NaN; look at the loss that it returns, and at its batches"),
    ],
)
def test_an_overflow_at_the_start_is_named(importance: str, dtype: str, cure: str) -> None:
    with pytest.raises(ForgeError, match=cure):
        run_distributed(start_overflows, 1, importance, dtype)


def all_in_training() -> list[dict[str, Any]]:
    return [overflow_in_training(stage, "training" if stage > 1 else "probe") for stage in STAGES]


def all_in_probe() -> list[tuple[str, dict[str, Any]]]:
    in_fp16 = [
        (f"{importance} {stage}", overflow_in_probe(fp16(stage, importance, initial_scale_power=4), 1e30))
        for stage in STAGES
        for importance in ("fisher", "hutchinson")
    ]
    # bf16 has fp32's range: there the loss itself is infinite.
    at_weights = {"importance": "hutchinson", "curvature": {"per_token": False}}
    in_bf16 = [
        (f"{config} bf16 {stage}", overflow_in_probe(Case(stage=stage, dtype="bf16", config=config), math.inf))
        for stage, config in (
            (1, at_weights),
            (2, {"importance": "fisher"}),
            (3, {"importance": "hutchinson"}),
            (3, at_weights),
        )
    ]
    return in_fp16 + in_bf16


def test_a_skipped_step_is_no_step() -> None:
    for stage, result in zip(STAGES, run_distributed(all_in_training, 2)[0], strict=True):
        skipped_before = 0
        applied = 0
        for skipped, count_before, count, updated, same in result["seen"]:
            if skipped > skipped_before:
                assert (count, updated, same) == (count_before, False, True), stage
            else:
                applied += 1
                assert count == count_before + 1 == applied, stage
                assert updated == (count in (2, 4, 6, 7)), stage
            skipped_before = skipped
        assert skipped_before > 3 and applied == 9 and result["finite"], stage
        assert all(set(mask.unique().tolist()) == {0.0, 1.0} for mask in result["mask"].values())


def test_an_overflowing_probe_changes_nothing_and_the_next_one_counts() -> None:
    for where, result in run_distributed(all_in_probe, 2)[0]:
        assert result["updated"] == [False, False, False, True], where
        assert result["refreshes"] == 0 and result["count"] == 4, where
        for key in ("same", "mask_one", "curvature_zero", "scale_kept", "finite"):
            assert result[key], (where, key)


def test_a_mask_without_any_curvature_is_not_frozen() -> None:
    with pytest.raises(RuntimeError, match=r"never refreshed.*overflowed"):
        run_distributed(never_a_probe, 1, 2)
