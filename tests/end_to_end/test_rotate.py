"""`sparseforge rotate` as a user meets it: a folder of the same function, trained and exported like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparseforge_ds.cli.main import main
from sparseforge_ds.model.basis import basis_of
from sparseforge_ds.train.trainer import main as launch
from tests.end_to_end.test_permute import ONE_STEP, dense_model, logits
from tests.end_to_end.test_train import flags_of, train
from tests.tiny_folders import deepspeed_json

SMALL = ("--seq_length", "32", "--sequences", "4", "--steps", "20")


def rotated(folder: Path, family: str, *more: str) -> Path:
    dense = dense_model(folder, family)
    out = folder / "rotated"
    assert main(["rotate", str(dense), str(out), "--text", str(folder / "text.jsonl"), *SMALL, *more]) == 0
    return out


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_the_folder_computes_the_same_and_is_of_the_same_family(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = rotated(tmp_path, family)
    dense = tmp_path / "model"
    torch.testing.assert_close(logits(out), logits(dense), rtol=1e-3, atol=1e-4)
    ours, reference = (json.loads((folder / "config.json").read_text()) for folder in (out, dense))
    differing = {key for key in ours.keys() | reference.keys() if ours.get(key) != reference.get(key)}
    assert differing <= {"tie_word_embeddings", "transformers_version", "dtype"} and not ours["tie_word_embeddings"]
    facts = json.loads((out / "rotation.json").read_text())
    assert facts["removed"] < 1 and facts["kl"] < 1e-6 and facts["tokens"] == 4 * 32
    assert (out / "tokenizer.json").is_file()
    assert main(["rotate", str(out), str(tmp_path / "twice"), "--text", str(tmp_path / "text.jsonl"), *SMALL]) == 2
    assert f"{out}: is rotated already (rotation.json); start from the dense model" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    states = [
        AutoModelForCausalLM.from_pretrained(rotated(tmp_path / name, "llama", "--seed", "5")).state_dict()
        for name in ("one", "two")
    ]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_model_in_16_bits_stays_in_16_bits(tmp_path: Path) -> None:
    dense = dense_model(tmp_path, "llama")
    AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16).save_pretrained(dense)
    out = tmp_path / "rotated"
    assert main(["rotate", str(dense), str(out), "--text", str(tmp_path / "text.jsonl"), *SMALL]) == 0
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    assert 0 < json.loads((out / "rotation.json").read_text())["kl"] < 0.02


def test_a_run_prunes_the_rotated_and_permuted_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Start a run from the folder like from any other; its results name the basis, and another one is refused."""
    out = tmp_path / "permuted"
    run = tmp_path / "run"
    sparse = tmp_path / "sparse"
    assert main(["permute", str(rotated(tmp_path, "qwen3")), str(out)]) == 0
    flags = flags_of(tmp_path, deepspeed_json(3, **ONE_STEP), model=out)
    train(*flags)
    assert main(["consolidate", str(run), str(sparse), "--skip_proof"]) == 0
    assert main(["verify", str(sparse)]) == 0
    expected = basis_of(out)
    assert expected.keys() == {"permutation.json", "rotation.json"}
    assert basis_of(run / "model") == basis_of(sparse) == expected
    capsys.readouterr()
    (out / "rotation.json").rename(out / "lost")
    assert launch([*flags, "--resume"]) == 1
    assert "has its channels in another order or basis than the model that the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("gemma2", (), "can be permuted, not rotated"),
        ("llama", ("--pattern", "block16"), "is no n:m pattern"),
        ("llama", ("--steps", "0"), "--steps 0: use an integer >= 1"),
        ("llama", ("--seq_length", "99999999"), "positions; use 1 to "),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, more: tuple[str, ...], message: str
) -> None:
    dense = dense_model(tmp_path, family)
    out = tmp_path / "rotated"
    assert main(["rotate", str(dense), str(out), "--text", str(tmp_path / "text.jsonl"), *SMALL, *more]) != 0
    assert message in capsys.readouterr().err
    assert not out.exists()
