"""Whether the sequences of a model can be divided over ranks, told by running it on the meta device.

DeepSpeed's Ulysses exchanges tokens for heads where a model calls the attention that transformers gives it, and drops
its mask. So that has to be all that connects the tokens of a sequence, and causal order the only mask.
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
_TRIED = 8
"""Tokens of the pass that is watched."""
_OF_TOKENS = {"position_ids", "attention_mask"}
"""Tensors that attention may be given beside queries, keys and values."""


@dataclass(frozen=True)
class _Call:
    """What a layer hands to its attention."""

    heads: int
    groups: int
    widths: tuple[int, int, int]
    """Of a query, a key and a value."""
    more: dict[str, Any]


def check_divided(config: PretrainedConfig, parts: int, seq_length: int, attention: str | None = None) -> None:
    """Refuse a model whose sequences `parts` ranks cannot share: the ValueError says why, and what can be done."""
    if seq_length % parts:
        near = seq_length // parts * parts or parts
        raise ValueError(f"--seq_length {seq_length} is not a multiple of {parts}; use {near} or {near + parts}")
    implementation = attention or default_attention(config)
    if implementation != "sdpa" and "flash" not in implementation:
        raise ValueError(f"its attention is {implementation}, and sdpa and flash attention alone can be divided")
    model = bare_model(config, torch.bfloat16).eval()
    text = config.get_text_config()
    _check_positions(text, seq_length)
    with without_numbers(config), _calls(model) as calls:
        model(input_ids=torch.zeros(1, _TRIED, dtype=torch.long, device="meta"), use_cache=False)
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
    if getattr(config, "output_router_logits", False) or (
        config.model_type == "deepseek" and getattr(config, "aux_loss_alpha", 0)
    ):
        key = "output_router_logits to false" if config.model_type != "deepseek" else "aux_loss_alpha to 0"
        raise ValueError(
            "its balance loss of experts is of whole sequences, and would be another one of their parts; set "
            f"{key} in its config.json"
        )


def _check_call(call: _Call, parts: int, seq_length: int, flash: bool) -> None:
    if call.heads % parts or (call.groups % parts and parts % call.groups):
        sound = [n for n in range(2, call.heads + 1) if not (call.heads % n or (call.groups % n and n % call.groups))]
        raise ValueError(
            f"it has {call.heads} attention heads and {call.groups} of keys and values, which {parts} ranks cannot "
            f"share evenly; use {' or '.join(map(str, sound)) or 'no other than 1'}"
        )
    if len(set(call.widths)) > 1:
        raise ValueError(
            f"its queries, keys and values are {call.widths[0]}, {call.widths[1]} and {call.widths[2]} wide, and "
            "DeepSpeed exchanges heads of one width alone (latent attention has two)"
        )
    if "position_ids" not in call.more:
        raise ValueError("its layers do not hand position_ids on to attention, so parts would be taken for sequences")
    window = call.more.get("sliding_window")
    if window is not None and window < seq_length and not flash:
        raise ValueError(
            f"its attention has a sliding window of {window} tokens, which sdpa has as a mask, and masks are not "
            f"exchanged; use --seq_length {window} or less"
        )
    held = [name for name, value in call.more.items() if isinstance(value, Tensor) and name not in _OF_TOKENS]
    if held:
        raise ValueError(
            f"its attention takes {', '.join(held)} beside queries, keys and values, for all heads at once"
        )


def _check_positions(text: PretrainedConfig, seq_length: int) -> None:
    """Whether positions and masks are those of a whole sequence, whatever part of it is at hand."""
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None and chunk < seq_length:
        raise ValueError(f"its attention is by chunks of {chunk} tokens; use --seq_length {chunk} or less")
    rotary = getattr(text, "rope_parameters", None) or {}
    for each in (rotary, *(value for value in rotary.values() if isinstance(value, dict))):
        if each.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"its rotary positions are {each['rope_type']}: they depend on the length of the sequence, of which a "
                "rank sees a part"
            )


def default_attention(config: PretrainedConfig) -> str:
    """The attention that transformers chooses for a model as it is loaded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    return str(model.config._attn_implementation)


@contextmanager
def _calls(model: PreTrainedModel) -> Iterator[list[_Call]]:
    """While active, collects what the layers of a model hand to their attention."""
    found: list[_Call] = []

    def watched(
        attend: Attention, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Any:
        widths = query.shape[-1], key.shape[-1], value.shape[-1]
        found.append(_Call(query.shape[1], key.shape[1], widths, more))
        return attend(module, query, key, value, *args, **more)

    with _attending(model, watched):
        yield found


@contextmanager
def exchanged(model: PreTrainedModel, parts: int) -> Iterator[None]:
    """While active, attention on the meta device has the memory of DeepSpeed's exchange of tokens for heads."""

    def attend(attend: Attention, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        output_BSHD, nothing = attend(module, *(_to_heads(each, parts) for each in (query, key, value)))
        B, part, (H, D) = query.shape[0], query.shape[2], output_BSHD.shape[2:]
        own_PSBHD = output_BSHD.transpose(0, 1).reshape(parts, part, B, H, D)
        part_PSBHD = _Exchange.apply(own_PSBHD)  # type: ignore[no-untyped-call]
        return part_PSBHD.permute(2, 1, 0, 3, 4).reshape(B, part, H * parts, D), nothing

    with _attending(model, attend) if parts > 1 else nullcontext():
        yield


@contextmanager
def _attending(model: PreTrainedModel, around: Callable[..., Any]) -> Iterator[None]:
    """While active, `around(attention, ...)` is called in the place of a model's attention."""
    name = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[name] = partial(around, ALL_ATTENTION_FUNCTIONS[name])
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def _to_heads(part_BHSD: Tensor, parts: int) -> Tensor:
    """(B, H, S, D) of the tokens of a rank -> (B, H / parts, S * parts, D), with the copies on the way."""
    if part_BHSD.shape[1] < parts:
        part_BHSD = part_BHSD.repeat_interleave(parts // part_BHSD.shape[1], dim=1)
    B, H, S, D = part_BHSD.shape
    to_PSBHD = part_BHSD.permute(2, 0, 1, 3).reshape(S, B, parts, H // parts, D).permute(2, 0, 1, 3, 4).contiguous()
    whole_SBHD = _Exchange.apply(to_PSBHD).view(S * parts, B, H // parts, D)  # type: ignore[no-untyped-call]
    heads_BHSD: Tensor = whole_SBHD.permute(1, 2, 0, 3).contiguous()
    return heads_BHSD


class _Exchange(torch.autograd.Function):
    """The shapes of an all-to-all."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return torch.empty_like(given)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return torch.empty_like(grad[0], memory_format=torch.contiguous_format)
