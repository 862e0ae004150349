from __future__ import annotations

from pathlib import Path

import pytest

from sparseforge_ds.extras.studies.records import Records


def test_a_run_is_what_it_was_begun_as(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    assert records.read("a") is None
    assert records.open("a", {"steps": 3, "window": (0, 1)}) == {"wanted": {"steps": 3, "window": [0, 1]}}
    records.write("a", {**records.open("a", {"steps": 3, "window": (0, 1)}), "test_perplexity": 4.0})
    assert records.open("a", {"steps": 3, "window": [0, 1]})["test_perplexity"] == 4.0
    with pytest.raises(
        ValueError, match=r"the run a was started with other settings \(seed, steps\); give another --out"
    ):
        records.open("a", {"steps": 4, "window": [0, 1], "seed": 1})
    (tmp_path / "records" / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json: damaged"):
        records.open("a", {"steps": 3})
