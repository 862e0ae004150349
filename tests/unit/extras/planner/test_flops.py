"""Operations of a token against sums written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.extras.planner.advice import cache_of_sequence
from sparseforge_ds.extras.planner.flops import forward_flops, head_flops, training_flops
from sparseforge_ds.model.architecture import architecture_of, bare_model
from sparseforge_ds.model.head import Head, Target, head_of, hidden_states, loss_in_head
from sparseforge_ds.transformers_internals import checkpoint_activations
from tests.tiny_models import tiny_llama
from tests.unit.extras.planner.hub_configs import gpt2_xl, qwen3_14b

LENGTH = 64
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 40}


def of_attention(config: PretrainedConfig, length: int = LENGTH) -> float:
    model = architecture_of(bare_model(config, torch.bfloat16), ())
    return forward_flops(config, model, length) - 2 * (model.active - model.looked_up)


def seen(reach: int) -> float:
    """Tokens that one sees in the mean, itself a half."""
    return sum(min(position, reach) for position in range(1, LENGTH + 1)) / LENGTH


def test_a_long_sequence_costs_almost_half_as_much_again() -> None:
    assert of_attention(qwen3_14b(), 32_768) == 2 * 32_768 * 40 * 128 * 40
    assert of_attention(qwen3_14b(), 32_768) / (2 * 14_768_307_200) == pytest.approx(0.45, abs=0.005)
    assert of_attention(gpt2_xl(), 1024) == 2 * 1024 * 1600 * 48  # whose config has no head_dim


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("mistral", {"head_dim": 8, "sliding_window": 8}, 4 * seen(8)),
        ("mistral", {"head_dim": 8, "sliding_window": None}, 4 * seen(LENGTH)),
        (
            "gemma3_text",
            {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            3 * seen(16) + seen(LENGTH),
        ),
        (
            "qwen3_next",
            {"head_dim": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            seen(LENGTH),
        ),
        (
            "llama4_text",
            {"head_dim": 8, "attention_chunk_size": 16, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
            3 * 16 / 2 + seen(LENGTH),
        ),
    ],
)
def test_layers_that_see_less_cost_less(kind: str, changes: dict[str, Any], expected: float) -> None:
    config = AutoConfig.for_model(kind, **SIZES, **changes)
    assert of_attention(config) == pytest.approx(4 * 4 * 8 * expected, rel=0.05)


def test_layers_may_have_heads_of_their_own_sizes() -> None:
    """Gemma 4: heads of full attention are wider, and its config refuses to say one size for all layers."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    heads = {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2, "layer_types": kinds}
    config = AutoConfig.for_model("gemma4_text", **SIZES, **heads, sliding_window=16, vocab_size_per_layer_input=40)
    assert of_attention(config) == pytest.approx(4 * 4 * (3 * 8 * seen(16) + 16 * seen(LENGTH)), rel=0.05)
    assert cache_of_sequence(config, LENGTH) == 2 * 2 * 2 * (3 * 8 * 16 + 16 * LENGTH)


def test_latent_attention_is_counted_and_none_costs_nothing() -> None:
    latent = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 8, "q_lora_rank": 8}
    assert of_attention(AutoConfig.for_model("deepseek_v3", **SIZES, **latent)) == 2 * LENGTH * 4 * (24 + 12) / 2 * 4
    assert of_attention(AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=40)) == 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_with_a_teacher_takes_the_counted_operations(
    tied: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is next to nothing in short sequences. A last product of a layer that nobody needs is left out."""
    monkeypatch.setattr("sparseforge_ds.model.distill.CHUNK_TOKENS", 8)  # several blocks, as in a run
    config = tiny_llama(vocab_size=512, hidden_size=64, tie_word_embeddings=tied).config
    student, teacher = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    if checkpointing:
        checkpoint_activations(student)
    token_BS = torch.zeros(2, 8, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        with torch.no_grad():
            hidden_BSH = hidden_states(teacher, lambda: teacher(input_ids=token_BS, use_cache=False))
            target = Target(hidden_BSH, Head(head_of(teacher).weight, None))
        losses, _ = loss_in_head(student, token_BS, DistillationConfig(), target, input_ids=token_BS)
        losses.total.backward()
    model = architecture_of(student, ())
    forward = forward_flops(config, model, 8)
    planned = training_flops(forward, model, checkpointing) + forward + head_flops(model)
    assert counter.get_total_flops() / token_BS.numel() == pytest.approx(planned, rel=0.04)
