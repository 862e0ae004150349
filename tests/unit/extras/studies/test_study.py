"""Measurements of a comparison after a run was trained anew."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate.perplexity import NotFiniteError
from sparseforge_ds.extras.studies import study
from sparseforge_ds.extras.studies.check import threads_of_environment
from sparseforge_ds.extras.studies.records import settled
from sparseforge_ds.extras.studies.settings import read_comparison
from sparseforge_ds.extras.studies.study import Study
from sparseforge_ds.extras.studies.training import StoppedError, Trainer
from sparseforge_ds.train.spec import Hardware
from tests.tiny_folders import deepspeed_json, write_model, write_text
from tests.unit.extras.studies.test_settings import write


@pytest.mark.parametrize("resumed", [False, True])
def test_no_model_of_an_earlier_run_is_taken_for_a_new_one(resumed: bool, tmp_path: Path) -> None:
    """Remove a record, as the message about other settings advises.

    A run that went on may have exported its own model when it was interrupted.
    """
    study: Any = object.__new__(Study)
    model = tmp_path / "model"
    existed = []
    model.mkdir()
    study.config = read_comparison(write(tmp_path))
    if resumed:
        (tmp_path / "run" / "checkpoints" / "step_000001").mkdir(parents=True)
    study.trainer = SimpleNamespace(train=lambda *_: ({"seconds": 1.0}, resumed))
    measured = {"validation_perplexity": 3.0, "validation_kl": 0.5}
    study.evaluator = SimpleNamespace(export=lambda _, out: existed.append(out.exists()), measure=lambda *_: measured)
    run = SimpleNamespace(arguments=lambda *_: [])
    record = study.train_run(run, tmp_path / "run", model, 0)
    assert record["validation_perplexity"] == 3.0 and existed == [resumed]
    assert record["seconds"] == (None if resumed else 1.0), "those of a last launch alone are no training time"


def test_a_run_that_is_stopped_leaves_no_model_of_an_earlier_one(tmp_path: Path) -> None:
    """Else the next launch, which resumes it, would take that model for its own."""

    def stop(folder: Path, *_: Any) -> None:
        (folder / "checkpoints" / "step_000001").mkdir(parents=True)
        raise StoppedError

    study: Any = object.__new__(Study)
    model = tmp_path / "model"
    model.mkdir()
    study.config = read_comparison(write(tmp_path))
    study.trainer = SimpleNamespace(train=stop)
    with pytest.raises(StoppedError):
        study.train_run(SimpleNamespace(arguments=lambda *_: []), tmp_path / "run", model, 0)
    assert not model.exists()


def test_a_model_without_a_finite_loss_has_diverged(tmp_path: Path) -> None:
    def measure(*_: Any) -> dict[str, float]:
        raise NotFiniteError("the loss is nan")

    study: Any = object.__new__(Study)
    study.config = read_comparison(write(tmp_path))
    study.trainer = SimpleNamespace(train=lambda *_: ({"seconds": 1.0}, False))
    study.evaluator = SimpleNamespace(export=lambda *_: {"zeros": 0.5}, measure=measure)
    record = study.train_run(SimpleNamespace(arguments=lambda *_: []), tmp_path / "run", tmp_path / "model", 0)
    assert record["diverged"] == "validation text: the loss is nan" and settled(record)


def test_threads_that_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, threads in (("", None), ("3", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert threads_of_environment() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS=many: use an integer >= 1"):
        threads_of_environment()


def stop_at_once(*_: Any) -> None:
    raise StoppedError


def test_a_study_goes_on_only_where_it_computes_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows in fp32 of a CPU, and others in bf16 of a GPU, are no comparison of methods."""
    monkeypatch.setattr(Trainer, "train", stop_at_once)
    base = {key: value for key, value in deepspeed_json(stage=1).items() if key != "sparseforge"}
    content = {
        "model": str(write_model(tmp_path / "model")),
        "train_text": str(write_text(tmp_path / "train.jsonl")),
        "test_text": {"path": str(write_text(tmp_path / "heldout.jsonl")), "documents": [4, 6]},
        "base": {**base, "bf16": {"enabled": "auto"}},
        "methods": {"fixed": {"method": "naive_retrain", "importance": "magnitude"}},
        "one_shot": {},
        "seeds": [0],
        "budgets": [2],
        "learning_rates": [1e-3],
        "seq_length": 32,
        "batch": 4,
        "threads": 1,
    }
    command = ["compare", write(tmp_path, **content), "--out", str(tmp_path / "out")]
    records = tmp_path / "out" / "records"
    run = records / "fixed-lr0.001-seed0-steps2.json"

    def said() -> str:
        assert main(command) == 2
        return capsys.readouterr().err

    # A place that is no folder is refused before the models and texts are read.
    with monkeypatch.context() as early:
        early.setattr(study, "check_study", lambda *_: pytest.fail("the study was checked"))
        assert main([*command[:-1], str(tmp_path / "train.jsonl" / "out")]) == 2
        assert "train.jsonl is a file; give another place" in capsys.readouterr().err
    # A record says what it was made on.
    assert "the same command goes on" in said()
    assert json.loads(run.read_text())["wanted"]["hardware"] == {"dtype": "float32", "device": "cpu"}
    # Where "auto" means bf16, or models are on a GPU, the study is refused, and goes on where it was.
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Hardware, "here", classmethod(lambda cls: cls(bf16=True, fp16=True, fused=False)))
        # A method that was added before it is not begun there.
        more = {"new": {"method": "naive_retrain", "importance": "magnitude"}, **content["methods"]}
        write(tmp_path, **{**content, "methods": more})
        assert "hardware: float32 on cpu, and here bfloat16 on cpu; continue on hardware like the first" in said()
        assert not list(records.glob("new*"))
        write(tmp_path, **content)
        # Records of earlier versions do not say it, and go on as they did.
        record = json.loads(run.read_text())
        for settings in (record["wanted"], record["resolved"]):
            del settings["hardware"]
        run.write_text(json.dumps(record))
        assert "the same command goes on" in said()
    baselines = records / "baselines.json"
    baselines.write_text(baselines.read_text().replace('"cpu"', '"cuda"'))
    assert "the run baselines was started with other settings (hardware: cuda, and here cpu" in said()
