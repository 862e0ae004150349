"""Schedules are functions of the step: their ends, their monotony, and the literal formulas of the reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.soft_mask_config import SoftMaskConfig
from sparseforge_ds.mask.anneal import Schedule
from tests.reference import dials_at

RAMP = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda w: (min(w), max(w)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    start, stop = draw(RAMP)
    return Schedule(
        update_every=draw(st.integers(1, 9)),
        temperature=draw(st.floats(0.1, 5)),
        temperature_min=0.05,
        temperature_decay=draw(st.none() | st.floats(0.5, 1)),
        blend=draw(RAMP),
        mid_penalty=draw(st.floats(0, 2)),
        mid_penalty_ramp=draw(RAMP),
        penalty_rate=0.2,
        mask_rate=0.1,
        hardening_start=start,
        freeze_step=stop,
    )


@given(schedules())
def test_every_dial_moves_one_way_and_ends_where_it_should(schedule: Schedule) -> None:
    dials = [schedule.dials(step) for step in range(80)]
    for before, after in zip(dials, dials[1:], strict=False):
        assert after.temperature <= before.temperature
        assert after.beta >= before.beta
        assert after.mid_penalty >= before.mid_penalty
        assert after.x <= before.x
    for step in range(80):
        started = "hardening" if step >= schedule.hardening_start else "heating"
        assert schedule.phase(step) == ("frozen" if step >= schedule.freeze_step else started)
    assert (dials[-1].beta, dials[-1].x, dials[-1].mask_rate) == (1.0, 0.0, 0.0)
    assert dials[-1].mid_penalty == schedule.mid_penalty
    assert all(0.0 <= d.beta <= 1.0 and 0.0 <= d.x <= 1.0 and d.temperature >= 0.05 for d in dials)
    assert all((d.mask_rate == 0.0) == (step >= schedule.freeze_step) for step, d in enumerate(dials))
    assert all(d.x == 0.0 for d in dials[schedule.freeze_step :])


@given(schedules(), st.lists(st.integers(0, 79), min_size=2, max_size=10))
def test_dials_do_not_remember(schedule: Schedule, steps: list[int]) -> None:
    assert [schedule.dials(step) for step in steps] == [schedule.dials(step) for step in reversed(steps)][::-1]


@given(schedules())
def test_updates_end_with_one_projection(schedule: Schedule) -> None:
    updates = [step for step in range(80) if schedule.is_update(step)]
    projections = [step for step in range(80) if schedule.is_projection(step)]
    assert projections == [schedule.freeze_step]
    assert all(step % schedule.update_every == 0 and 0 < step < schedule.freeze_step for step in updates)
    assert len(updates) == max(0, (schedule.freeze_step - 1) // schedule.update_every)


@pytest.mark.parametrize("first", [1.0, 4.0])
def test_the_default_temperature_reaches_its_floor_when_hardening_ends(first: float) -> None:
    schedule = SoftMaskConfig(temperature=first).schedule(400)
    assert schedule.dials(schedule.freeze_step).temperature == pytest.approx(0.05)
    assert schedule.dials(schedule.freeze_step - 2 * schedule.update_every).temperature > 0.055
    assert schedule.dials(0).temperature == first


@pytest.mark.parametrize("block", [{}, {"preset": "paper_like"}, {"method": {"hardening": [0, 0]}}])
def test_dials_are_the_literal_formulas(block: dict[str, Any]) -> None:
    config = SparseForgeConfig.from_dict({**block, "max_steps": 200})
    for step in range(201):
        assert isinstance(config.resolved_schedule, Schedule)
        actual = config.resolved_schedule.dials(step)
        reference = dials_at(step, config.to_dict()["method"], 200)
        for name in ("temperature", "beta", "mid_penalty", "x"):
            assert getattr(actual, name) == pytest.approx(reference[name], abs=1e-12), (step, name)
