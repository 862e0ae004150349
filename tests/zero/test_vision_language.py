"""The language tower of a vision-language model, chosen by `include` as the guide says, on real ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Gemma3Config, PreTrainedModel, Qwen3VLConfig

from sparseforge_ds.cli.main import main
from tests.distributed import ROOT, run_distributed
from tests.tiny_models import LLAMA_LIKE
from tests.zero.case import Case, StepText, build, published, train_step

_TEXT = {**LLAMA_LIKE, "head_dim": 8}
_SEEING = {"hidden_size": 16, "intermediate_size": 32}
CONFIGS: dict[str, Any] = {
    "gemma3": lambda: Gemma3Config(
        text_config={**_TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={
            **_SEEING,
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        },
        **{"mm_tokens_per_image": 4, "image_token_id": 60, "boi_token_id": 61, "eoi_token_id": 62},
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={
            **_TEXT,
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0},
                **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
            },
        },
        vision_config={
            **_SEEING,
            **{"depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4},
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **{"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63},
    ),
}
BLOCKS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "include": ["model.language_model.layers.*_proj.weight"],
        "exclude": ["model.vision_tower.*", "model.multi_modal_projector.*"],
    },
    "qwen3_vl": {"include": ["model.language_model.layers.*_proj.weight"], "exclude": ["model.visual.*"]},
}
STAGES = {"gemma3": 3, "qwen3_vl": 2}


def seeing(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[family]())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".language_model." in name or name == "lm_head.weight")
    return model


def train_towers(folder: Path) -> list[tuple[Any, ...]]:
    results = []
    for family, block in BLOCKS.items():
        case = Case(stage=STAGES[family], config=block)
        engine, forge = build(case, seeing(family).train())
        losses = []
        for step in range(case.steps):
            losses.append(train_step(engine, case, step))
            forge.step(StepText(engine, case, step))
        forge.finish()
        engine.save_checkpoint(str(folder / family))
        results.append(([weight.name for weight in forge.weights], losses, published(engine)))
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("towers")


@pytest.fixture(scope="module")
def towers(folder: Path) -> dict[str, tuple[Any, ...]]:
    return dict(zip(BLOCKS, run_distributed(train_towers, 2, folder)[0], strict=True))


@pytest.mark.parametrize("family", BLOCKS)
def test_the_language_tower_is_sparse_and_the_others_are_as_they_were(
    family: str, towers: dict[str, tuple[Any, ...]]
) -> None:
    names, losses, after = towers[family]
    before = dict(seeing(family).named_parameters())
    assert len(names) == 14 and all(name.startswith("model.language_model.layers.") for name in names)
    assert all(map(math.isfinite, losses))
    for name in names:
        kept = after[name].view_as(before[name]) != 0
        assert torch.equal(kept.view(-1, 4).sum(dim=1), torch.full((kept.numel() // 4,), 2)), name
        assert not torch.equal(after[name].view_as(kept)[kept], before[name][kept]), name
    records = [name for name, parameter in before.items() if not parameter.requires_grad]
    assert records and all(torch.equal(after[name].view_as(before[name]), before[name]) for name in records)


def test_an_export_is_the_whole_model(
    towers: dict[str, tuple[Any, ...]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Export a class that is no causal one, in the dtype that config.json has with the text model's settings alone."""
    dense = seeing("qwen3_vl").bfloat16()
    dense.save_pretrained(folder / "dense")
    config = json.loads((folder / "dense" / "config.json").read_text())
    config["text_config"]["dtype"] = config.pop("dtype")
    (folder / "dense" / "config.json").write_text(json.dumps(config))
    out = folder / "out"
    checkpoint = str(folder / "qwen3_vl")
    assert main(["consolidate", checkpoint, str(out), "--model", str(folder / "dense")]) == 0
    assert "proved: loaded by transformers, logits bit-equal" in capsys.readouterr().out
    model, report = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.bfloat16
    after = towers["qwen3_vl"][2]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, after[name].view_as(parameter).bfloat16()), name
    assert main(["export", str(out), str(folder / "half"), "--dtype", "float16"]) == 0


def test_the_guide_has_these_blocks() -> None:
    guide = (ROOT / "docs" / "guides" / "families.md").read_text()
    for block in BLOCKS.values():
        for key, globs in block.items():
            assert f'"{key}": [{", ".join(f"{chr(34)}{glob}{chr(34)}" for glob in globs)}]' in guide
