"""A packed24 folder of a Llama with random weights, or of a Qwen3-MoE with --experts, for measurements of speed.

python -m benchmarks.packed_llama OUT [--hidden_size 1536] [--layers 8] [--experts 64] [--values int4:64] ...
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from sparseforge_ds.export.model_folder import stored_grid
from sparseforge_ds.extras.packed24.packed_experts import pack_experts, packed_kind
from sparseforge_ds.extras.packed24.packed_linear import Packed24Linear
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, parse_grid, round_values
from sparseforge_ds.packed_format.packing import PACKED24, PACKED24_FORMAT, POSITIONS, pack24


def config_of(args: argparse.Namespace) -> PreTrainedConfig:
    """Return the config of a Llama, or of a mixture in which 8 experts compute a token."""
    sizes: dict[str, Any] = {
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden_size // 64,
        "num_key_value_heads": args.hidden_size // 64,
        "head_dim": 64,
        "vocab_size": args.vocabulary,
        "dtype": getattr(torch, args.dtype),
        "quantization_config": {"quant_method": PACKED24, "format": PACKED24_FORMAT, "semi_structured": False},
    }
    if args.values:
        sizes["quantization_config"] |= stored_grid(args.values)
    if args.experts:
        return Qwen3MoeConfig(**sizes, num_experts=args.experts, moe_intermediate_size=args.intermediate_size)
    return LlamaConfig(**sizes, intermediate_size=args.intermediate_size)


def write(out: str, config: PreTrainedConfig, grid: Grid | None) -> None:
    """Write a model whose linear layers but the head, and experts, keep the first two of each group of four."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, trust_remote_code=False)
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            values, positions, scale = _packed(layer.weight, grid)
            model.model.set_submodule(name, Packed24Linear(values, positions, layer.bias, scale))
        elif kind := packed_kind(layer):
            parts = {name: _packed(weight, grid) for name, weight in layer.named_parameters()}
            pack_experts(layer, kind, list(parts), grid)
            for name, (values, positions, scale) in parts.items():
                setattr(layer, name, nn.Parameter(values, requires_grad=False))
                setattr(layer, name + POSITIONS, positions)
                if scale is not None:
                    setattr(layer, name + SCALE, scale)
    model._weight_conversions = []  # names of its own: those of saved files would split values and not positions
    model.save_pretrained(out)


def _packed(parameter: Tensor, grid: Grid | None) -> tuple[Tensor, Tensor, Tensor | None]:
    weight = parameter.detach()
    weight.view(*weight.shape[:-1], -1, 4)[..., 2:] = 0
    values, positions = pack24(weight, -1)
    if grid is None:
        return values, positions, None
    codes, scale = round_values(values, -1, grid)
    return codes, positions, scale


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--intermediate_size", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--values", type=parse_grid, metavar="NAME[:GROUP]")
    args = parser.parse_args()
    write(args.out, config_of(args), args.values)
