"""Sparse models on disk without a training run: a dense model, its magnitude mask, and the folder that is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparseforge_ds.checkpoint.tensors import TensorSpec
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.source import Source
from sparseforge_ds.mask.pattern import top_n
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.model.saved_names import saved_tensors
from tests.tiny_models import BUILDERS, tiny_llama

_TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS = BUILDERS | {
    "llama-tied": lambda: tiny_llama(tie_word_embeddings=True),
    "llama-odd": lambda: tiny_llama(hidden_size=20, intermediate_size=28, **_TWO_HEADS),  # 5 groups a row: half a byte
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelSource(Source):
    """A model in memory under its magnitude mask, as if a run had learned that mask and nothing else."""

    def __init__(self, model: PreTrainedModel, folder: Path, dtype: torch.dtype, pattern: str = "2:4") -> None:
        config = SparseForgeConfig(pattern=pattern)
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        self.pattern = config.parsed_pattern
        self.dtype = dtype
        # Tensors as a file names them: fused ones are parts of a tensor in memory.
        state = {name: value.to(dtype) for name, value in model.state_dict().items() if name not in tied}
        positions = saved_tensors(model.config.model_type, {name: tuple(value.shape) for name, value in state.items()})
        self._dense = {n: state[p.memory_name].view(-1)[p.start : p.stop].view(p.shape) for n, p in positions.items()}
        self.specs = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in self._dense.items()}
        self.fused_name = {
            name: position.memory_name for name, position in positions.items() if position.memory_name != name
        }
        # What can be pruned, by the names of files.
        axes = {weight.name: weight.input_axis for weight in prunable_weights(model, config)}
        self.prunable = {
            n: SparseWeight(n, p.shape, axes[p.memory_name]) for n, p in positions.items() if p.memory_name in axes
        }
        self.model_folder = self.folder = folder
        self.model_config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        self.branches = {}
        # The record of an export.
        self.record = {
            "format": 1,
            "pattern": str(self.pattern),
            "finished": True,
            "step": 7,
            "source": {"checkpoint": "step-7"},
            "dtype": str(dtype).removeprefix("torch."),
            "coverage": {},
            "run": {},
            "config": config.to_dict(),
        }

    def read(self, name: str) -> Tensor:
        value = self._dense[name].clone()
        return torch.where(self.read_mask(name), value, 0.0) + 0.0 if name in self.prunable else value

    def read_mask(self, name: str) -> Tensor:
        weight = self.prunable[name]
        size_GM = self.pattern.to_groups(self._dense[name].abs().reshape(-1), weight.shape, weight.input_axis)
        kept_GM = top_n(size_GM, self.pattern.kept_count)
        return self.pattern.from_groups(kept_GM, weight.shape, weight.input_axis).view(weight.shape)


def write_dense(folder: Path, family: str, dtype: str = "float32", **options: Any) -> Path:
    """Write the dense model, as transformers saves it."""
    model = MODELS[family]().to(DTYPES[dtype])
    model.save_pretrained(folder, **options)
    return folder


def write_sparse(folder: Path, dense: Path, family: str, dtype: str = "float32", **options: Any) -> Path:
    """Write the sparse model of `write_dense`, as `consolidate` does; `options` has pattern and max_shard_size."""
    source = ModelSource(MODELS[family](), dense, DTYPES[dtype], options.pop("pattern", "2:4"))
    export(source, folder, skip_proof=True, **options)
    return folder


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, which differ for -0.0 and 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def sparse_model(
    model: PreTrainedModel, zeros: dict[str, Tensor] | None = None, pattern: str = "2:4"
) -> PreTrainedModel:
    """Set all but the largest of every group to zero in place; note in `zeros` what is pruned."""
    config = SparseForgeConfig(pattern=pattern)
    for weight in prunable_weights(model, config):
        value = model.get_parameter(weight.name).data
        group_GM = config.parsed_pattern.to_groups(value.reshape(-1), weight.shape, weight.input_axis)
        kept_GM = top_n(group_GM.abs().float(), config.parsed_pattern.kept_count)
        kept = config.parsed_pattern.from_groups(kept_GM, weight.shape, weight.input_axis).view(weight.shape)
        value.mul_(kept)
        if zeros is not None:
            zeros[weight.name] = ~kept
    return model
