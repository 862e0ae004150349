"""Measurements of a comparison's models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.evaluate.perplexity import NotFiniteError
from sparseforge_ds.extras.studies import assessment
from sparseforge_ds.extras.studies.assessment import Evaluator
from sparseforge_ds.extras.studies.records import Records, write_rows
from sparseforge_ds.extras.studies.settings import read_comparison
from sparseforge_ds.extras.studies.summary import summarize
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
    assert baselines["magnitude_test"] is None and baselines["magnitude_validation_kl"] is None
    # Rows say it in JSON that others can read, also those of a record that an earlier version wrote.
    of_earlier_version = {**baselines, "magnitude_test": math.inf, "magnitude_test_kl": math.nan}
    del of_earlier_version["magnitude_diverged"]
    for known, reason in ((baselines, "test text: the loss is nan"), (of_earlier_version, "a loss is not finite")):
        rows = write_rows(tmp_path, config, known, Records(tmp_path / "records"), {})
        text = (tmp_path / "results.jsonl").read_text()
        assert "Infinity" not in text and "NaN" not in text
        dense, magnitude = map(json.loads, text.splitlines())
        assert magnitude["test_perplexity"] is None and reason in magnitude["diverged"]
        assert dense["diverged"] is None
        (line,) = (line for line in summarize(rows, config.compared_with).itertuples() if line.kind == "one_shot")
        assert line.test == line.test_kl == math.inf, "the table calls it diverged"


def test_a_loss_too_large_for_a_perplexity_has_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = assessment.measure
    monkeypatch.setattr(
        assessment, "measure", lambda *args, **more: replace(measure(*args, **more), nll=800.0, perplexity=math.inf)
    )
    folder = write_model(tmp_path / "model")
    config = read_comparison(write(tmp_path, model=str(folder), one_shot={}))
    evaluator = Evaluator(config, Texts(["A dog ran home."], ["A cat sat there."], {}, []), config.pruned)
    with pytest.raises(NotFiniteError, match="the loss is 800 nats, too much for a perplexity"):
        evaluator.measure(folder, "validation")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_length": 1}, "validation text: evaluation_length 1: the model has 64 positions; use 2 to 64"),
        ({"evaluation_length": 100}, "validation text: evaluation_length 100: the model has 64 positions"),
        (
            {"test_text": {"path": "stdlib:heldout", "protocol": "windows"}},
            "test text: the text has .* evaluation_length",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused_before_a_model_is_loaded(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A record of them would refuse the corrected CONFIG in the same folder."""
    folder = write_model(tmp_path / "model")
    config = read_comparison(write(tmp_path, model=str(folder), one_shot={}, **settings))
    with pytest.raises(ValueError, match=message):
        Evaluator(config, Texts(["A dog ran home."], ["A cat."], {}, []), config.pruned)
