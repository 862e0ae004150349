"""Check that the sequences of a model can be divided over ranks, by running it on the meta device.

DeepSpeed's Ulysses exchanges tokens for heads when a model calls transformers' attention, and drops its mask. So
nothing but attention may connect the tokens of a sequence, and causal order must be the only mask.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparseforge_ds.model.architecture import bare_model, without_numbers

Attention = Callable[..., tuple[Tensor, None]]
_TRACED_TOKENS = 8
"""Tokens of the pass that is observed."""
_TOKEN_ARGUMENTS = {"position_ids", "attention_mask"}
"""Tensors that attention may get beside queries, keys and values."""


@dataclass(frozen=True)
class _Call:
    """Arguments of a layer's attention."""

    heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values."""
    widths: tuple[int, int, int]
    """Width of a query, a key and a value."""
    keywords: dict[str, Any]
    """All other arguments, by name."""


def check_divided(config: PretrainedConfig, parts: int, seq_length: int, attention: str | None = None) -> None:
    """Raise ValueError, with the cure, if ranks cannot share the sequences of a model.

    Args:
        config: of the model.
        parts: ranks that share a sequence.
        seq_length: tokens of a sequence.
        attention: implementation; None for the one that transformers chooses.
    """
    if seq_length % parts:
        below = seq_length // parts * parts or parts
        raise ValueError(f"--seq_length {seq_length} is not a multiple of {parts}; use {below} or {below + parts}")
    implementation = attention or default_attention(config)
    if implementation != "sdpa" and "flash" not in implementation:
        raise ValueError(f"its attention is {implementation}, and sdpa and flash attention alone can be divided")
    model = bare_model(config, torch.bfloat16).eval()
    text = config.get_text_config()
    _check_positions(text, seq_length)
    # A pass on the meta device shows which layers call attention, and how.
    with without_numbers(config), _calls(model) as calls:
        model(input_ids=torch.zeros(1, _TRACED_TOKENS, dtype=torch.long, device="meta"), use_cache=False)
    layers = int(text.num_hidden_layers)
    mixing = next((name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)), None)
    if len(calls) != layers or mixing is not None:
        raise ValueError(
            f"{len(calls)} of its {layers} layers call the attention of transformers, where tokens are exchanged for "
            "heads"
            + (f", and {mixing} is a convolution over tokens" if mixing else "")
            + "; nothing else may connect the tokens of a sequence"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError("it takes no position_ids, which say where a part of a sequence lies")
    for call in calls:
        _check_call(call, parts, seq_length, flash=implementation != "sdpa")
    # A balance loss is not the sum of those of parts.
    if getattr(config, "output_router_logits", False) or (
        config.model_type == "deepseek" and getattr(config, "aux_loss_alpha", 0)
    ):
        key = "output_router_logits to false" if config.model_type != "deepseek" else "aux_loss_alpha to 0"
        raise ValueError(
            "its balance loss of experts is of whole sequences, and would be another one of their parts; set "
            f"{key} in its config.json"
        )


def _check_call(call: _Call, parts: int, seq_length: int, flash: bool) -> None:
    """Raise ValueError if the heads of a layer cannot be exchanged, or its attention needs more than causal order."""
    # Heads are exchanged for parts of the sequence, each rank as many as the others and of one width.
    if call.heads % parts or (call.kv_heads % parts and parts % call.kv_heads):
        sound = [
            n for n in range(2, call.heads + 1) if not (call.heads % n or (call.kv_heads % n and n % call.kv_heads))
        ]
        raise ValueError(
            f"it has {call.heads} attention heads and {call.kv_heads} of keys and values, which {parts} ranks cannot "
            f"share evenly; use {' or '.join(map(str, sound)) or 'no other than 1'}"
        )
    if len(set(call.widths)) > 1:
        raise ValueError(
            f"its queries, keys and values are {call.widths[0]}, {call.widths[1]} and {call.widths[2]} wide, and "
            "DeepSpeed exchanges heads of one width alone (latent attention has two)"
        )
    # Positions tell a part from a sequence; masks and other tensors are not exchanged.
    if "position_ids" not in call.keywords:
        raise ValueError("its layers do not hand position_ids on to attention, so parts would be taken for sequences")
    window = call.keywords.get("sliding_window")
    if window is not None and window < seq_length and not flash:
        raise ValueError(
            f"its attention has a sliding window of {window} tokens, which sdpa has as a mask, and masks are not "
            f"exchanged; use --seq_length {window} or less"
        )
    tensors = [name for name, value in call.keywords.items() if isinstance(value, Tensor)]
    unexpected = [name for name in tensors if name not in _TOKEN_ARGUMENTS]
    if unexpected:
        raise ValueError(
            f"its attention takes {', '.join(unexpected)} beside queries, keys and values, for all heads at once"
        )


def _check_positions(text: PretrainedConfig, seq_length: int) -> None:
    """Raise ValueError if positions or masks of a part differ from those of the same tokens in the whole sequence."""
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None and chunk < seq_length:
        raise ValueError(f"its attention is by chunks of {chunk} tokens; use --seq_length {chunk} or less")
    rotary = getattr(text, "rope_parameters", None) or {}
    for settings in (rotary, *(value for value in rotary.values() if isinstance(value, dict))):
        if settings.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"its rotary positions are {settings['rope_type']}: they depend on the length of the sequence, of "
                "which a rank sees a part"
            )


def default_attention(config: PretrainedConfig) -> str:
    """Return the attention implementation that transformers chooses for a model when it loads it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    return str(model.config._attn_implementation)


@contextmanager
def _calls(model: PreTrainedModel) -> Iterator[list[_Call]]:
    """Collect the arguments of every call of a model's attention in the block."""
    calls: list[_Call] = []

    def record(
        attend: Attention, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any
    ) -> Any:
        widths = query.shape[-1], key.shape[-1], value.shape[-1]
        calls.append(_Call(query.shape[1], key.shape[1], widths, keywords))
        return attend(module, query, key, value, *args, **keywords)

    with _wrapped_attention(model, record):
        yield calls


@contextmanager
def exchanged(model: PreTrainedModel, parts: int) -> Iterator[None]:
    """Give attention on the meta device, in the block, the memory of DeepSpeed's exchange of tokens for heads."""

    def exchange(attend: Attention, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        # All tokens of some heads, attention on them, and then all heads of some tokens.
        output_BSHD, weights = attend(module, *(_to_heads(part_BHSD, parts) for part_BHSD in (query, key, value)))
        B, _heads, part, _width = query.shape
        H, D = output_BSHD.shape[2:]
        own_PSBHD = output_BSHD.transpose(0, 1).reshape(parts, part, B, H, D)
        part_PSBHD = _Exchange.apply(own_PSBHD)  # type: ignore[no-untyped-call]
        return part_PSBHD.permute(2, 1, 0, 3, 4).reshape(B, part, H * parts, D), weights

    with _wrapped_attention(model, exchange) if parts > 1 else nullcontext():
        yield


@contextmanager
def _wrapped_attention(model: PreTrainedModel, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Call `wrapper(attention, ...)` in the place of a model's attention in the block."""
    name = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[name] = partial(wrapper, ALL_ATTENTION_FUNCTIONS[name])
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def _to_heads(part_BHSD: Tensor, parts: int) -> Tensor:
    """Exchange tokens for heads, (B, H, S, D) -> (B, H / parts, S * parts, D), with the copies that it takes."""
    if part_BHSD.shape[1] < parts:
        part_BHSD = part_BHSD.repeat_interleave(parts // part_BHSD.shape[1], dim=1)
    B, H, S, D = part_BHSD.shape
    to_PSBHD = part_BHSD.permute(2, 0, 1, 3).reshape(S, B, parts, H // parts, D).permute(2, 0, 1, 3, 4).contiguous()
    whole_SBHD = _Exchange.apply(to_PSBHD).view(S * parts, B, H // parts, D)  # type: ignore[no-untyped-call]
    heads_BHSD: Tensor = whole_SBHD.permute(1, 2, 0, 3).contiguous()
    return heads_BHSD


class _Exchange(torch.autograd.Function):
    """All-to-all that has shapes and memory, but no values."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor) -> Tensor:
        return torch.empty_like(sent)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return torch.empty_like(grad[0], memory_format=torch.contiguous_format)
