from __future__ import annotations

from pathlib import Path

import pytest

from sparseforge_ds.extras.studies.records import Records, write_rows
from sparseforge_ds.extras.studies.runs import Run
from sparseforge_ds.extras.studies.settings import read_comparison
from tests.unit.extras.studies.test_settings import write


def test_a_run_is_what_it_was_begun_as(tmp_path: Path) -> None:
    records = Records(tmp_path / "records")
    assert records.read("a") is None
    assert records.open("a", {"steps": 3, "window": (0, 1)})["wanted"] == {"steps": 3, "window": [0, 1]}
    records.write("a", {**records.open("a", {"steps": 3, "window": (0, 1)}), "test_perplexity": 4.0})
    assert records.open("a", {"steps": 3, "window": [0, 1]})["test_perplexity"] == 4.0
    with pytest.raises(
        ValueError, match=r"the run a was started with other settings \(seed, steps\); give another --out"
    ):
        records.open("a", {"steps": 4, "window": [0, 1], "seed": 1})
    (tmp_path / "records" / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json: damaged"):
        records.open("a", {"steps": 3})


def test_rows_say_what_runs_cost_and_where_they_computed(tmp_path: Path) -> None:
    config = read_comparison(write(tmp_path, seeds=[0], budgets=[40], one_shot={}))
    records = Records(tmp_path / "records")
    measured = {"validation_perplexity": 3.0, "path": 0.6, "start": {"tokens": 1000, "epochs": 4, "seconds": 1.0}}
    runs = {(name, 40): Run(method, 0.5, 0, 40) for name, method in config.methods.items()}
    for run, sparsity in zip(runs.values(), ({"elements": 2000}, None), strict=True):
        hardware = {"hardware": {"dtype": "bfloat16", "device": "cuda"}} if sparsity else {}
        record = {**measured, "wanted": hardware}
        records.write(run.name, {**record, "start": measured["start"] if sparsity else None, "sparsity": sparsity})
    baselines = {f"{kind}_{text}": 3.0 for kind in ("dense", "magnitude") for text in ("validation", "test")}
    with_start, without = write_rows(tmp_path, config, baselines, records, runs)[2:]
    tokens = 40 * 8 * 256
    assert (with_start["tokens"], with_start["all_tokens"]) == (tokens, tokens + 4000)
    assert with_start["tokens_a_weight"] == (tokens + 4000) / 2000 and with_start["path"] == 0.6
    assert (with_start["dtype"], with_start["device"]) == ("bfloat16", "cuda")
    assert without["dtype"] is without["device"] is None, "records of earlier versions do not say it"
    assert (without["tokens"], without["all_tokens"], without["tokens_a_weight"]) == (tokens, None, None)


def test_texts_and_models_may_be_called_by_other_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = tmp_path / "study"
    (study / "model").mkdir(parents=True)
    (study / "a.jsonl").touch()
    records = Records(tmp_path / "records")
    for folder, prefix in ((tmp_path, "study/"), (study, ""), (Path("/"), f"{study}/")):
        monkeypatch.chdir(folder)
        records.open("a", {"dataset": [f"{prefix}a.jsonl"], "model": f"{prefix}model"})
    with pytest.raises(ValueError, match=r"other settings \(dataset"):
        records.open("a", {"dataset": ["b.jsonl"], "model": f"{study}/model"})
    # A folder that was moved is called from inside as before.
    study.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    records.open("a", {"dataset": ["study/a.jsonl"], "model": "study/model"})
