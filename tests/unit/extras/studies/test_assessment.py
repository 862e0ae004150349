"""Measurements of a comparison's models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.evaluate.perplexity import NotFiniteError
from sparseforge_ds.extras.studies import assessment
from sparseforge_ds.extras.studies.assessment import Evaluator
from sparseforge_ds.extras.studies.settings import read_comparison
from sparseforge_ds.extras.studies.texts import Texts
from tests.tiny_folders import write_model
from tests.unit.extras.studies.test_settings import write


def test_a_one_shot_model_that_overflows_is_a_row_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound fp16 model may overflow once half of its weights are gone."""
    measure = assessment.measure

    def overflow(*args: Any, dense: Any) -> Any:
        if dense is not None:
            raise NotFiniteError("the loss is nan")
        return measure(*args, dense=dense)

    monkeypatch.setattr(assessment, "measure", overflow)
    config = read_comparison(write(tmp_path, model=str(write_model(tmp_path / "model")), one_shot={}))
    evaluator = Evaluator(config, Texts(["A dog ran home."], ["A cat sat there."], {}, []), config.pruned)
    baselines = evaluator.baselines({})
    assert math.isfinite(baselines["dense_test"])
    assert baselines["magnitude_test"] == baselines["magnitude_validation_kl"] == math.inf
