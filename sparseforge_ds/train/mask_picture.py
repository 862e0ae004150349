"""A picture of all masks over time: the distribution of their values, and the share that flipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def masks_over_time(values: Mapping[int, Sequence[float]], flips: Mapping[int, float]) -> np.ndarray:
    """Draw mask values and flip rates over time.

    Args:
        values: counts of mask values in bins of equal width from 0 to 1, by step.
        flips: share of weights that entered or left the target mask since the update before, by step.

    Returns:
        (H, W, 3) bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # matplotlib's own state is left alone: a canvas draws without pyplot.
    figure = Figure(figsize=(9, 6), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    figure.colorbar(_density(above, values), ax=above, label="share of mask values")
    below.plot(list(flips), list(flips.values()), marker=".")
    below.set(xlabel="optimizer step", ylabel="flip rate", ylim=(0, None))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _density(axes: Axes, values: Mapping[int, Sequence[float]]) -> Any:
    """Draw the share of mask values in each bin (B), over the logged steps (T), on a logarithmic scale."""
    from matplotlib.colors import LogNorm

    steps = sorted(values)
    count_TB = np.asarray([values[step] for step in steps], dtype=float)
    share_BT = (count_TB / np.maximum(1.0, count_TB.sum(axis=1, keepdims=True))).T
    before = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)
    axes.set_ylabel("mask value")
    bins = np.linspace(0.0, 1.0, len(share_BT) + 1)
    return axes.pcolormesh([before, *steps], bins, np.ma.masked_less_equal(share_BT, 0.0), norm=LogNorm(1e-4, 1.0))
