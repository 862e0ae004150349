from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from PIL import Image

from sparseforge_ds.compare import figures
from sparseforge_ds.compare.figures import draw
from sparseforge_ds.compare.page import page
from sparseforge_ds.compare.summary import Table, summarize
from tests.unit.compare.test_summary import row

AGREEMENT = {"model.layers.0.self_attn.q_proj.weight": 0.8, "model.layers.0.mlp.up_proj.weight": 0.9}
SOFT = {"steps": [1, 2, 3], "values": [[0, 0, 5, 5], [2, 3, 1, 4], [5, 0, 0, 5]]}
BINARY = {"steps": [1, 2, 3], "values": [[5, 0, 0, 5]] * 3}


def curve(*values: float) -> dict[str, Any]:
    return {"steps": [1, 2, 3], "values": list(values)}


def distinct_colours(path: Path) -> int:
    with Image.open(path) as image:
        return len(image.convert("RGB").getcolors(1 << 24))


def test_every_figure_shows_something(tmp_path: Path) -> None:
    rows = [
        row("dense", 0, 3.0, 0, "dense", learning_rate=None),
        row("one-shot", 0, 100.0, 0, "one_shot", learning_rate=None),
        *(
            row(method, seed, 5.0 + seed, steps, agreement=AGREEMENT)
            for method in ("ours", "fixed")
            for seed in (0, 1)
            for steps in (40, 80)
        ),
        row("broken", 0, None, 80),
    ]
    moving = {"undecided": curve(0.1, 0.05, 0.0), "flip_rate": curve(0.3, 0.1, 0.0), "gap": curve(1.0, 0.5, 0.0)}
    fixed = {"gap": curve(0.0, 0.0, 0.0), "mask_values": BINARY}
    histories = {f"ours{seed}80": {**moving, "mask_values": SOFT} for seed in (0, 1)}
    histories |= {f"fixed{seed}80": fixed for seed in (0, 1)}
    drawn = draw(summarize(rows, "ours").assign(bytes=0.5625), rows, histories, tmp_path / "figures")
    names = [figure.path.stem for figure in drawn]
    assert names == ["perplexity", "bytes", "undecided", "flip_rate", "gap", "mask_values", "agreement"]
    for figure in drawn:
        assert distinct_colours(figure.path) > 20, f"{figure.path.stem} is blank"

    text = page(
        "A <title>",
        [Table(["a", "b"], [["**x**", "1 & 2"]]), Table(["c"], [])],
        ["Words.", "one <two>"],
        drawn,
        "{}",
        ["go <there>"],
    )
    assert text.count('src="data:image/png;base64,') == 7
    assert "<b>x</b>" in text and "1 &amp; 2" in text and "go &lt;there&gt;" in text and "A &lt;title&gt;" in text
    assert "<p>Words.</p><p>one &lt;two&gt;</p>" in text and text.count("<table>") == 2
    assert "http" not in text, "the page needs nothing besides itself"


def test_steps_are_whole_numbers_and_one_seed_is_no_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run had ticks at step 1.5, and captions that spoke of deviations."""
    made: list[Figure] = []
    save = figures._Artist.save

    def keep(artist: figures._Artist, figure: Figure, *rest: Any, **more: Any) -> figures.Drawn:
        made.append(figure)
        return save(artist, figure, *rest, **more)

    monkeypatch.setattr(figures._Artist, "save", keep)
    rows = [row("ours", seed, 5.0, 40, agreement=AGREEMENT) for seed in (0, 1)]
    histories = {f"ours{seed}40": {"gap": curve(1.0, 0.5, 0.0), "mask_values": SOFT} for seed in (0, 1)}
    for chosen in (rows, rows[:1]):
        drawn = draw(summarize(chosen, "ours").assign(bytes=0.5625), chosen, histories, tmp_path / "figures")
        told = " ".join(figure.caption for figure in drawn)
        assert ("deviation" in told) == ("mean over seeds" in told) == ("each seed" in told) == (len(chosen) > 1)
        assert ("one seed" in told) == (len(chosen) == 1)
    stepped = [axes for figure in made for axes in figure.axes if axes.get_xlabel() == "optimizer step"]
    assert len(stepped) == 4
    for axes in stepped:
        first, last = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if first <= tick <= last]
        assert ticks and all(float(tick).is_integer() for tick in ticks), ticks


def test_a_figure_without_data_is_left_out(tmp_path: Path) -> None:
    rows = [row("fixed", 0, 5.0)]
    histories = {"fixed040": {"gap": curve(0.0, 0.0, 0.0), "mask_values": BINARY}}
    drawn = draw(summarize(rows, "fixed").assign(bytes=0.5625), rows, histories, tmp_path)
    assert [figure.path.stem for figure in drawn] == ["perplexity", "bytes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes.png", "perplexity.png"]
