"""The figures of a comparison, as PNG files. A figure for which no run has data is left out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparseforge_ds.compare.summary import Row

History = Mapping[str, Any]
"""What `history.read_history` gives."""
Style = Mapping[str, Any]
"""Colour, line and marker of a method, the same in every figure."""
FAR = 1.5
"""Methods above so many times the median are named with their perplexity, not drawn: they would squeeze the others."""


@dataclass(frozen=True)
class Drawn:
    """A figure on disk."""

    title: str
    caption: str
    path: Path


def draw(lines: pd.DataFrame, rows: Sequence[Row], histories: Mapping[str, History], folder: Path) -> list[Drawn]:
    """Draw all.

    Args:
        lines: the summary.
        rows: of results.jsonl.
        histories: by the name of a run.
        folder: where the files go.
    """
    folder.mkdir(exist_ok=True)
    trained = lines[lines["kind"] == "result"]
    styles = {method: _style(number) for number, method in enumerate(trained["method"].unique())}
    largest = [row for row in rows if row["kind"] == "result" and row["steps"] == trained["steps"].max()]
    runs = [row for row in largest if row["run"] in histories]
    drawn = [_tokens(trained, lines[lines["kind"] != "result"], styles, folder)]
    curves = (
        ("undecided", "Undecided mass", "mean of m (1 - m) over all mask values: 0 when every one is 0 or 1"),
        ("flip_rate", "Flip rate", "share of weights whose place in the hard mask changed since the update before"),
        ("gap", "Soft-to-hard gap", "loss with the mask hardened at this moment, minus the loss with the soft mask"),
    )
    for name, title, caption in curves:
        drawn += _curve(name, title, caption, runs, histories, styles, folder)
    drawn += _mask_values(runs, histories, folder)
    drawn += _agreement(largest, styles, folder)
    return drawn


def _style(number: int) -> Style:
    line, marker = (("-", "o"), ("--", "s"), (":", "^"))[number // 10 % 3]
    return {"color": colormaps["tab10"](number % 10), "linestyle": line, "marker": marker, "markersize": 4}


def _tokens(trained: pd.DataFrame, untrained: pd.DataFrame, styles: Mapping[str, Style], folder: Path) -> Drawn:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    known = trained[np.isfinite(trained["test"])]
    far = FAR * known["test"].median() if len(known) else math.inf
    for method, mine in known.sort_values("tokens", kind="stable").groupby("method", sort=False):
        style = styles[method]
        if mine["test"].min() > far:
            values = ", ".join(f"{value:.4g}" for value in mine["test"])
            axes.plot([], [], **style, label=f"{method}: {values} (not drawn)")
            continue
        bars = mine["test_deviation"].fillna(0.0)
        axes.errorbar(mine["tokens"], mine["test"], yerr=bars, capsize=3, label=method, **style)
    for line, dashes in zip(untrained.itertuples(), itertools.cycle(["-", "--", ":", "-."]), strict=False):
        label = f"{line.method}: {line.test:.4g}"
        if line.test > far:
            axes.plot([], [], color="grey", linestyle=dashes, label=f"{label} (not drawn)")
        else:
            axes.axhline(line.test, color="grey", linestyle=dashes, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("training tokens")
    axes.set_ylabel("test perplexity")
    figure.legend(fontsize="small", loc="outside right upper")
    several = trained["test_deviation"].notna().any()
    caption = "mean over seeds; bars are one sample standard deviation" if several else "one seed"
    return _save(figure, folder, "perplexity", "Perplexity against tokens", caption)


def _curve(
    name: str,
    title: str,
    caption: str,
    runs: Sequence[Row],
    histories: Mapping[str, History],
    styles: Mapping[str, Style],
    folder: Path,
) -> list[Drawn]:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    labelled = set()
    for row in runs:
        curve = histories[row["run"]].get(name)
        if curve and any(curve["values"]):  # a fixed mask has zeros only
            label = None if row["method"] in labelled else row["method"]
            labelled.add(row["method"])
            style = {**styles[row["method"]], "marker": "", "alpha": 0.7}
            axes.plot(curve["steps"], curve["values"], **style, label=label)
    if not labelled:
        return []
    _step_axis(axes)
    axes.set_ylabel(title.lower())
    figure.legend(fontsize="small", loc="outside right upper")
    seeds = "a line for each seed" if len({row["seed"] for row in runs}) > 1 else "one seed"
    return [_save(figure, folder, name, title, f"{caption}; {seeds}, at the largest budget")]


def _mask_values(runs: Sequence[Row], histories: Mapping[str, History], folder: Path) -> list[Drawn]:
    """How many mask values lie where, over time: one panel a method, its first seed."""
    panels: dict[str, Any] = {}
    for row in runs:
        values = histories[row["run"]].get("mask_values")
        if values and any(sum(counts[1:-1]) for counts in values["values"]):  # not a mask that was binary at once
            panels.setdefault(row["method"], values)
    if not panels:
        return []
    columns = min(3, len(panels))
    down = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * down), layout="constrained")
    grid = figure.subplots(down, columns, squeeze=False).flatten()
    for axes, (method, values) in zip(grid, panels.items(), strict=False):
        image = _density(axes, values)
        axes.set_title(method)
        figure.colorbar(image, ax=axes, label="share of mask values")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    caption = "how many values of the mask lie where, step by step; white: none"
    return [_save(figure, folder, "mask_values", "Mask values over time", caption)]


def _density(axes: Axes, values: Mapping[str, Any]) -> Any:
    count_TB = np.asarray(values["values"], dtype=float)
    share_TB = count_TB / np.maximum(1.0, count_TB.sum(axis=1, keepdims=True))
    steps = np.asarray(values["steps"], dtype=float)
    edges = np.concatenate([[steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)], steps])
    masked = np.ma.masked_less_equal(share_TB.T, 0.0)
    bins = np.linspace(0.0, 1.0, share_TB.shape[1] + 1)
    _step_axis(axes)
    axes.set_ylabel("mask value")
    return axes.pcolormesh(edges, bins, masked, norm=LogNorm(1e-4, 1.0), cmap="viridis")


def _agreement(runs: Sequence[Row], styles: Mapping[str, Style], folder: Path) -> list[Drawn]:
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    labels: list[str] = []
    for method, style in styles.items():
        found = [row["agreement"] for row in runs if row["method"] == method and row.get("agreement")]
        if found:
            labels = list(found[0])
            mean = [sum(each[name] for each in found) / len(found) for name in labels]
            axes.plot(range(len(labels)), mean, **style, label=method)
    if not labels:
        return []
    axes.set_xticks(range(len(labels)), [_short(name) for name in labels], rotation=90, fontsize="x-small")
    axes.set_ylabel("share kept by both")
    figure.legend(fontsize="small", loc="outside right upper")
    title = "Agreement with magnitude"
    caption = "share of what magnitude keeps in the dense model that the final mask keeps too"
    seeds = "mean over seeds" if len({row["seed"] for row in runs}) > 1 else "one seed"
    return [_save(figure, folder, "agreement", title, f"{caption}; {seeds}, at the largest budget")]


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))


def _short(name: str) -> str:
    parts = [
        part for part in name.split(".") if part not in ("model", "layers", "transformer", "weight", "decoder", "h")
    ]
    return ".".join(parts[:1] + parts[-1:])


def _save(figure: Figure, folder: Path, name: str, title: str, caption: str) -> Drawn:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120)
    return Drawn(title, caption, path)
