"""Traced activations against tensors that autograd really saves, and against what the allocator really gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.planner.activation_memory import Activations, Pass, trace
from sparseforge_ds.model.head import Head, Target, head_of, hidden_states, loss_in_head
from sparseforge_ds.model.hidden import capture_states, compared_layers
from sparseforge_ds.model.peak_memory import PeakMemoryCounter
from sparseforge_ds.transformers_internals import checkpoint_activations
from sparseforge_ds.zero.expert_hooks import expert_tokens
from tests import tiny_models
from tests.unit.extras.planner.hub_configs import qwen3_14b

FORGE = SparseForgeConfig.from_dict({})
BATCH, LENGTH = 4, 48


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseforge_ds.model.distill.CHUNK_TOKENS", 64)


# With latent attention, q and v are of different widths, for which torch has no fused kernel on the CPU; nor has it one
# that caps scores, or has sinks. GPT-Neo looks at numbers.
UNFUSED = ("deepseek_v2", "deepseek_v3", "gemma2", "gpt_oss", "gpt_neo")
FAMILIES = [name for name in tiny_models.BUILDERS if name not in UNFUSED]


def real(family: str, checkpointing: bool) -> tuple[Any, Tensor]:
    model = tiny_models.BUILDERS[family]().train()
    if checkpointing:
        checkpoint_activations(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    generator = torch.Generator().manual_seed(0)
    return model, torch.randint(3, tiny_models.VOCABULARY, (BATCH, LENGTH), generator=generator)


def traced(
    model: PreTrainedModel, checkpointing: bool, teacher: bool = True, forge: SparseForgeConfig = FORGE, **changed: Any
) -> Activations:
    sizes: dict[str, Any] = {"micro_batch": BATCH, "seq_length": LENGTH, "dtype": torch.float32, **changed}
    teacher_config = model.config if teacher else None
    return trace(model.config, forge, Pass(checkpointing=checkpointing, **sizes), teacher_config)


def saved_by(model: Any, token_BS: Tensor) -> tuple[int, Tensor]:
    """Bytes that autograd keeps in a forward pass, and the logits."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(input_ids=token_BS, use_cache=False).logits
    return sum(size for size, _ in saved.values()), logits


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_tensors_are_those_of_a_real_pass(family: str, checkpointing: bool) -> None:
    model, token_BS = real(family, checkpointing)
    saved, logits = saved_by(model, token_BS)
    trace = traced(model, checkpointing)
    assert trace.saved == pytest.approx(saved, rel=0.1)
    tokens = token_BS.numel() if family in tiny_models.SCALED else 64  # all of them, or as many as a block has
    assert trace.logits == 2 * tokens * logits.shape[-1] * 4


@pytest.mark.parametrize("family", ["mixtral", "deepseek", "qwen3_moe"])
def test_experts_that_are_heard_keep_more(family: str) -> None:
    """Run our own forward pass of experts, which sorts tokens and weighs them by itself."""
    model, token_BS = real(family, False)
    fused = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    with expert_tokens(fused, lambda *_: None):
        saved, _ = saved_by(model, token_BS)
    trace = traced(model, False, expert_hooks=True)
    assert trace.saved == pytest.approx(saved, rel=0.01)
    assert trace.saved > 1.03 * traced(model, False).saved


def test_llama4_is_traced_where_it_is_heard() -> None:
    model = tiny_models.BUILDERS["llama4_text"]()
    assert traced(model, False, expert_hooks=True) == traced(model, False)


@pytest.mark.parametrize("teacher", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mixtral"])
def test_the_peak_of_a_pass_is_planned(family: str, checkpointing: bool, teacher: bool) -> None:
    model, token_BS = real(family, checkpointing)
    other = real(family, False)[0].eval()
    layer = head_of(other)
    target = Target(_hidden_of(other, token_BS), Head(layer.weight, layer.bias)) if teacher else None

    def run() -> None:
        loss_in_head(model, token_BS, FORGE.distillation, target, input_ids=token_BS)[0].total.backward()

    run()
    assert traced(model, checkpointing, teacher).peak == pytest.approx(allocated_by(run), rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peak_of_a_pass_whose_hidden_states_are_compared(family: str, checkpointing: bool) -> None:
    """Count a block and its gradient for a layer's distance; the states are the teacher's."""
    forge = SparseForgeConfig.from_dict({"distillation": {"hidden": {}}})
    assert forge.distillation is not None and forge.distillation.hidden is not None
    model, token_BS = real(family, checkpointing)
    other = real(family, False)[0].eval()
    layer = head_of(other)
    layers = compared_layers(other, forge.distillation.hidden)

    def target() -> Target:
        with capture_states(layers) as states:
            return Target(_hidden_of(other, token_BS), Head(layer.weight, layer.bias), states)

    def run(own_target: Target) -> None:
        loss_in_head(model, token_BS, forge.distillation, own_target, input_ids=token_BS)[0].total.backward()

    run(target())
    own_target = target()
    trace = traced(model, checkpointing, True, forge)
    assert own_target.states is not None
    assert trace.states == sum(state.numel() * state.element_size() for state in own_target.states)
    assert trace.peak == pytest.approx(allocated_by(lambda: run(own_target)), rel=0.1)
    assert trace.teacher + trace.states == pytest.approx(allocated_by(target), rel=0.1)


def test_states_of_a_teacher_that_caps_its_logits_count_once() -> None:
    """It runs twice: first to see that it does."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "query_pre_attn_scalar": 8}
    model = Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=5.0, **sizes))

    def activations(every: int | None) -> Activations:
        return traced(model, False, True, SparseForgeConfig.from_dict({"distillation": {"hidden": {"every": every}}}))

    last = activations(None)
    every = activations(1)
    assert every.states == 6 * last.states
    assert 0 < every.teacher + every.states - last.teacher - last.states <= 5 * last.states


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_peak_of_a_teacher_is_planned(family: str) -> None:
    model, token_BS = real(family, False)
    model.eval()
    trace = traced(model, False).teacher
    assert trace == pytest.approx(allocated_by(lambda: _hidden_of(model, token_BS)), rel=0.1)


def _hidden_of(model: PreTrainedModel, token_BS: Tensor) -> Tensor:
    with torch.no_grad():
        return hidden_states(model, lambda: model(input_ids=token_BS, use_cache=False))


def allocated_by(run: Callable[[], object]) -> int:
    """Return the most that the allocator gave at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", [name for name in tiny_models.BUILDERS if name != "gpt_neo"])
def test_every_family_runs_without_numbers(family: str, dtype: torch.dtype) -> None:
    trace = traced(tiny_models.BUILDERS[family](), True, dtype=dtype)
    assert 0 < trace.saved < trace.backward


def test_a_family_that_looks_at_numbers_is_said() -> None:
    with pytest.raises(ValueError, match="a gpt_neo model cannot be run on the meta device, where the planner"):
        traced(tiny_models.BUILDERS["gpt_neo"](), True)


def test_half_the_tokens_or_width_take_half_the_bytes() -> None:
    model = tiny_models.tiny_llama()
    trace = traced(model, False)
    assert traced(model, False, micro_batch=BATCH // 2).saved == pytest.approx(trace.saved / 2, rel=0.02)
    assert traced(model, False, dtype=torch.bfloat16).logits == trace.logits / 2
    assert traced(model, False, micro_batch=2 * BATCH).teacher == pytest.approx(2 * trace.teacher, rel=0.02)


def test_full_size_needs_no_memory_and_checkpointing_saves_most() -> None:
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "micro_batch": 1, "seq_length": 4096}
    config = qwen3_14b(num_hidden_layers=4)
    kept = trace(config, FORGE, Pass(**sizes), config)
    recomputed = trace(config, FORGE, Pass(checkpointing=True, **sizes), config)
    hidden = 4096 * 5120 * 2
    assert 4 * hidden <= recomputed.saved <= 9 * hidden  # the input of each block; the last norm's, in fp32; the head's
    assert kept.saved > 10 * recomputed.saved
    gradient = 151936 * 5120 * 2  # of the head's weight
    assert kept.logits == recomputed.logits == 2 * 64 * 151936 * 2
    assert 0 < recomputed.loss - gradient < 10**9
    assert 0 < recomputed.teacher < recomputed.backward
    assert kept.peak < 16 * 2**30


def test_live_bytes_end_with_their_storage() -> None:
    with PeakMemoryCounter() as live:
        first = torch.empty(1000, device="meta")
        second = first + 1
        assert live.bytes == live.peak == 8000
        view = second[:10]
        del first, second
        assert live.bytes == 4000
        del view
        assert (live.bytes, live.peak) == (0, 8000)
        assert live.restart() == 8000
        assert live.peak == 0
