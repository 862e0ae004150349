"""The learned low-rank branch (SLoRB, design eq. 13) as a PEFT LoRA adapter.

Ours is y = x (w^T + P^T B^T) with P (in/k, in) a fixed sum over runs of k inputs; LoRA's is y = x w^T + s x A^T B^T. So
lora_A is P, lora_B is B, and lora_alpha equals the rank in/k of each layer, which makes the scale s 1.

Its files lie beside the weights, in the model's own folder: there `from_pretrained` of transformers finds the adapter
by itself, wherever the folder is moved to, if peft is installed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.tensors import TensorSpec, hash_file, write_tensors
from sparseforge_ds.export.source import Source

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def adapter_folder(folder: Path) -> Path:
    """Where the adapter of an exported folder is: beside the weights, or in `adapter`, where it once was.

    Raises:
        ValueError: it is in neither place.
    """
    for place in (folder, folder / "adapter"):
        if (place / CONFIG).is_file() and (place / TENSORS).is_file():
            return place
    raise ValueError(
        f"{folder}: its low-rank adapter is missing ({CONFIG}, {TENSORS}), without which the weights compute nonsense; "
        "copy it there, or export again"
    )


def block_sum(inputs: int, rank: int, dtype: torch.dtype) -> Tensor:
    """P (rank, inputs): row j has ones where the j-th of `rank` equal runs of inputs lies."""
    return torch.eye(rank, dtype=dtype).repeat_interleave(inputs // rank, dim=1)


def adapter_record(source: Source, folder: Path) -> dict[str, Any]:
    """What `sparsity.json` says of the adapter in `folder`: its file, and the hash of that."""
    if not source.branches:
        return {"adapter": None}
    return {"adapter": TENSORS, "adapter_sha256": hash_file(folder / TENSORS)}


def write_branches(source: Source, folder: Path) -> None:
    """`write_adapter` for all branches of a source, which has some."""
    weights = {name: source.prunable[f"{name}.weight"] for name in source.branches}
    inputs = {name: weight.shape[weight.input_axis] for name, weight in weights.items()}
    transposed = next(iter(weights.values())).input_axis == -2
    write_adapter(folder, source.branches, inputs, source.read_branch, transposed, source.dtype)


def write_adapter(
    folder: Path,
    branches: Mapping[str, tuple[int, int]],
    inputs: Mapping[str, int],
    read: Callable[[str], Tensor],
    transposed: bool,
    dtype: torch.dtype,
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        branches: module name -> shape of its B, (out, in/k).
        inputs: module name -> in.
        read: module name -> B.
        transposed: the layers are GPT-2's Conv1D, whose weight is (in, out).
        dtype: of the stored tensors.
    """
    folder.mkdir(exist_ok=True)
    ranks = {name: shape[1] for name, shape in branches.items()}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    unusual = {name: rank for name, rank in ranks.items() if rank != usual}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": unusual,
        "alpha_pattern": unusual,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": sorted(branches),
        "use_rslora": False,
        "use_dora": False,
    }
    specs = {}
    for name, shape in branches.items():
        specs[f"base_model.model.{name}.lora_A.weight"] = TensorSpec((ranks[name], inputs[name]), dtype)
        specs[f"base_model.model.{name}.lora_B.weight"] = TensorSpec(shape, dtype)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in branches:
            yield f"base_model.model.{name}.lora_A.weight", block_sum(inputs[name], ranks[name], dtype)
            yield f"base_model.model.{name}.lora_B.weight", read(name).to(dtype)

    write_tensors(folder, "adapter_model", specs, tensors(), max_shard_bytes=1 << 62)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
