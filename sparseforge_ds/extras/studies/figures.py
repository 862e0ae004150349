"""The figures of a comparison, as PNG files: perplexity against the tokens of training, and the bytes of inference."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FAR = 1.5
"""What is above so many times the median is named with its perplexity alone: it would squeeze the others."""


@dataclass(frozen=True)
class Drawn:
    """A figure on disk."""

    title: str
    caption: str
    path: Path


def draw(lines: pd.DataFrame, folder: Path) -> list[Drawn]:
    """Draw the figures of a summary with `bytes`. A method looks the same in both."""
    folder.mkdir(exist_ok=True)
    trained, untrained = lines[lines["kind"] == "result"], lines[lines["kind"] != "result"]
    styles = {}
    for number, method in enumerate(trained["method"].unique()):
        line, marker = (("-", "o"), ("--", "s"), (":", "^"))[number // 10 % 3]
        styles[method] = {"color": colormaps["tab10"](number % 10), "linestyle": line, "marker": marker}
    several = trained["test_deviation"].notna().any()
    drawn = []
    for name, what, plot, caption in (
        (
            "perplexity",
            "tokens",
            _against_tokens,
            "mean over seeds; bars are one sample standard deviation" if several else "one seed",
        ),
        (
            "bytes",
            "bytes",
            _against_bytes,
            "at the largest budget; values of 16 bits, places of what is kept, low-rank branches",
        ),
    ):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        plot(axes, trained, untrained, styles)
        axes.set_ylabel("test perplexity")
        figure.legend(fontsize="small", loc="outside right upper")
        figure.savefig(folder / f"{name}.png", dpi=120)
        drawn.append(Drawn(f"Perplexity against {what}", caption, folder / f"{name}.png"))
    return drawn


def _against_tokens(axes: Axes, trained: pd.DataFrame, untrained: pd.DataFrame, styles: Mapping[str, Any]) -> None:
    known = trained[np.isfinite(trained["test"])]
    for method, mine in known.sort_values("tokens", kind="stable").groupby("method", sort=False):
        bars, label = mine["test_deviation"].fillna(0.0), f"{method}: {mine['test'].min():.4g}"
        axes.errorbar(mine["tokens"], mine["test"], yerr=bars, capsize=3, markersize=4, label=label, **styles[method])
    for line, dashes in zip(untrained.itertuples(), itertools.cycle(["-", "--", ":", "-."]), strict=False):
        axes.axhline(line.test, color="grey", linestyle=dashes, label=f"{line.method}: {line.test:.4g}")
    _zoom(axes, known["test"], untrained["test"])
    axes.set(xscale="log", xlabel="training tokens")


def _against_bytes(axes: Axes, trained: pd.DataFrame, untrained: pd.DataFrame, styles: Mapping[str, Any]) -> None:
    known = trained[(trained["steps"] == trained["steps"].max()) & np.isfinite(trained["test"])]
    dense = untrained[untrained["kind"] == "dense"]
    for line in pd.concat([known, dense]).itertuples():
        style = styles.get(line.method, {"color": "grey", "marker": "*"})
        axes.plot(
            line.bytes, line.test, markersize=7, label=f"{line.method}: {line.test:.4g}", **{**style, "linestyle": ""}
        )
    _zoom(axes, known["test"], dense["test"])
    axes.set(xlabel="bytes of a pruned matrix at inference, of the dense one's", xlim=(0.0, 1.05))


def _zoom(axes: Axes, known: pd.Series, untrained: pd.Series) -> None:
    shown = pd.concat([known, untrained])
    if len(known) and shown.max() > (far := FAR * known.median()):
        axes.set_ylim(0.95 * shown.min(), far)
