"""The figures of a comparison, as PNG files. A figure for which no run has data is left out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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

FAR = 1.5
"""What is above so many times the median is named with its perplexity alone: it would squeeze the others."""
_CURVES = {
    "undecided": ("Undecided mass", "mean of m (1 - m) over all mask values: 0 when every one is 0 or 1"),
    "flip_rate": ("Flip rate", "share of weights whose place in the hard mask changed since the update before"),
    "gap": ("Soft-to-hard gap", "loss with the mask hardened at this moment, minus the loss with the soft mask"),
}


@dataclass(frozen=True)
class Drawn:
    """A figure on disk."""

    title: str
    caption: str
    path: Path


def draw(
    lines: pd.DataFrame, rows: Sequence[Row], histories: Mapping[str, Mapping[str, Any]], folder: Path
) -> list[Drawn]:
    """Draw all figures of a summary with `bytes`; `histories` are those of `compare.history`, by the name of a
    run."""
    folder.mkdir(exist_ok=True)
    trained = lines[lines["kind"] == "result"]
    largest = [row for row in rows if row["kind"] == "result" and row["steps"] == trained["steps"].max()]
    styles = {}
    for number, method in enumerate(trained["method"].unique()):
        line, marker = (("-", "o"), ("--", "s"), (":", "^"))[number // 10 % 3]
        colour = colormaps["tab10"](number % 10)
        styles[method] = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
    return [*_Artist(largest, histories, styles, folder).all(trained, lines[lines["kind"] != "result"])]


@dataclass(frozen=True)
class _Artist:
    runs: Sequence[Row]
    """Those at the largest budget."""
    histories: Mapping[str, Mapping[str, Any]]
    styles: Mapping[str, Mapping[str, Any]]
    """Colour, line and marker of a method, the same in every figure."""
    folder: Path

    def all(self, trained: pd.DataFrame, untrained: pd.DataFrame) -> Iterator[Drawn]:
        yield self.tokens(trained, untrained)
        yield self.bytes(trained, untrained)
        for name in _CURVES:
            yield from self.curve(name)
        yield from self.mask_values()
        yield from self.agreement()

    def tokens(self, trained: pd.DataFrame, untrained: pd.DataFrame) -> Drawn:
        figure, axes = _axes(9, 5)
        known = trained[np.isfinite(trained["test"])]
        for method, mine in known.sort_values("tokens", kind="stable").groupby("method", sort=False):
            bars, label = mine["test_deviation"].fillna(0.0), f"{method}: {mine['test'].min():.4g}"
            axes.errorbar(mine["tokens"], mine["test"], yerr=bars, capsize=3, label=label, **self.styles[method])
        for line, dashes in zip(untrained.itertuples(), itertools.cycle(["-", "--", ":", "-."]), strict=False):
            axes.axhline(line.test, color="grey", linestyle=dashes, label=f"{line.method}: {line.test:.4g}")
        _zoom(axes, known["test"], untrained["test"])
        axes.set(xscale="log", xlabel="training tokens", ylabel="test perplexity")
        several = trained["test_deviation"].notna().any()
        caption = "mean over seeds; bars are one sample standard deviation" if several else "one seed"
        return self.save(figure, "perplexity", "Perplexity against tokens", caption)

    def bytes(self, trained: pd.DataFrame, untrained: pd.DataFrame) -> Drawn:
        figure, axes = _axes(9, 5)
        known = trained[(trained["steps"] == trained["steps"].max()) & np.isfinite(trained["test"])]
        dense = untrained[untrained["kind"] == "dense"]
        for line in known.itertuples():
            style = {**self.styles[line.method], "linestyle": "", "markersize": 7}
            axes.plot([line.bytes], [line.test], **style, label=f"{line.method}: {line.test:.4g}")
        for line in dense.itertuples():
            axes.plot([line.bytes], [line.test], "*", color="grey", label=f"dense: {line.test:.4g}")
        _zoom(axes, known["test"], dense["test"])
        axes.set(xlabel="bytes of a pruned matrix at inference, of the dense one's", ylabel="test perplexity")
        axes.set_xlim(0.0, 1.05)
        caption = "at the largest budget; values of 16 bits, places of what is kept, low-rank branches"
        return self.save(figure, "bytes", "Perplexity against bytes", caption)

    def curve(self, name: str) -> Iterator[Drawn]:
        title, caption = _CURVES[name]
        figure, axes = _axes(9, 4.5)
        labelled = set()
        for row in self.runs:
            curve = self.histories.get(row["run"], {}).get(name)
            if curve and any(curve["values"]):  # a fixed mask has zeros only
                label = None if row["method"] in labelled else row["method"]
                labelled.add(row["method"])
                style = {**self.styles[row["method"]], "marker": "", "alpha": 0.7}
                axes.plot(curve["steps"], curve["values"], **style, label=label)
        if labelled:
            _step_axis(axes, title.lower())
            yield self.save(figure, name, title, f"{caption}; {self.over_seeds('a line for each seed')}")

    def mask_values(self) -> Iterator[Drawn]:
        """How many mask values lie where, over time: one panel a method, its first seed."""
        panels: dict[str, Any] = {}
        for row in self.runs:
            values = self.histories.get(row["run"], {}).get("mask_values")
            if values and any(sum(counts[1:-1]) for counts in values["values"]):  # not a mask that was binary at once
                panels.setdefault(row["method"], values)
        if not panels:
            return
        columns = min(3, len(panels))
        down = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(4.5 * columns, 3.2 * down), layout="constrained")
        grid = figure.subplots(down, columns, squeeze=False).flatten()
        for axes, (method, values) in zip(grid, panels.items(), strict=False):
            figure.colorbar(_density(axes, values), ax=axes, label="share of mask values")
            axes.set_title(method)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        caption = "how many values of the mask lie where, step by step; white: none"
        yield self.save(figure, "mask_values", "Mask values over time", caption, legend=False)

    def agreement(self) -> Iterator[Drawn]:
        figure, axes = _axes(11, 5)
        labels: list[str] = []
        for method, style in self.styles.items():
            found = pd.DataFrame([r["agreement"] for r in self.runs if r["method"] == method and r.get("agreement")])
            if len(found):
                labels = list(found.columns)
                axes.plot(range(len(labels)), found.mean(), **style, label=method)
        if labels:
            axes.set_xticks(range(len(labels)), [_short(name) for name in labels], rotation=90, fontsize="x-small")
            axes.set_ylabel("share kept by both")
            caption = "share of what magnitude keeps in the dense model that the final mask keeps too"
            words = f"{caption}; {self.over_seeds('mean over seeds')}"
            yield self.save(figure, "agreement", "Agreement with magnitude", words)

    def over_seeds(self, several: str) -> str:
        return f"{several if len({row['seed'] for row in self.runs}) > 1 else 'one seed'}, at the largest budget"

    def save(self, figure: Figure, name: str, title: str, caption: str, legend: bool = True) -> Drawn:
        path = self.folder / f"{name}.png"
        if legend:
            figure.legend(fontsize="small", loc="outside right upper")
        figure.savefig(path, dpi=120)
        return Drawn(title, caption, path)


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _zoom(axes: Axes, known: pd.Series, untrained: pd.Series) -> None:
    shown = pd.concat([known, untrained])
    if len(known) and shown.max() > (far := FAR * known.median()):
        axes.set_ylim(0.95 * shown.min(), far)


def _density(axes: Axes, values: Mapping[str, Any]) -> Any:
    count_TB = np.asarray(values["values"], dtype=float)
    share_TB = count_TB / np.maximum(1.0, count_TB.sum(axis=1, keepdims=True))
    steps = np.asarray(values["steps"], dtype=float)
    edges = np.concatenate([[steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)], steps])
    masked = np.ma.masked_less_equal(share_TB.T, 0.0)
    bins = np.linspace(0.0, 1.0, share_TB.shape[1] + 1)
    _step_axis(axes, "mask value")
    return axes.pcolormesh(edges, bins, masked, norm=LogNorm(1e-4, 1.0), cmap="viridis")


def _step_axis(axes: Axes, ylabel: str) -> None:
    axes.set(xlabel="optimizer step", ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))


def _short(name: str) -> str:
    """The layer's number and the weight's own name."""
    dull = ("model", "layers", "transformer", "weight", "decoder", "h")
    parts = [part for part in name.split(".") if part not in dull]
    return ".".join(parts[:1] + parts[-1:])
