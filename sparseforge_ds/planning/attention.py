"""Attention that has the shapes and the memory of a fused kernel (flash attention), and no result.

It keeps q, k, v, its output and one fp32 number a token and head for the backward pass, never a square of the sequence
length. A model on the meta device that runs with it looks at no numbers, which transformers' own masks would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "sparseforge_planned"
"""As `attn_implementation` of a transformers model."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        B, H, S, _ = query.shape
        output_BSHD = value.new_empty(B, S, H, value.shape[-1])
        ctx.save_for_backward(query, key, value, output_BSHD, query.new_empty(B, H, S, dtype=torch.float32))
        return output_BSHD

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _output, _sums = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attention(_module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """An attention implementation of transformers that has the shapes and the memory, and no result."""
    return _Attention.apply(query, key, value), None  # type: ignore[no-untyped-call]


AttentionInterface.register(NAME, attention)
