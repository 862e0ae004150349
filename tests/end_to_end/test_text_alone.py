"""A model that also sees, of which transformers' causal class takes the text alone: trained, exported, masked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from tests.end_to_end.test_train import flags_of, train
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_model, write_text
from tests.tiny_models import seeing_qwen3_5


def test_the_export_is_a_model_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = seeing_qwen3_5(vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257)
    write_model(tmp_path / "model", model)
    write_text(tmp_path / "text.jsonl", documents=200)
    train(*flags_of(tmp_path, deepspeed_json(batch=4)))
    run = str(tmp_path / "run")

    for out, arguments in (("out", []), ("again", ["--model", str(tmp_path / "model")])):
        assert main(["export", run, str(tmp_path / out), "--format", "hf", *arguments]) == 0
        assert main(["verify", str(tmp_path / out)]) == 0
        described = json.loads((tmp_path / out / "config.json").read_text())
        assert (described["model_type"], described["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
        assert not any("language_model" in name or "visual" in name for name in TensorFolder(tmp_path / out).specs)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert model.config.model_type == "qwen3_5_text" and not any(report.values())
