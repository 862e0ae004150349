"""Random models of real architectures, small enough for a test (about 20 thousand parameters, vocabulary of 64)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 64

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def tiny_llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Llama with grouped-query attention and an untied head; `overrides` go to LlamaConfig."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**_LLAMA_LIKE, **overrides}))


def tiny_qwen3(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Qwen3 with q/k norms and a tied head; `overrides` go to Qwen3Config."""
    torch.manual_seed(seed)
    config = {**_LLAMA_LIKE, "head_dim": 8, "tie_word_embeddings": True, **overrides}
    return Qwen3ForCausalLM(Qwen3Config(**config))


def tiny_gpt2(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """GPT-2 with Conv1D weights (input axis first), no dropout; `overrides` go to GPT2Config."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.1,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return GPT2LMHeadModel(GPT2Config(**{**config, **overrides}))


def token_batch(batch: int = 2, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random input_ids and equal labels, both (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids.clone()}
