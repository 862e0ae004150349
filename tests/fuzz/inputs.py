"""Folders that the fuzzer damages: runs as the trainer writes them, and what the tools make of them, all of it real."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.packed_format.packed_values import Grid
from tests.distributed import run_distributed
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_json, write_model, write_text
from tests.tiny_models import tiny_llama

BF16 = {"bf16": {"enabled": True}}

RUNS: dict[str, dict[str, Any]] = {
    "stage0_fp32": {"stage": 0},
    "stage1_bf16": {"stage": 1, "more": BF16},
    "stage2_fp32": {"stage": 2},
    "stage3_fp32": {"stage": 3},
    "stage3_bf16_low_rank": {"stage": 3, "more": BF16, "block": {"low_rank": {"k": 8}}},
    "stage2_low_rank": {"stage": 2, "block": {"low_rank": {"k": 8, "shift": False}}},
}
"""The runs whose folders are damaged: six steps on two ranks, saved at step 3 (unfinished) and at step 6."""
DONORS: dict[str, dict[str, Any]] = {
    "stage2_other_seed": {"stage": 2, "seed": 1},
    "stage3_other_seed": {"stage": 3, "seed": 1},
    "stage3_bf16": {"stage": 3, "more": BF16},
}
"""Runs of which single files end up in the folders of others; `one_rank_*` come on top."""
ONE_RANK = {"one_rank_stage2": {"stage": 2}, "one_rank_stage3": {"stage": 3}}
EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hf_whole": ("stage2_fp32", {}),
    "hf_shards": ("stage3_fp32", {"max_shard_size": "10KB"}),
    "hf_low_rank": ("stage3_bf16_low_rank", {}),
    "packed24": ("stage1_bf16", {"format": "packed24"}),
    "packed24_int8": ("stage1_bf16", {"format": "packed24", "grid": Grid("int8")}),
    "packed24_fp8": ("stage3_fp32", {"format": "packed24", "grid": Grid("fp8_e4m3")}),
    "packed24_int4": ("stage1_bf16", {"format": "packed24", "grid": Grid("int4", 16)}),
}
"""Exported folders: the run, and how it is exported."""
SCALED = ("packed24_int8", "packed24_fp8", "packed24_int4")
"""Those of them whose values have scales."""
STEPS = 6


def write_inputs(folder: Path) -> None:
    """Train all runs, below `folder`, each in a folder of its name."""
    write_model_and_text(folder)
    run_distributed(train_all, 2, str(folder), {**RUNS, **DONORS})
    run_distributed(train_all, 1, str(folder), ONE_RANK)
    flags = folder / "flags"
    flags.mkdir()
    for name in RUNS:
        write_json(flags / f"{name}.json", json.loads((folder / name / "sparseforge.json").read_text())["run"])
    for name, (run, options) in EXPORTS.items():
        export(open_source(folder / run), folder / name, skip_proof=True, **options)


def write_model_and_text(folder: Path) -> None:
    """Write what `train_all` trains: some thirty thousand parameters, and more text than it reads."""
    model = tiny_llama(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=None,
    )
    write_model(folder / "model", model)
    write_text(folder / "text.jsonl", documents=60)


def train_all(folder: str, runs: dict[str, dict[str, Any]]) -> None:
    """Run the trainer's own main function, once for every run, in one process group."""
    from sparseforge_ds.train import trainer

    torch.distributed.destroy_process_group = _stay  # main() ends with it; the next run needs the group
    for name, choice in runs.items():
        code = trainer.main(_command_line(Path(folder), name, choice))
        assert code == 0, f"{name} ended with exit code {code}"


def _stay(*_: object) -> None:
    """Leave the process group as it is."""


def _command_line(folder: Path, name: str, choice: dict[str, Any]) -> list[str]:
    content = deepspeed_json(stage=choice["stage"], batch=4, max_steps=STEPS, **choice.get("block", {}))
    content |= choice.get("more", {})
    path = folder / f"{name}.json"
    if os.environ["RANK"] == "0":
        write_json(path, content)
    torch.distributed.barrier()
    flags = {
        "deepspeed": path,
        "model": folder / "model",
        "dataset": folder / "text.jsonl",
        "output_dir": folder / name,
        "seq_length": 16,
        "log_every": 10,
        "save_every": STEPS // 2,
        "seed": choice.get("seed", 0),
        "learning_rate": 1e-3,
    }
    return [f"--{key}={value}" for key, value in flags.items()]
