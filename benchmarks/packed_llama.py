"""A packed24 folder of a Llama with random weights, for measurements of speed.

python -m benchmarks.packed_llama OUT [--hidden_size 1536] [--layers 8] ...
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparseforge_ds.mask.packing import PACKED24, PACKED24_FORMAT, pack24
from sparseforge_ds.runtime.packed_linear import Packed24Linear


def write(out: str, hidden_size: int, intermediate_size: int, layers: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Every linear layer but the head is 2:4, the first two of each group of four being kept."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        vocab_size=vocabulary,
        dtype=dtype,
        quantization_config={"quant_method": PACKED24, "format": PACKED24_FORMAT, "semi_structured": False},
    )
    model = LlamaForCausalLM(config).to(dtype)
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach()
            weight.view(weight.shape[0], -1, 4)[..., 2:] = 0
            model.model.set_submodule(name, Packed24Linear(*pack24(weight, -1), layer.bias))
    model.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--intermediate_size", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    write(args.out, args.hidden_size, args.intermediate_size, args.layers, args.vocabulary, getattr(torch, args.dtype))
