"""Models whose sequences can be divided, and the part that a rank then holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.planner.activation_memory import Activations, Pass, trace
from sparseforge_ds.model.sequence_parallel import check_divided
from tests.tiny_models import BUILDERS, LLAMA_LIKE, tiny_llama, tiny_mixture

DIVIDED = ("gpt2", "llama", "mistral", "mixtral", "olmoe", "opt", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def tiny(config: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    return config(**{**LLAMA_LIKE, "head_dim": 8, **more})


@pytest.mark.parametrize("family", DIVIDED)
def test_families_whose_layers_ask_transformers_for_attention(family: str) -> None:
    check_divided(BUILDERS[family]().config, 2, 32)


def test_heads_of_keys_are_repeated() -> None:
    check_divided(tiny(LlamaConfig, num_key_value_heads=1), 4, 32)
    check_divided(BUILDERS["deepseek"](aux_loss_alpha=0.0).config, 2, 32)


LONG_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REFUSED: dict[str, tuple[PretrainedConfig, int, int, str]] = {
    "length": (tiny(LlamaConfig), 4, 30, "--seq_length 30 is not a multiple of 4; use 28 or 32"),
    "heads": (tiny(LlamaConfig), 3, 30, "4 attention heads and 2 of keys and values, .* use 2 or 4"),
    "latent": (BUILDERS["deepseek_v3"]().config, 2, 32, "16, 16 and 8 wide"),
    "balance": (BUILDERS["deepseek"]().config, 2, 32, "set aux_loss_alpha to 0 in its config.json"),
    "router": (BUILDERS["mixtral"](output_router_logits=True).config, 2, 32, "set output_router_logits to false"),
    "window": (tiny(MistralConfig, sliding_window=16), 2, 32, "sliding window of 16 tokens.* use --seq_length 16"),
    "eager": (tiny(Gemma2Config), 2, 32, "its attention is eager"),
    "sinks": (tiny_mixture(GptOssConfig).config, 2, 32, "its attention is eager"),
    "alibi": (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), 2, 32, "its attention is eager"),
    "own attention": (BUILDERS["falcon"]().config, 2, 32, "0 of its 2 layers call the attention of transformers"),
    "recurrent": (tiny(Qwen3NextConfig), 2, 32, "conv1d is a convolution over tokens"),
    "positions": (BUILDERS["llama4_text"]().config, 2, 32, "do not hand position_ids on to attention"),
    "rotary": (tiny(LlamaConfig, rope_parameters=LONG_ROPE), 2, 32, "its rotary positions are dynamic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_connects_tokens_otherwise_is_refused(name: str) -> None:
    config, parts, length, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        check_divided(config, parts, length)


def test_a_window_that_is_not_reached_is_none() -> None:
    check_divided(tiny(MistralConfig, sliding_window=32), 2, 32)


def traced(parts: int, checkpointing: bool, **more: Any) -> Activations:
    config = tiny_llama(**more).config
    step = Pass(torch.float32, micro_batch=2, seq_length=512, parts=parts, checkpointing=checkpointing)
    return trace(config, SparseForgeConfig.from_dict({}), step, config)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_divided(checkpointing: bool) -> None:
    full, half, quarter = (traced(parts, checkpointing) for parts in (1, 2, 4))
    for name in ("saved", "backward", "teacher"):
        all_of_it, of_half, of_quarter = (getattr(item, name) for item in (full, half, quarter))
        # The exchange holds copies of queries, keys and values; 4 parts repeat the 2 heads of keys and values.
        assert 0.5 <= of_half / all_of_it < 0.62, name
        assert 0.25 <= of_quarter / all_of_it < 0.34, name
