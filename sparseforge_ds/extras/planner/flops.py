"""FLOPs of a pass: of the weights, and of attention, which grow with the sequence."""

from __future__ import annotations

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
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        return of_weights
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    if getattr(text, "qk_nope_head_dim", None):  # latent attention: head_dim is only the part with rotary positions
        width = (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) / 2
    return of_weights + 4 * heads * width * _keys(text, seq_length)


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


def attention_kinds(text: PretrainedConfig) -> list[str]:
    """Return the kind of every layer that has attention over the sequence, in the words of `layer_types`."""
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        window = getattr(text, "sliding_window", None)
        kinds = [f"{'sliding' if window else 'full'}_attention"] * int(text.num_hidden_layers)
    return [kind for kind in kinds if kind not in _NO_ATTENTION]


def _keys(text: PretrainedConfig, seq_length: int) -> float:
    """Return the mean number of tokens that one attends to, summed over layers; unknown kinds attend to all before."""
    window = getattr(text, "sliding_window", None)
    chunk = getattr(text, "attention_chunk_size", None)
    keys = 0.0
    for kind in attention_kinds(text):
        if kind == "chunked_attention":
            keys += min(chunk or seq_length, seq_length) / 2
        else:
            reach = min((kind == "sliding_attention" and window) or seq_length, seq_length)
            keys += reach * (1 - reach / (2 * seq_length))
    return keys
