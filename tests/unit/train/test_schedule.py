"""The learning rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
