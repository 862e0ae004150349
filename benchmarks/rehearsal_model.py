"""Layers of published models with random weights, as a Hugging Face folder that the launcher takes for a real model.

Widths, heads and experts are those of the published config.json; layers and vocabulary are fewer. Weights have the
names that `save_pretrained` writes, one entry per expert. They are made one after the other, and depend on the seed,
their name and their shape alone.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

import sparseforge_ds
from sparseforge_ds.checkpoint.tensors import TensorSpec
from sparseforge_ds.export.writer import write_tensors
from sparseforge_ds.model.deepseek_moe import register
from sparseforge_ds.model.model_config import read_model_config

TOKENIZER = Path(sparseforge_ds.__file__).parent / "assets" / "stdlib_llama"
"""A tokenizer of `VOCABULARY` pieces that is part of the package."""
VOCABULARY = 1024

HUB_IDS = {"qwen3_14b": "Qwen/Qwen3-14B", "deepseek_moe_16b": "deepseek-ai/deepseek-moe-16b-base"}
"""Hub ids, whose published config.json is part of the package, by the name of the recipe."""
_DIVIDED = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads")


def hub_config(name: str, **changes: Any) -> PretrainedConfig:
    """Return the published config, with `changes`."""
    config = read_model_config(HUB_IDS[name])
    values = {key: value for key, value in config.to_dict().items() if key != "layer_types"}  # follows the layers
    return type(config)(**{**values, **changes})


def rehearsal_config(name: str, layers: int, vocabulary: int, experts: int | None, shrink: int) -> PretrainedConfig:
    """Return the config of a small model with the published layer shapes.

    Args:
        name: key of `HUB_IDS`.
        layers: decoder layers. A mixture whose first layer is dense begins with a mixture when it has one layer only.
        vocabulary: rows of embedding and head, at least those of the tokenizer.
        experts: routed experts of a layer, None for the published number.
        shrink: divides widths and heads; 1 for the published ones. The width of a head stays.

    Raises:
        ValueError: the model has no experts, more are asked for than published, or `shrink` does not divide.
    """
    values = hub_config(name).to_dict()
    changes: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": vocabulary, "dtype": "bfloat16"}
    changes |= {"bos_token_id": 1, "eos_token_id": 2, "head_dim": 128}
    for key in _DIVIDED:
        if key in values:
            if values[key] % shrink:
                raise ValueError(f"--shrink {shrink}: does not divide {key} = {values[key]}; use a power of 2")
            changes[key] = values[key] // shrink
    if layers == 1 and "first_k_dense_replace" in values:
        changes["first_k_dense_replace"] = 0
    if experts is not None:
        most = values.get("n_routed_experts")
        least = values.get("num_experts_per_tok", 1)
        if most is None or not least <= experts <= most:
            allowed = "it has none" if most is None else f"use {least} to {most}"
            raise ValueError(f"--experts {experts}: {name} cannot have so many: {allowed}")
        changes["n_routed_experts"] = experts
    return hub_config(name, **changes)


def write_model(folder: Path, config: PretrainedConfig, seed: int) -> int:
    """Write config, weights in bf16 and tokenizer; at most one of these tensors is in memory.

    Returns:
        Bytes of the weights.
    """
    register()
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    specs = {name: TensorSpec(shape, torch.bfloat16) for name, shape in _saved_shapes(model)}
    std = float(getattr(config, "initializer_range", 0.02))

    def make(name: str) -> dict[str, Tensor]:
        return {name: _random(name, specs[name].shape, seed, std)}

    write_tensors(folder, "model", specs, make, max_shard_bytes=5_000_000_000)
    return sum(spec.nbytes for spec in specs.values())


def write_text(path: Path) -> None:
    """Some real prose, one document per chapter of Python's language reference."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics))


def _saved_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes that `save_pretrained` writes, where every expert has matrices of its own."""
    for name, parameter in model.named_parameters():
        layer, result, weight = name.partition(".experts.")
        if not result:
            yield name, tuple(parameter.shape)
            continue
        experts, outputs, inputs = parameter.shape
        parts = ("gate_proj", "up_proj") if weight == "gate_up_proj" else (weight,)
        for number in range(experts):
            for part in parts:
                yield f"{layer}.experts.{number}.{part}.weight", (outputs // len(parts), inputs)


def _random(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)  # a norm
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # of a seed, 32 bits count
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, std, generator=generator)
