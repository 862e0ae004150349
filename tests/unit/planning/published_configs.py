"""Published config.json values of full-size models, and the parameter counts that are published for them."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from sparseforge_ds.model.deepseek_moe import DeepseekConfig, register

register()


def qwen3_14b(**overrides: Any) -> PretrainedConfig:
    """huggingface.co/Qwen/Qwen3-14B: 14.8B parameters, 13.2B without embeddings, by its model card."""
    values: dict[str, Any] = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    return Qwen3Config(**{**values, **overrides})


def llama2_7b() -> PretrainedConfig:
    """huggingface.co/meta-llama/Llama-2-7b-hf."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def gpt2_xl() -> PretrainedConfig:
    """huggingface.co/openai-community/gpt2-xl; the head is the embedding."""
    return GPT2Config(n_embd=1600, n_head=25, n_layer=48, vocab_size=50257, n_positions=1024)


def deepseek_moe_16b() -> PretrainedConfig:
    """huggingface.co/deepseek-ai/deepseek-moe-16b-base: 16.4B parameters, 2.8B of them used by a token."""
    return DeepseekConfig(
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        vocab_size=102400,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


PUBLISHED = {
    qwen3_14b: 14_768_307_200,
    llama2_7b: 6_738_415_616,
    gpt2_xl: 1_557_611_200,
    deepseek_moe_16b: 16_375_728_128,
}
