"""Sizes of common models by hub id, so that they are planned without the hub. Nothing is trained from this table.

Where the numbers come from: the published config.json files as LitGPT's table of models cites them one by one
(github.com/Lightning-AI/litgpt, litgpt/config.py, where a vocabulary is padded_vocab_size); the defaults of the config
classes of transformers, for OLMoE (but for its experts' 1,024) and Qwen1.5-MoE; NVIDIA's documentation of Megatron
Bridge, for GPT-OSS; AMD's Primus, for DeepSeek-V2-Lite. A test holds each against the size that its makers state.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig


def known_config(name: str) -> PretrainedConfig | None:
    """The config of a hub id, as far as sizes go; None where it is not known."""
    values = MODELS.get(name)
    return None if values is None else AutoConfig.for_model(**values)


def _sizes(model_type: str, hidden: int, mlp: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": False,
        **more,
    }


def _spelled(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """ "a/b|-c|-d" stands for a/b, a/b-c and a/b-d; "a/b-{x|y}-c" for a/b-x-c and a/b-y-c."""
    names: dict[str, dict[str, Any]] = {}
    for written, values in table.items():
        front, brace, rest = written.partition("{")
        if brace:
            kinds, _, behind = rest.partition("}")
            names |= {f"{front}{kind}{behind}": values for kind in kinds.split("|")}
        else:
            first, *suffixes = written.split("|")
            names |= {first + suffix: values for suffix in ("", *suffixes)}
    return names


_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 8192}
_LLAMA31 = {**_LLAMA3, "max_position_embeddings": 131072}
_TIED = {"tie_word_embeddings": True}
_QWEN25: dict[str, Any] = {"vocab_size": 152064, "max_position_embeddings": 131072}
_QWEN25_SMALL = {**_QWEN25, **_TIED, "vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN3: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128, "num_experts_per_tok": 8}
_GEMMA = {**_TIED, "vocab_size": 256000, "head_dim": 256, "max_position_embeddings": 8192}
_SMOLLM2 = {**_TIED, "vocab_size": 49152, "max_position_embeddings": 8192}
_PHI3: dict[str, Any] = {"vocab_size": 32064}
_GPT_OSS: dict[str, Any] = {"vocab_size": 201088, "head_dim": 64, "num_experts_per_tok": 4}
_SPARSE_LAYERS = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}

_LLAMA_31_8B = _sizes("llama", 4096, 14336, 32, 32, 8, **_LLAMA31)
_LLAMA_31_70B = _sizes("llama", 8192, 28672, 80, 64, 8, **_LLAMA31)
_LLAMA_31_405B = _sizes("llama", 16384, 53248, 126, 128, 8, **_LLAMA31)
_MISTRAL: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 32768}
_MISTRAL_V3 = {**_MISTRAL, "vocab_size": 32768}

MODELS: dict[str, dict[str, Any]] = _spelled(
    {
        "meta-llama/Llama-2-7b-chat-hf": _sizes("llama", 4096, 11008, 32, 32, 32, **_LLAMA2),
        "meta-llama/Llama-2-13b-{hf|chat-hf}": _sizes("llama", 5120, 13824, 40, 40, 40, **_LLAMA2),
        "meta-llama/Llama-2-70b-{hf|chat-hf}": _sizes("llama", 8192, 28672, 80, 64, 8, **_LLAMA2),
        "meta-llama/Meta-Llama-3-8B|-Instruct": _sizes("llama", 4096, 14336, 32, 32, 8, **_LLAMA3),
        "meta-llama/Meta-Llama-3-70B|-Instruct": _sizes("llama", 8192, 28672, 80, 64, 8, **_LLAMA3),
        "meta-llama/Llama-3.1-8B|-Instruct": _LLAMA_31_8B,
        "meta-llama/Meta-Llama-3.1-8B|-Instruct": _LLAMA_31_8B,
        "meta-llama/Llama-3.1-70B|-Instruct": _LLAMA_31_70B,
        "meta-llama/Meta-Llama-3.1-70B|-Instruct": _LLAMA_31_70B,
        "meta-llama/Llama-3.1-405B|-Instruct": _LLAMA_31_405B,
        "meta-llama/Meta-Llama-3.1-405B|-Instruct": _LLAMA_31_405B,
        "meta-llama/Llama-3.2-1B|-Instruct": _sizes("llama", 2048, 8192, 16, 32, 8, **{**_LLAMA31, **_TIED}),
        "meta-llama/Llama-3.2-3B|-Instruct": _sizes("llama", 3072, 8192, 28, 24, 8, **{**_LLAMA31, **_TIED}),
        "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_31_70B,
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_31_8B,
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": _LLAMA_31_70B,
        "TinyLlama/TinyLlama-1.1B{-intermediate-step-1431k-3T|-Chat-v1.0}": _sizes(
            "llama", 2048, 5632, 22, 32, 4, vocab_size=32000, max_position_embeddings=2048
        ),
        "HuggingFaceTB/SmolLM2-135M|-Instruct": _sizes("llama", 576, 1536, 30, 9, 3, **_SMOLLM2),
        "HuggingFaceTB/SmolLM2-360M|-Instruct": _sizes("llama", 960, 2560, 32, 15, 5, **_SMOLLM2),
        "HuggingFaceTB/SmolLM2-1.7B|-Instruct": _sizes("llama", 2048, 8192, 24, 32, 32, **_SMOLLM2),
        "mistralai/Mistral-7B-{v0.1|Instruct-v0.1|Instruct-v0.2}": _sizes(
            "mistral", 4096, 14336, 32, 32, 8, **_MISTRAL
        ),
        "mistralai/Mistral-7B-{v0.3|Instruct-v0.3}": _sizes("mistral", 4096, 14336, 32, 32, 8, **_MISTRAL_V3),
        "mistralai/Mixtral-8x7B-{v0.1|Instruct-v0.1}": _sizes("mixtral", 4096, 14336, 32, 32, 8, **_MISTRAL),
        "mistralai/Mixtral-8x22B-{v0.1|Instruct-v0.1}": _sizes(
            "mixtral", 6144, 16384, 56, 48, 8, vocab_size=32768, max_position_embeddings=65536
        ),
        "Qwen/Qwen2.5-0.5B|-Instruct": _sizes("qwen2", 896, 4864, 24, 14, 2, **_QWEN25_SMALL),
        "Qwen/Qwen2.5-1.5B|-Instruct": _sizes(
            "qwen2", 1536, 8960, 28, 12, 2, **{**_QWEN25_SMALL, "max_position_embeddings": 131072}
        ),
        "Qwen/Qwen2.5-3B|-Instruct": _sizes("qwen2", 2048, 11008, 36, 16, 2, **_QWEN25_SMALL),
        "Qwen/Qwen2.5-7B|-Instruct": _sizes("qwen2", 3584, 18944, 28, 28, 4, **_QWEN25),
        "Qwen/Qwen2.5-14B|-Instruct": _sizes("qwen2", 5120, 13824, 48, 40, 8, **_QWEN25),
        "Qwen/Qwen2.5-32B|-Instruct": _sizes("qwen2", 5120, 27648, 64, 40, 8, **_QWEN25),
        "Qwen/Qwen2.5-72B|-Instruct": _sizes("qwen2", 8192, 29568, 80, 64, 8, **_QWEN25),
        "Qwen/QwQ-32B": _sizes("qwen2", 5120, 27648, 64, 40, 8, **_QWEN25),
        "Qwen/Qwen3-0.6B|-Base": _sizes("qwen3", 1024, 3072, 28, 16, 8, **{**_QWEN3, **_TIED}),
        "Qwen/Qwen3-1.7B-Base": _sizes("qwen3", 2048, 6144, 28, 16, 8, **{**_QWEN3, **_TIED}),
        "Qwen/Qwen3-4B|-Base": _sizes("qwen3", 2560, 9728, 36, 32, 8, **{**_QWEN3, **_TIED}),
        "Qwen/Qwen3-8B-Base": _sizes("qwen3", 4096, 12288, 36, 32, 8, **_QWEN3),
        "Qwen/Qwen3-14B-Base": _sizes("qwen3", 5120, 17408, 40, 40, 8, **_QWEN3),
        "Qwen/Qwen3-32B": _sizes("qwen3", 5120, 25600, 64, 64, 8, **_QWEN3),
        "Qwen/Qwen3-30B-A3B|-Base": _sizes("qwen3_moe", 2048, 6144, 48, 32, 4, moe_intermediate_size=768, **_QWEN3_MOE),
        "Qwen/Qwen3-235B-A22B": _sizes("qwen3_moe", 4096, 12288, 94, 64, 4, moe_intermediate_size=1536, **_QWEN3_MOE),
        "Qwen/Qwen1.5-MoE-A2.7B": {"model_type": "qwen2_moe"},
        "allenai/OLMoE-1B-7B-0924": {"model_type": "olmoe", "intermediate_size": 1024},
        "allenai/OLMo-2-1124-7B|-Instruct": _sizes(
            "olmo2", 4096, 11008, 32, 32, 32, vocab_size=100352, max_position_embeddings=4096
        ),
        "allenai/OLMo-2-1124-13B|-Instruct": _sizes(
            "olmo2", 5120, 13824, 40, 40, 40, vocab_size=100352, max_position_embeddings=4096
        ),
        "deepseek-ai/DeepSeek-V2-Lite|-Chat": _sizes(
            "deepseek_v2",
            2048,
            10944,
            27,
            16,
            16,
            vocab_size=102400,
            moe_intermediate_size=1408,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            max_position_embeddings=32768,
            **_SPARSE_LAYERS,
        ),
        "openai/gpt-oss-20b": _sizes("gpt_oss", 2880, 2880, 24, 64, 8, num_local_experts=32, **_GPT_OSS),
        "openai/gpt-oss-120b": _sizes("gpt_oss", 2880, 2880, 36, 64, 8, num_local_experts=128, **_GPT_OSS),
        "microsoft/phi-1_5": _sizes("phi", 2048, 8192, 24, 32, 32, vocab_size=51200, max_position_embeddings=2048),
        "microsoft/phi-2": _sizes("phi", 2560, 10240, 32, 32, 32, vocab_size=51200, max_position_embeddings=2048),
        "microsoft/Phi-3-mini-4k-instruct": _sizes(
            "phi3", 3072, 8192, 32, 32, 32, max_position_embeddings=4096, **_PHI3
        ),
        "microsoft/phi-4": _sizes("phi3", 5120, 17920, 40, 40, 10, vocab_size=100352, max_position_embeddings=16384),
        "microsoft/Phi-4-mini-instruct": _sizes(
            "phi3", 3072, 8192, 32, 24, 8, vocab_size=200064, max_position_embeddings=131072, **_TIED
        ),
        "google/gemma-2b|-it": _sizes("gemma", 2048, 16384, 18, 8, 1, **_GEMMA),
        "google/gemma-7b|-it": _sizes("gemma", 3072, 24576, 28, 16, 16, **_GEMMA),
        "google/gemma-2-2b|-it": _sizes("gemma2", 2304, 9216, 26, 8, 4, **_GEMMA),
        "google/gemma-2-9b|-it": _sizes("gemma2", 3584, 14336, 42, 16, 8, **_GEMMA),
        "google/gemma-2-27b|-it": _sizes("gemma2", 4608, 36864, 46, 32, 16, **{**_GEMMA, "head_dim": 128}),
        "google/gemma-3-1b-{pt|it}": _sizes(
            "gemma3_text", 1152, 6912, 26, 4, 1, **{**_GEMMA, "vocab_size": 262144, "max_position_embeddings": 32768}
        ),
        "tiiuae/falcon-7b|-instruct": {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "multi_query": True,
            "max_position_embeddings": 2048,
        },
        "tiiuae/falcon-40b|-instruct": {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "vocab_size": 65024,
            "new_decoder_architecture": True,
            "max_position_embeddings": 2048,
        },
    }
)
"""Arguments of `AutoConfig.for_model` by hub id."""
