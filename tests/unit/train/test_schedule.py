"""The learning rate."""

from __future__ import annotations

import json
import math
import re
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from sparseforge_ds.config.arguments import SchedulerName
from sparseforge_ds.train.schedule import LearningRate


def test_the_rate_rises_and_then_falls_to_the_floor():
    rate = LearningRate(peak=1e-3, warmup=0.1, floor=0.1, max_steps=100)
    assert rate(0) == pytest.approx(1e-3 / 11)
    assert rate(10) == pytest.approx(1e-3)
    assert rate(99) == pytest.approx(1e-4)
    middle = (10 + 99) / 2
    assert (rate(int(middle)) + rate(int(middle) + 1)) / 2 == pytest.approx(0.55e-3, rel=1e-3)


@given(
    warmup=st.floats(0, 0.99),
    floor=st.floats(0.01, 1),
    max_steps=st.integers(1, 500),
)
def test_the_rate_is_positive_and_bounded_and_has_one_peak(warmup, floor, max_steps):
    rate = LearningRate(2e-4, warmup, floor, max_steps)
    values = [rate(step) for step in range(max_steps)]
    assert all(0 < value <= 2e-4 * (1 + 1e-12) for value in values)
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)


def test_the_default_has_the_rates_of_all_runs_so_far():
    rate = LearningRate(peak=4e-3, warmup=0.03, floor=0.1, max_steps=400)
    assert str(rate) == "0.004 after 12 warm-up steps, cosine to 0.0004"
    for step in range(420):
        progress = min(1.0, (step - 12) / 387)
        cosine = 4e-3 * (0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * progress)))
        assert rate(step) == (4e-3 * (step + 1) / 13 if step < 12 else cosine)


@pytest.mark.parametrize("kind", [kind for kind in get_args(SchedulerName) if kind != "cosine"])
def test_the_other_rates_are_those_of_transformers_to_the_bit(kind):
    settings = {"num_decay_steps": 8, "min_lr_ratio": 0.2} if kind == "warmup_stable_decay" else {}
    settings = {"min_lr_rate": 0.2} if "min_lr" in kind else settings
    rate = LearningRate(4e-3, 0.1, 0.2, 40, kind, json.dumps(settings))
    rate.check()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=4e-3)
    scheduler = get_scheduler(kind, optimizer, 4, 40, settings)
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [rate(step) for step in range(40)] == rates
    assert [rate(step) for step in reversed(range(40))] == rates[::-1]  # whatever was asked before
    assert rate(60) == rates[-1]  # a longer run goes on at the last rate
    # The floor of the flag is that of schedules with a floor.
    without = LearningRate(4e-3, 0.1, 0.2, 40, kind, json.dumps({k: v for k, v in settings.items() if "min" not in k}))
    assert without(39) == rate(39)


@pytest.mark.parametrize("steps", [4, 3000])
@pytest.mark.parametrize(
    ("kind", "floor", "end"),
    [("linear", 0.1, 0.0), ("cosine", 0.0, 0.0), ("cosine", 0.001, 1e-6), ("constant", 0.1, 1e-3)],
)
def test_where_a_schedule_ends_does_not_depend_on_the_number_of_steps(kind, floor, end, steps):
    """The last step of `linear` still has a share of 1 / steps, and a longer run would stay there."""
    assert LearningRate(1e-3, 0.0, floor, steps, kind).end == pytest.approx(end, abs=0)


def test_a_schedule_says_what_it_is_and_what_is_wrong_with_it():
    # It says what it is, and does that.
    decay = '{"num_decay_steps": 20}'
    stable = LearningRate(1e-3, 0.1, 0.1, 100, "warmup_stable_decay", decay)
    assert str(stable).startswith(
        f"0.001 after 10 warm-up steps, warmup_stable_decay {decay} of transformers to 0.0001"
    )
    assert stable(10) == stable(79) == 1e-3 > stable(90)
    assert str(LearningRate(1e-3, 0.03, 0.1, 100, "constant")) == "0.001, constant of transformers to 0.001"
    # Settings that it cannot take are refused with its name.
    for kind, settings, message in (
        (
            "warmup_stable_decay",
            None,
            "missing 1 required positional argument: 'num_decay_steps'; correct its settings, like",
        ),
        (
            "warmup_stable_decay",
            '{"num_decay_steps": 95}',
            "10 steps of warm-up and 95 of decay are more than the run's 100",
        ),
        ("warmup_stable_decay", '{"num_decay_steps": -5}', "num_decay_steps is -5; use an integer >= 0"),
        ("warmup_stable_decay", '{"num_decay_steps": "x"}', "correct its settings"),
        ("linear", '{"last_epoch": 5}', "correct its settings"),
        ("linear", '{"num_cycles": 2}', "unexpected keyword argument 'num_cycles'"),
        ("polynomial", '{"lr_end": 1}', "transformers says lr_end"),
        ("cosine_with_min_lr", '{"min_lr": 0.01}', "settings must keep it within 0 and 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as refusal:
            LearningRate(1e-3, 0.1, 0.1, 100, kind, settings).check()
        assert str(refusal.value).startswith(f"--lr_scheduler_type {kind}")
