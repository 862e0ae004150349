"""Mixtures of experts through the commands: train with a teacher, resume, export with its proof, verify, load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.evaluate.finished_model import load_model
from sparseforge_ds.model.deepseek_moe import DeepseekConfig
from tests.end_to_end.test_train import differences, flags_of, states, train
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_model, write_text
from tests.tiny_models import tiny_mixture

MIXTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "deepseek": (DeepseekConfig, {"aux_loss_alpha": 0.01}),
    "qwen3_moe": (Qwen3MoeConfig, {"output_router_logits": True, "router_aux_loss_coef": 0.01}),
}
LAYER = "model.layers.1.mlp.experts"


def scalars(run: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_trains_exports_and_resumes_by_commands(family: str, tmp_path: Path) -> None:
    config, more = MIXTURES[family]
    size = {"vocab_size": BYTE_VOCABULARY, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    write_model(tmp_path / "model", tiny_mixture(config, **size, **more))
    # As in folders that were published with code of their own, which is neither run nor passed on.
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    described["auto_map"] = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    write_text(tmp_path / "text.jsonl", documents=200)
    flags = flags_of(tmp_path, deepspeed_json(batch=4))
    train(*flags)

    run = tmp_path / "run"
    out = tmp_path / "out"
    logged = scalars(run)
    # Even use of E experts gives E (sum of f P) = 1 a layer, or K of it where all chosen ones count.
    assert all(0.005 < balance < 0.05 for balance in logged["loss/balance"])
    weights = DistillationConfig()
    losses = zip(*(logged[f"loss/{x}"] for x in ("total", "kl", "cross_entropy", "balance")), strict=True)
    for total, kl, cross_entropy, balance in losses:
        distilled = weights.weight * kl + weights.task_weight * cross_entropy
        assert total == pytest.approx(distilled + balance, rel=1e-4)
    assert logged["experts/unseen"][-1] == 0.0
    assert logged[f"experts/load_min/{LAYER}"][-1] <= 1.0 <= logged[f"experts/load_max/{LAYER}"][-1]

    assert main(["export", str(run), str(out), "--format", "hf"]) == 0
    assert main(["verify", str(out)]) == 0
    # Saved names went in and come out, one tensor an expert.
    dense = TensorFolder(tmp_path / "model")
    sparse = TensorFolder(out)
    assert sparse.specs.keys() == dense.specs.keys() and f"{LAYER}.3.up_proj.weight" in sparse.specs
    assert all(sparse.specs[name].shape == spec.shape for name, spec in dense.specs.items())
    sparsity = json.loads((out / "sparsity.json").read_text())
    with_ours = family == "deepseek"
    assert sparsity["proof"]["logits"] == "bit-equal"
    assert sparsity["proof"]["loaded_by"] == "transformers" + " with sparseforge_ds" * with_ours
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    coverage = sparsity["coverage"]
    assert all(name.endswith("gate.weight") for name in coverage["dense"])  # the routers
    assert coverage["masked"] == coverage["linear"] - sum(coverage["dense"].values()) < coverage["linear"]
    state = load_model(str(out)).state_dict()
    for name in ("gate_up_proj", "down_proj"):
        kept_GM = (state[f"{LAYER}.{name}"] != 0).reshape(-1, 4).sum(dim=1)
        assert torch.equal(kept_GM, torch.full_like(kept_GM, 2))

    # The second half again, from the checkpoint in the middle.
    again = tmp_path / "again"
    content = [flag if not flag.startswith("--output_dir") else f"--output_dir={again}" for flag in flags]
    again.mkdir()
    for item in run.iterdir():
        if item.name not in ("result.json", "tensorboard"):
            item.rename(again / item.name)
    (again / "checkpoints" / "step_000008").rename(tmp_path / "finished")
    train(*content, "--resume")
    assert differences(states(tmp_path / "finished"), states(again / "checkpoints" / "step_000008")) == []
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == family
