"""FLOPs of a pass: of the weights, and of attention, which grow with the sequence."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PretrainedConfig

from sparseforge_ds.model.architecture import Architecture

_NO_ATTENTION = {"linear_attention", "conv", "moe", "mlp", "sparse", "dense"}
"""Entries of a config's `layer_types` without attention over the sequence."""


def forward_flops(config: PretrainedConfig, model: Architecture, seq_length: int) -> float:
    """Return the FLOPs of one token.

    They are two for each weight that it uses, and two for each number of a key and a value that it attends to.
    """
    text = config.get_text_config()
    of_weights = 2.0 * (model.active - model.looked_up)
    return of_weights + sum(_attention_flops(layer, seq_length) for layer in attention_layers(text))


def head_flops(model: Architecture) -> float:
    """Return the FLOPs of one token's logits."""
    return 2.0 * model.vocabulary * model.hidden


def training_flops(forward: float, model: Architecture, checkpointing: bool) -> float:
    """Return the FLOPs of one token that is trained on.

    A backward pass takes twice the FLOPs of a forward pass. Logits are not kept, so it computes them again. For a
    teacher, add `head_flops` of it.

    Args:
        forward: of the student, from `forward_flops`.
        model: the student.
        checkpointing: True if the backward pass computes activations of decoder layers again.
    """
    head = head_flops(model)
    return (3 + checkpointing) * (forward - head) + 4 * head


class AttentionLayer(NamedTuple):
    """A layer that has attention over the sequence."""

    kind: str
    """Its attention, in the words of `layer_types`."""
    config: PretrainedConfig
    """Config with its own sizes."""
    heads: int


def attention_layers(text: PretrainedConfig) -> list[AttentionLayer]:
    """Return the layers that have attention over the sequence."""
    # Sizes of heads may be each layer's own, as in Gemma 4: the model's config refuses to say them then.
    has_own_sizes = getattr(text, "is_heterogeneous", False)
    if not has_own_sizes and getattr(text, "num_attention_heads", None) is None:
        return []
    kinds = getattr(text, "layer_types", None) or [None] * int(text.num_hidden_layers)
    configs = list(text.per_layer_config) if has_own_sizes else [text] * len(kinds)
    layers = []
    for kind, config in zip(kinds, configs, strict=True):
        if kind is None:
            kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        if kind not in _NO_ATTENTION:
            layers.append(AttentionLayer(kind, config, config.num_attention_heads))
    return layers


def _attention_flops(layer: AttentionLayer, seq_length: int) -> float:
    """Return the FLOPs of one token's attention in a layer, over the mean number of tokens that it attends to."""
    config = layer.config
    width = getattr(config, "head_dim", None) or config.hidden_size // layer.heads
    if getattr(config, "qk_nope_head_dim", None):  # latent attention: head_dim is only the part with rotary positions
        width = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    if layer.kind == "chunked_attention":
        keys = min(getattr(config, "attention_chunk_size", None) or seq_length, seq_length) / 2
    else:  # unknown kinds attend to all tokens before
        window = getattr(config, "sliding_window", None) if layer.kind == "sliding_attention" else None
        reach = min(window or seq_length, seq_length)
        keys = reach * (1 - reach / (2 * seq_length))
    return 4 * layer.heads * width * keys
