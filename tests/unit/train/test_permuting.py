"""What rank 0 checks before it looks for an order of channels."""

from __future__ import annotations

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.train.permuting import check_room
from sparseforge_ds.train.spec import make_spec
from tests.tiny_folders import deepspeed_json, write_json, write_model, write_text


def test_a_model_that_rank_0_cannot_hold_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    path = write_json(tmp_path / "ds.json", deepspeed_json(permute={"score": "activations"}))
    text = write_text(tmp_path / "text.jsonl")
    spec = make_spec(
        RunArguments(
            deepspeed=str(path),
            model=str(write_model(tmp_path / "model")),
            dataset=[str(text)],
            seq_length=32,
            output_dir=str(tmp_path / "run"),
        ),
        world_size=1,
    )
    check_room(spec, torch.device("cpu"))
    monkeypatch.setattr(get_accelerator(), "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r'rank 0 loads the whole model, .* GiB free; use "score": "magnitude"'):
        check_room(spec, torch.device("cpu"))
