"""Configs of full-size models that are part of the package, and the parameter counts that are published for them."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from sparseforge_ds.model.model_config import read_model_config

PARAMETERS = {
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "facebook/opt-2.7b": 2_651_596_800,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "deepseek-ai/deepseek-moe-16b-base": 16_375_728_128,
}
"""Parameters by hub id, tied ones once: 1.7B (tied), 8.2B and 14.8B by Qwen3's model cards, 16.4B by DeepSeek's."""


def qwen3_14b(**overrides: Any) -> PretrainedConfig:
    """huggingface.co/Qwen/Qwen3-14B, or something like it."""
    config = read_model_config("Qwen/Qwen3-14B")
    for name, value in overrides.items():
        setattr(config, name, value)
    if "num_hidden_layers" in overrides:
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def llama2_7b() -> PretrainedConfig:
    """huggingface.co/meta-llama/Llama-2-7b-hf."""
    return read_model_config("meta-llama/Llama-2-7b-hf")


def gpt2_xl() -> PretrainedConfig:
    """huggingface.co/openai-community/gpt2-xl; the head is the embedding."""
    return read_model_config("openai-community/gpt2-xl")


def deepseek_moe_16b() -> PretrainedConfig:
    """huggingface.co/deepseek-ai/deepseek-moe-16b-base: a token uses 2.8B of its parameters."""
    return read_model_config("deepseek-ai/deepseek-moe-16b-base")
