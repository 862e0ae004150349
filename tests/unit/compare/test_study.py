"""What a comparison measures after a run was trained anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparseforge_ds.compare.settings import read_config
from sparseforge_ds.compare.study import Study
from tests.unit.compare.test_settings import write


@pytest.mark.parametrize("resumed", [False, True])
def test_no_model_of_an_earlier_run_is_taken_for_a_new_one(resumed: bool, tmp_path: Path) -> None:
    """Of a record that was removed, as the message about other settings advises. A run that went on has exported its
    own model, perhaps, when it was interrupted."""
    study: Any = object.__new__(Study)
    model, seen = tmp_path / "model", []
    model.mkdir()
    study.config = read_config(write(tmp_path))
    study.trainer = SimpleNamespace(train=lambda *_: ({"seconds": 1.0}, resumed))
    study.evaluator = SimpleNamespace(export=lambda _, out: seen.append(out.exists()), perplexity=lambda *_: 3.0)
    run = SimpleNamespace(arguments=lambda *_: [])
    assert study._train(run, tmp_path / "run", model, 0)["validation_perplexity"] == 3.0
    assert seen == [resumed]
