"""Layouts: positions of the channels of a hidden vector along an axis of a tensor.

A layout takes the config of the text model, the shape of the tensor and the axis (negative), and returns positions
along the axis: (copies, blocks, channels). Each block has an order of its own; all copies share one. For fused experts
(experts, out, in), positions count along experts times the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ChannelLayout = Callable[[Any, tuple[int, ...], int], Tensor]


def whole_axis(_config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return all positions, in one block for every fused expert."""
    experts = shape[0] if len(shape) == 3 else 1
    return torch.arange(experts * shape[axis]).view(1, experts, shape[axis])


def shared(_config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return all positions, with the same channels in every fused expert."""
    return whole_axis(_config, shape, axis).transpose(0, 1)


def stacked(_config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return the positions of gate and up, end to end in one weight of an MLP or of every fused expert."""
    experts = shape[0] if len(shape) == 3 else 1
    return torch.arange(experts * shape[axis]).view(experts, 2, -1).transpose(0, 1)


def values(config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return a block for every key-value head."""
    return torch.arange(shape[axis]).view(1, _key_value_heads(config), -1)


def attended(config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return the outputs of query heads, which have the channels of the key-value head that their group shares."""
    groups = _key_value_heads(config)
    return torch.arange(shape[axis]).view(groups, config.num_attention_heads // groups, -1).transpose(0, 1)


def values_of_fused(config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return a block for every value head in a weight with all queries, then all keys, then all values."""
    heads = _key_value_heads(config)
    width = shape[axis] // (config.num_attention_heads + 2 * heads)
    return torch.arange(shape[axis] - heads * width, shape[axis]).view(1, heads, -1)


def values_of_groups(config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return a block for every value head in a weight with the queries, the key and the value of each group in turn."""
    heads = _key_value_heads(config)
    group_GHD = torch.arange(shape[axis]).view(heads, config.num_attention_heads // heads + 2, -1)
    return group_GHD[:, -1][None]


def values_of_latent(config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return a block for every value head in the weight of latent attention that computes keys and values."""
    head_HD = torch.arange(shape[axis]).view(1, config.num_attention_heads, -1)
    return head_HD[..., config.qk_nope_head_dim :]


def each_head(config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return a block for every query head."""
    return torch.arange(shape[axis]).view(1, config.num_attention_heads, -1)


def key_value_latent(config: Any, _shape: tuple[int, ...], _axis: int) -> Tensor:
    """Return the compressed keys and values, in front of the part with rotary positions."""
    return torch.arange(config.kv_lora_rank).view(1, 1, -1)


def embedded(config: Any, shape: tuple[int, ...], axis: int) -> Tensor:
    """Return all positions of OPT's embedding, or none if a projection leads from it to the residual stream."""
    projected = config.word_embed_proj_dim != config.hidden_size
    return torch.empty(0, 1, config.hidden_size, dtype=torch.long) if projected else whole_axis(config, shape, axis)


def _key_value_heads(config: Any) -> int:
    """Return the number of key-value heads."""
    if hasattr(config, "num_kv_heads"):  # Falcon; its older models have one head, or as many as queries
        grouped = config.new_decoder_architecture or not config.multi_query
        return int(config.num_kv_heads) if grouped else 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
