"""Figures of a comparison, as PNG files: perplexity against tokens, path or time, and against bytes at inference."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from sparseforge_ds.checkpoint.disk import atomic_file

FAR = 1.5
"""Multiple of the median beyond which a point lies outside the plot, so that it does not squeeze the others."""


@dataclass(frozen=True)
class Figure:
    """A figure on disk."""

    title: str
    caption: str
    path: Path


AXES = {
    "tokens": ("tokens_a_weight", "tokens of the run and of its start, a pruned weight"),
    "path": ("path", "path: steps x mean learning rate / RMS of the pruned weights"),
    "seconds": ("seconds", "seconds of training, with the start"),
}
"""Column and label of each horizontal axis of the figure of perplexity."""


def draw(lines: pd.DataFrame, folder: Path, axis: str = "tokens") -> list[Figure]:
    """Draw the figures of a summary that has a column `bytes`, with one style a method in all of them.

    Args:
        lines: the summary.
        folder: gets PNG files.
        axis: key of `AXES`, for the figure of perplexity. Lines that did not record it are left out. A study without
            any record of starts has its training tokens on the axis of tokens.
    """
    folder.mkdir(exist_ok=True)
    trained = lines[lines["kind"] == "result"]
    untrained = lines[lines["kind"] != "result"]
    # A method keeps its color and marker; after ten methods colors repeat with another dash.
    styles = {}
    for number, method in enumerate(trained["method"].unique()):
        line, marker = (("-", "o"), ("--", "s"), (":", "^"))[number // 10 % 3]
        styles[method] = {"color": colormaps["tab10"](number % 10), "linestyle": line, "marker": marker}
    several_seeds = trained["test_deviation"].notna().any()
    cost_caption = "mean over seeds; bars are one sample standard deviation" if several_seeds else "one seed"
    column, label = AXES[axis]
    if axis == "tokens" and trained[column].isna().all():
        column, label = "tokens", "training tokens"
    if missing := int(trained[column].isna().sum()):
        cost_caption += f"; {missing} of {len(trained)} results are left out: {axis} not recorded"
    byte_caption = "at the largest budget; values of 16 bits, positions of kept values, low-rank branches"
    # One PNG file for each horizontal axis.
    figures = []
    for name, abscissa, plot, caption in (
        ("perplexity", axis, partial(_against_cost, column=column, label=label), cost_caption),
        ("bytes", "bytes", _against_bytes, byte_caption),
    ):
        canvas = Canvas(figsize=(9, 5), layout="constrained")
        axes = canvas.subplots()
        plot(axes, trained, untrained, styles)
        axes.set_ylabel("test perplexity")
        canvas.legend(fontsize="small", loc="outside right upper")
        with atomic_file(folder / f"{name}.png") as file:
            canvas.savefig(file, format="png", dpi=120)
        figures.append(Figure(f"Perplexity against {abscissa}", caption, folder / f"{name}.png"))
    return figures


def _against_cost(
    axes: Axes,
    trained: pd.DataFrame,
    untrained: pd.DataFrame,
    styles: Mapping[str, Any],
    column: str,
    label: str,
) -> None:
    """Plot a curve over a column for every trained method, and a level for every untrained one."""
    finite = trained[np.isfinite(trained["test"]) & trained[column].notna()]
    for method, curve in finite.sort_values(column, kind="stable").groupby("method", sort=False):
        bars = curve["test_deviation"].fillna(0.0)
        name = f"{method}: {curve['test'].min():.4g}"
        axes.errorbar(curve[column], curve["test"], yerr=bars, capsize=3, markersize=4, label=name, **styles[method])
    for line, dashes in zip(untrained.itertuples(), itertools.cycle(["-", "--", ":", "-."]), strict=False):
        axes.axhline(line.test, color="grey", linestyle=dashes, label=f"{line.method}: {line.test:.4g}")
    _zoom(axes, finite["test"], untrained["test"])
    axes.set(xscale="log", xlabel=label)


def _against_bytes(axes: Axes, trained: pd.DataFrame, untrained: pd.DataFrame, styles: Mapping[str, Any]) -> None:
    """Plot a point for every method at the largest budget, and one for the dense model."""
    finite = trained[(trained["steps"] == trained["steps"].max()) & np.isfinite(trained["test"])]
    dense = untrained[untrained["kind"] == "dense"]
    for line in pd.concat([finite, dense]).itertuples():
        style = {"color": "grey", "marker": "*"} if line.kind == "dense" else styles[line.method]
        axes.plot(
            line.bytes, line.test, markersize=7, label=f"{line.method}: {line.test:.4g}", **{**style, "linestyle": ""}
        )
    _zoom(axes, finite["test"], dense["test"])
    axes.set(xlabel="bytes of a pruned matrix at inference, relative to the dense matrix", xlim=(0.0, 1.05))


def _zoom(axes: Axes, trained: pd.Series, untrained: pd.Series) -> None:
    """End the vertical axis at `FAR` times the median of the trained methods, if a point lies beyond."""
    shown = pd.concat([trained, untrained])
    if len(trained) and shown.max() > (limit := FAR * trained.median()):
        axes.set_ylim(0.95 * shown.min(), limit)
