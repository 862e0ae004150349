from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from PIL import Image

from sparseforge_ds.extras.studies.figures import draw
from sparseforge_ds.extras.studies.page import page
from sparseforge_ds.extras.studies.summary import Table, summarize
from tests.unit.extras.studies.test_summary import row


def distinct_colours(path: Path) -> int:
    with Image.open(path) as image:
        return len(image.convert("RGB").getcolors(1 << 24))


def test_a_method_that_is_called_dense_has_its_own_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    markers = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *args, **style: markers.append(style["marker"]) or plot(*args, **style))
    rows = [row("dense", 0, 3.0, 0, "dense", learning_rate=None), row("dense", 0, 2.9)]
    draw(summarize(rows, "dense").assign(bytes=1.0), tmp_path / "figures")
    assert markers == ["o", "*"]


def test_every_figure_shows_something(tmp_path: Path) -> None:
    # Two methods at two budgets and seeds, and a run that diverged.
    rows = [
        row("dense", 0, 3.0, 0, "dense", learning_rate=None),
        row("one-shot", 0, 100.0, 0, "one_shot", learning_rate=None),
        *(
            row(method, seed, 5.0 + seed, steps)
            for method in ("ours", "fixed")
            for seed in (0, 1)
            for steps in (40, 80)
        ),
        row("broken", 0, None, 80),
    ]
    drawn = draw(summarize(rows, "ours").assign(bytes=0.5625), tmp_path / "figures")
    assert [figure.path.stem for figure in drawn] == ["perplexity", "bytes"]
    for figure in drawn:
        assert distinct_colours(figure.path) > 20, f"{figure.path.stem} is blank"

    # The page carries its figures, and escapes the words that it is given.
    text = page(
        "A <title>",
        [Table(["a", "b"], [["**x**", "1 & 2"]]), Table(["c"], [])],
        ["Words.", "one <two>"],
        drawn,
        "{}",
        ["go <there>"],
    )
    assert text.count('src="data:image/png;base64,') == 2
    assert "<b>x</b>" in text and "1 &amp; 2" in text and "go &lt;there&gt;" in text and "A &lt;title&gt;" in text
    assert "<p>Words.</p><p>one &lt;two&gt;</p>" in text and text.count("<table>") == 2
    assert "http" not in text, "the page needs nothing besides itself"


def test_lines_that_did_not_record_the_axis_are_left_out(tmp_path: Path) -> None:
    rows = [row("ours", 0, 5.0, steps, path=steps / 60, tokens_a_weight=1.0) for steps in (40, 80)]
    lines = summarize([*rows, row("old", 0, 4.0)], "ours").assign(bytes=0.5625)
    for axis in ("tokens", "path"):
        figure = draw(lines, tmp_path / axis, axis)[0]
        assert figure.title == f"Perplexity against {axis}" and f"1 of 3 results are left out: {axis}" in figure.caption
        assert distinct_colours(figure.path) > 20
    assert "left out" not in draw(lines, tmp_path / "seconds", "seconds")[0].caption
    assert "left out" not in draw(lines[lines["method"] == "old"], tmp_path / "old")[0].caption


def test_one_seed_is_no_mean(tmp_path: Path) -> None:
    rows = [row("ours", seed, 5.0, 40) for seed in (0, 1)]
    for chosen in (rows, rows[:1]):
        caption = draw(summarize(chosen, "ours").assign(bytes=0.5625), tmp_path / "figures")[0].caption
        assert ("deviation" in caption) == (len(chosen) > 1) and ("one seed" in caption) == (len(chosen) == 1)
