"""Runs on a model that `sparseforge permute` wrote: what they prune, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.model.basis import PERMUTATION, basis_of
from tests.end_to_end.test_train import flags_of, train
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_model, write_text
from tests.tiny_models import BUILDERS
from tests.unit.extras.basis.permutation.test_channels import randomized

ONE_STEP = {"method": "naive_retrain", "max_steps": 1, "distillation": None}
NO_TRAINING = 1e-30
"""Learning rate of a step that changes no weight."""


def dense_model(folder: Path, family: str) -> Path:
    write_text(folder / "text.jsonl", documents=200)
    more = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    return write_model(folder / "model", randomized(BUILDERS[family](vocab_size=BYTE_VOCABULARY, **more)))


def permuted(dense: Path, *words: str) -> Path:
    """Return the folder that `sparseforge permute` makes of a dense model."""
    out = dense.with_name("permuted")
    assert main(["permute", str(dense), str(out), *words]) == 0
    return out


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=torch.arange(3, 35).view(2, 16)).logits


@pytest.mark.parametrize(
    ("family", "stage", "by_activations"), [("llama", 3, True), ("gpt2", 1, False), ("qwen3_moe", 3, True)]
)
def test_a_run_prunes_the_permuted_model(tmp_path: Path, family: str, stage: int, by_activations: bool) -> None:
    """Start a run from the folder like from any other; its export has the order beside it."""
    dense = dense_model(tmp_path, family)
    run = tmp_path / "run"
    out = tmp_path / "out"
    text = ("--text", str(tmp_path / "text.jsonl"), "--sequences", "4", "--seq_length", "32")
    # The permuted model computes what the dense one does.
    permuted_folder = permuted(dense, *(text if by_activations else ()))
    torch.testing.assert_close(logits(permuted_folder), logits(dense), rtol=1e-4, atol=2e-5)
    # A run from it, without training, so that kept weights can be compared.
    train(*flags_of(tmp_path, deepspeed_json(stage, **ONE_STEP), model=permuted_folder, learning_rate=NO_TRAINING))
    assert main(["consolidate", str(run), str(out)]) == 0
    assert main(["verify", str(out)]) == 0
    # Every weight is 2:4 in the order of the permuted model.
    expected = TensorFolder(permuted_folder)
    exported = TensorFolder(out)
    rows = json.loads((out / "sparsity.json").read_text())["weights"]
    for name in exported.specs:
        value = exported.read(name)
        of_dense = expected.read(name)
        assert torch.equal(value, torch.where(value != 0, of_dense, 0.0)), name
        if name in rows:
            group_GM = NM(2, 4).to_groups(value.reshape(-1), tuple(value.shape), rows[name]["input_axis"])
            assert ((group_GM != 0).sum(1) == 2).all()
    # The order keeps more of the scores, and run and export name it.
    order = json.loads((permuted_folder / PERMUTATION).read_text())
    assert order["score"] == ("activations" if by_activations else "magnitude")
    assert all(score["after"] > score["before"] for score in order["kept_score"].values())
    for folder in (run / "model", out):
        assert basis_of(folder) == {PERMUTATION: order["sha256"]}
