"""PEFT LoRA adapters that hold low-rank branches (SLoRB, eq. 13).

Ours is y = x (w^T + P^T B^T) with P (rank, in) a fixed sum over runs of k inputs, or learned; LoRA's is
y = x w^T + s x A^T B^T. So lora_A is P, lora_B is B, and lora_alpha equals the rank of each layer, which makes the
scale s 1. The files lie beside the weights, where `from_pretrained` of transformers finds the adapter by itself if peft
is installed.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.tensors import TensorSpec
from sparseforge_ds.export.source import Source
from sparseforge_ds.export.writer import write_tensors
from sparseforge_ds.model.branch import run_length
from sparseforge_ds.model.families import LOW_RANK, PROJECTION

ADAPTER_STEM = "adapter_model"
"""Stem of the file in which PEFT stores the tensors of an adapter."""
ADAPTER_TENSORS = f"{ADAPTER_STEM}.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def require_adapter(folder: Path) -> None:
    """Raise ValueError unless the adapter of an exported folder lies beside its weights."""
    if not ((folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER_TENSORS).is_file()):
        raise ValueError(
            f"{folder}: its low-rank adapter is missing ({ADAPTER_CONFIG}, {ADAPTER_TENSORS}), without which "
            "the weights compute nonsense; copy it there, or export again"
        )


def reject_foreign_adapter(folder: Path, sparsity: dict[str, Any]) -> None:
    """Raise ValueError for an adapter beside the weights that the folder's `sparsity.json`, if any, does not name."""
    if not sparsity.get("adapter") and (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder}: has a PEFT adapter beside its weights ({ADAPTER_CONFIG}), which transformers loads with them "
            "and sparseforge export did not write; merge it into the weights, prune those again, or take it out"
        )


def block_sum(inputs: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return a fixed P, (ceil(inputs / k), inputs): row j has ones for the j-th run of at most k inputs."""
    k = run_length(inputs, k)
    return torch.eye(math.ceil(inputs / k), dtype=dtype).repeat_interleave(k, dim=1)[:, :inputs].contiguous()


_PREFIX = "base_model.model."
_MATRICES = {LOW_RANK: "lora_B.weight", PROJECTION: "lora_A.weight"}
"""End of a tensor's name in an adapter, by its end in the model."""


def key_of(name: str) -> str:
    """Return the name in an adapter of a tensor of `Source.branch_specs`."""
    module, _, leaf = name.rpartition(".")
    return f"{_PREFIX}{module}.{_MATRICES[leaf]}"


def branch_of_key(key: str) -> str | None:
    """Return the name in `Source.branch_specs` of an adapter's tensor, or None if no adapter of ours has such a key."""
    for leaf, matrix in _MATRICES.items():
        if key.startswith(_PREFIX) and key.endswith(f".{matrix}"):
            return key.removeprefix(_PREFIX).removesuffix(matrix) + leaf
    return None


def write_adapter(source: Source, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` of a source that has branches."""
    weights = {name: source.prunable[f"{name}.weight"] for name in source.branches}
    inputs = {name: weight.shape[weight.input_axis] for name, weight in weights.items()}
    ranks = {name: shape[1] for name, shape in source.branches.items()}
    # PEFT has one rank for all layers, and patterns for the layers with another.
    common_rank = Counter(ranks.values()).most_common(1)[0][0]
    other_ranks = {name: rank for name, rank in ranks.items() if rank != common_rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": common_rank,
        "lora_alpha": common_rank,
        "rank_pattern": other_ranks,
        "alpha_pattern": other_ranks,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": next(iter(weights.values())).input_axis == -2,  # GPT-2's Conv1D
        "target_modules": sorted(source.branches),
        "use_rslora": False,
        "use_dora": False,
    }
    specs = {}
    for name, shape in source.branches.items():
        specs[key_of(f"{name}.{PROJECTION}")] = TensorSpec((ranks[name], inputs[name]), source.dtype)
        specs[key_of(f"{name}.{LOW_RANK}")] = TensorSpec(shape, source.dtype)

    low_rank = source.low_rank

    def make(name: str) -> dict[str, Tensor]:
        """Return both matrices of a layer."""
        p_name = f"{name}.{PROJECTION}"
        b_name = f"{name}.{LOW_RANK}"
        p = source.read_branch(p_name) if low_rank.learned else block_sum(inputs[name], low_rank.k, source.dtype)
        return {key_of(p_name): p, key_of(b_name): source.read_branch(b_name)}

    write_tensors(folder, ADAPTER_STEM, specs, make, list(source.branches))
    write_json(folder / ADAPTER_CONFIG, config)


def adapter_rank(folder: Path) -> int:
    """Return the largest rank in a folder's adapter, which an inference engine must be told."""
    adapter = read_json_object(folder / ADAPTER_CONFIG)
    ranks = [adapter.get("r"), *(adapter.get("rank_pattern") or {}).values()]
    return max((rank for rank in ranks if isinstance(rank, int)), default=0)
