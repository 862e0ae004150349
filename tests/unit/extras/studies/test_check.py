from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, MixtralConfig

from sparseforge_ds.cli.main import main
from sparseforge_ds.extras.studies.assessment import Evaluator
from sparseforge_ds.extras.studies.check import check_methods, check_prunings
from sparseforge_ds.extras.studies.settings import read_comparison
from sparseforge_ds.extras.studies.texts import Texts
from tests.tiny_folders import BYTE_VOCABULARY, write_model, write_text
from tests.tiny_models import tiny_mixture
from tests.unit.extras.studies.test_settings import write
from tests.unit.model.test_uncovered import tiny

OURS: dict[str, Any] = {"method": {"update_every": 2}}


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    mixture = write_model(tmp_path / "model", tiny_mixture(MixtralConfig, vocab_size=BYTE_VOCABULARY))
    write_text(tmp_path / "train.jsonl")
    write_text(tmp_path / "heldout.jsonl")
    return {"model": str(mixture), "seq_length": 32, "batch": 4}


def test_what_can_run_passes(tmp_path: Path, content: dict[str, Any]) -> None:
    cast = {"method": {"name": "cast", "scaling": False}, "decays": [0.01, 0.1]}
    path = write(tmp_path, **content, methods={"ours": OURS, "cast": cast})
    before = check_methods(read_comparison(path))
    assert before.keys() == {"ours", "cast"} and before == check_methods(read_comparison(path))
    write_text(tmp_path / "train.jsonl", 41)  # under the same name
    after = check_methods(read_comparison(path))["ours"].files
    assert {key for key, value in after.items() if value != before["ours"].files[key]} == {"dataset_files"}
    write_model(tmp_path / "model", tiny_mixture(MixtralConfig, seed=1, vocab_size=BYTE_VOCABULARY))
    later = check_methods(read_comparison(path))["ours"].files
    assert {key for key, value in after.items() if value != later[key]} == {"model_files", "teacher_files"}


def test_baselines_of_a_family_without_rows_prune_what_runs_do(tmp_path: Path, content: dict[str, Any]) -> None:
    """Let the baseline prune what the runs do."""
    bloom = write_model(tmp_path / "bloom", tiny(BloomConfig, n_layer=2, n_head=4, vocab_size=BYTE_VOCABULARY)())
    changes = {**content, "model": str(bloom), "flags": {"any_family": True}, "methods": {"ours": OURS}}
    config = read_comparison(write(tmp_path, **changes, one_shot={}))
    checked = check_methods(config)["ours"].config
    assert checked.include
    texts = Texts(["a b c"] * 3, ["d e f"] * 3, {}, [])
    assert Evaluator(config, texts, checked).baselines({}).keys() >= {"dense_test", "magnitude_test"}


def test_peft_is_missed_before_hours_of_training(
    tmp_path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = {**content, "model": str(write_model(tmp_path / "dense"))}
    config = read_comparison(write(tmp_path, **dense, methods={"branch": {**OURS, "low_rank": {"k": 4}}}, one_shot={}))
    assert check_methods(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"methods\.branch: peft is missing"):
        check_methods(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": {"ours": OURS, "cast": {"method": "cast"}}},
            "methods.cast with 40 steps: .*has no weight scaling",
        ),
        (
            {"one_shot": {"once": {"mask": "sparsegpt"}}},
            r'one_shot.once: start.mask "sparsegpt" .--mask of prune. needs',
        ),
        ({"one_shot": {"once": {"pattern": "4:4"}}}, "one_shot.once: pattern 4:4 keeps everything"),
        ({"one_shot": {"once": {}}, "train_text": "owner/set"}, "one_shot.once: .*owner/set"),
        (
            {"methods": {"ours": {**OURS, "flags": {"teacher": "nothing"}}}},
            "methods.ours with 40 steps: --teacher nothing",
        ),
        (
            {"methods": {"ours": {**OURS, "flags": {"teacher_logits": "."}}}},
            "methods.ours with 40 steps: --teacher_logits .*: has no logits; make them by sparseforge teach",
        ),
        ({"model": "nothing"}, "nothing"),
        ({"base": {}}, 'methods.ours with 40 steps: --deepspeed base: no "optimizer"'),
    ],
)
def test_what_cannot_is_named_before_anything_is_made(
    tmp_path: Path,
    content: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = write(tmp_path, **{"methods": {"ours": OURS}, "one_shot": {}, **content, **changes})
    with pytest.raises(ValueError, match=message):
        check_prunings(read_comparison(path))
        check_methods(read_comparison(path))
    said = []
    for flags in ([], ["--dry_run"]):
        assert main(["compare", path, "--out", str(tmp_path / "out"), *flags]) == 2
        said.append(capsys.readouterr().err)
        assert said[-1].count("error: ") == 1
    assert said[0][said[0].index("error: ") :] == said[1][said[1].index("error: ") :], "a dry run refuses the same"
    assert not (tmp_path / "out").exists()
