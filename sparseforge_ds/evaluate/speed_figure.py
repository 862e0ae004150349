"""The figure of `sparseforge bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(measured: dict[str, Any], path: Path) -> None:
    """Tokens per second of both models, a panel for prefill and one for decode, with quartiles, as a PNG."""
    speeds = measured["speeds"]
    works = list(dict.fromkeys(speed["work"] for speed in speeds))
    figure = Figure(figsize=(4.5 * len(works), 3.6), layout="constrained")
    for axes, work in zip(figure.subplots(1, len(works), squeeze=False)[0], works, strict=True):
        rows = [speed for speed in speeds if speed["work"] == work]
        for offset, name in ((-0.2, "dense"), (0.2, "packed")):
            low, middle, high = zip(*(row[name] for row in rows), strict=True)
            below = [m - lo for m, lo in zip(middle, low, strict=True)]
            above = [hi - m for m, hi in zip(middle, high, strict=True)]
            at = [place + offset for place in range(len(rows))]
            axes.bar(at, middle, 0.4, yerr=(below, above), capsize=3, label=name)
        for place, row in enumerate(rows):
            axes.annotate(f"{row['speedup'][1]:.2f}x", (place + 0.2, 0), ha="center", va="bottom", color="white")
        axes.set(title=work, xlabel="sequences at once", ylabel="tokens per second")
        axes.set_xticks(range(len(rows)), [str(row["batch"]) for row in rows])
        axes.legend()
    figure.savefig(path, dpi=130)
