"""Random models of real architectures, small enough for a test (20 to 40 thousand parameters, vocabulary of 64).

Mixtures have two layers of four experts, of which two compute a token; where a family allows it, the first is dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from sparseforge_ds.model.deepseek_moe import DeepseekConfig, register

register()

VOCABULARY = 64

LLAMA_LIKE: dict[str, Any] = {
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
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA_LIKE, **overrides}))


def tiny_qwen3(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Qwen3 with q/k norms and a tied head; `overrides` go to Qwen3Config."""
    torch.manual_seed(seed)
    config = {**LLAMA_LIKE, "head_dim": 8, "tie_word_embeddings": True, **overrides}
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


def tiny_opt(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """OPT with biases, a tied head, and project_in and project_out around a narrower embedding (as in 350M)."""
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0, "init_std": 0.1, "tie_word_embeddings": True}
    return random_model(OPTConfig, seed, {**LLAMA_LIKE, **sizes, **overrides})


def seeing_qwen3_5(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Qwen3.5 with its vision model, of which the causal class takes the text alone; `overrides` go to the text."""
    text = BUILDERS["qwen3_5_text"](**overrides).config
    seeing = {"hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(
        text_config=text.to_dict(),
        vision_config={**seeing, "patch_size": 4, "num_position_embeddings": 16},
        **{"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203},
    )
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config)


def seeing_llava(seed: int = 0) -> PreTrainedModel:
    """Llama with a vision model, in a family without rows; its files have older names than its memory."""
    seeing = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    seeing |= {"image_size": 8, "patch_size": 4, "projection_dim": 32}
    vision = {"model_type": "clip_vision_model", **seeing}
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(
        LlavaConfig(text_config={"model_type": "llama", **LLAMA_LIKE}, vision_config=vision, image_token_index=63)
    )


def tiny_mixture(config: type[PreTrainedConfig], seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a mixture of experts of any family; `overrides` go to its config class."""
    return random_model(config, seed, {**LLAMA_LIKE, **_MIXTURES[config], **overrides})


_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR_ATTENTION = {
    **{"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
_MIXTURES: dict[type[PreTrainedConfig], dict[str, Any]] = {
    DeepseekConfig: {**_ROUTED, "num_key_value_heads": 4},
    DeepseekV2Config: _LATENT,
    DeepseekV3Config: {**_LATENT, "n_group": 2, "topk_group": 1},
    Glm4MoeConfig: {**_ROUTED, "head_dim": 8, "n_group": 2, "topk_group": 1},
    GptOssConfig: {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    Llama4TextConfig: {
        **{"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        "interleave_moe_layer_step": 2,
    },
    MixtralConfig: {"num_local_experts": 4},
    OlmoeConfig: {"num_experts": 4, "num_experts_per_tok": 2},
    Qwen2MoeConfig: {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    Qwen3MoeConfig: {**_EXPERTS, "num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]},
    Qwen3NextConfig: {
        **{**_EXPERTS, "num_experts": 4, "mlp_only_layers": [0], "shared_expert_intermediate_size": 32},
        **_LINEAR_ATTENTION,
    },
    Qwen3_5MoeTextConfig: {
        **{**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
        **_LINEAR_ATTENTION,
    },
}


_GEMMA = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_DENSE: dict[type[PreTrainedConfig], dict[str, Any]] = {
    Cohere2Config: {"logit_scale": 0.5, "sliding_window": 8, "layer_types": _GEMMA["layer_types"]},
    FalconConfig: {"ffn_hidden_size": 64},
    Gemma2Config: _GEMMA,
    Gemma3TextConfig: _GEMMA,
    Glm4Config: {"head_dim": 8, "attention_bias": True},
    GPTNeoConfig: {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    GPTNeoXConfig: {"num_key_value_heads": 4},
    GraniteConfig: {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    **({transformers.InternLM3Config: {"head_dim": 8}} if hasattr(transformers, "InternLM3Config") else {}),  # newer
    MistralConfig: {},
    Olmo2Config: {},
    Olmo3Config: {"sliding_window": 8, "layer_types": _GEMMA["layer_types"]},
    Phi3Config: {},
    Qwen2Config: {},
    Qwen3_5TextConfig: _LINEAR_ATTENTION,
    SmolLM3Config: {"no_rope_layers": [1, 0]},
    Starcoder2Config: {},
}
"""Families of Llama's sizes, and what else their configs say here."""


def tiny_dense(config: type[PreTrainedConfig], seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a model without experts of one of those families; `overrides` go to its config class."""
    return random_model(config, seed, {**LLAMA_LIKE, **_DENSE[config], **overrides})


def random_model(config: type[PreTrainedConfig], seed: int, settings: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(**settings))


def _mixture(config: type[PreTrainedConfig]) -> Callable[..., PreTrainedModel]:
    return lambda seed=0, **overrides: tiny_mixture(config, seed, **overrides)


def _dense(config: type[PreTrainedConfig]) -> Callable[..., PreTrainedModel]:
    return lambda seed=0, **overrides: tiny_dense(config, seed, **overrides)


BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    **{config.model_type: _dense(config) for config in _DENSE},
    **{config.model_type: _mixture(config) for config in _MIXTURES},
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "opt": tiny_opt,
    "qwen3": tiny_qwen3,
}
"""A tiny model of every family by `model_type`; keywords `seed` and whatever its config class takes."""
MIXTURES = tuple(sorted(config.model_type for config in _MIXTURES))
"""Those with experts."""
ROUTERS = (".mlp.gate.weight", ".shared_expert_gate.weight", ".router.weight")
"""Ends of the names of routers, and of gates over whole outputs."""
LEFT_DENSE = (
    *ROUTERS,
    *(f".{layer}.weight" for layer in ("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "project_in", "project_out")),
)
"""Ends of the names of all matrices between embedding and head that rows keep dense."""
SCALED = ("cohere2", "gemma2", "granite")
"""Those that scale or cap what their head returns."""


def token_batch(batch: int = 2, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random input_ids and equal labels, both (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids.clone()}
