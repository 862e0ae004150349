"""Which channels of a model can be reordered without changing its function, as a table by family.

A channel is one number of a hidden vector. Where one tensor computes a vector and others read it, channel by channel,
the order is free: reorder the rows of the first and the columns of the others alike. The rows here name all tensors
that have such a vector along an axis. The channels of queries and keys have no row: no prunable weight reads them.

Names are globs as in `model.family_table`, except that `*` is a number: of the layer, then of the expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparseforge_ds.permutation.layouts import (
    Layout,
    attended,
    each_head,
    embedded,
    key_value_latent,
    shared,
    stacked,
    values,
    values_of_fused,
    values_of_latent,
    whole,
)

Part = Literal["mlp", "heads", "residual"]


@dataclass(frozen=True)
class Along:
    """An axis of tensors that has the channels."""

    names: str
    """Glob over parameter names, in files and in memory."""
    axis: int
    """Negative."""
    layout: Layout = whole


@dataclass(frozen=True)
class Channels:
    """Channels that have one order in all tensors of a layer, or of the model."""

    name: str
    """`*` is the number of the layer."""
    part: Part
    tensors: tuple[Along, ...]
    experts: bool = False
    """Whether every routed expert has an order of its own; a second number in a tensor's name is then its."""


@dataclass(frozen=True)
class FamilyChannels:
    """All tensors of an architecture: each has channels of some row, or none that could be reordered."""

    rows: tuple[Channels, ...]
    others: tuple[str, ...]


def _outputs(layer: str, layout: Layout = whole) -> tuple[Along, ...]:
    """The output axis of a linear layer, and its bias."""
    return Along(f"{layer}.weight", -2, layout), Along(f"{layer}.bias", -1, layout)


def _inputs(layer: str, layout: Layout = whole) -> Along:
    return Along(f"{layer}.weight", -1, layout)


def _norm(name: str) -> tuple[Along, ...]:
    return Along(f"{name}.weight", -1), Along(f"{name}.bias", -1)


def _gated(where: str) -> Channels:
    at = f"layers.*.{where}"
    return Channels(at, "mlp", (*_outputs(f"{at}.gate_proj"), *_outputs(f"{at}.up_proj"), _inputs(f"{at}.down_proj")))


def _experts(where: str, gate: str, up: str, down: str) -> Channels:
    """Routed experts: fused, as transformers has them, and one by one, as files have them."""
    fused, one = "layers.*.mlp.experts", f"layers.*.{where}.*"
    return Channels(
        fused,
        "mlp",
        (
            Along(f"{fused}.gate_up_proj", -2, stacked),
            Along(f"{fused}.down_proj", -1),
            Along(f"{one}.{gate}.weight", -2),
            Along(f"{one}.{up}.weight", -2),
            Along(f"{one}.{down}.weight", -1),
        ),
        experts=True,
    )


_AT = "layers.*.self_attn"
_LISTED = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
_HEADS = Channels(f"{_AT}.values", "heads", (*_outputs(f"{_AT}.v_proj", values), _inputs(f"{_AT}.o_proj", attended)))
_LATENT_HEADS = (
    Channels(
        f"{_AT}.values",
        "heads",
        (*_outputs(f"{_AT}.kv_b_proj", values_of_latent), _inputs(f"{_AT}.o_proj", each_head)),
    ),
    Channels(
        f"{_AT}.key_value_latent",
        "heads",
        (
            *_outputs(f"{_AT}.kv_a_proj_with_mqa", key_value_latent),
            *_norm(f"{_AT}.kv_a_layernorm"),
            _inputs(f"{_AT}.kv_b_proj"),
        ),
    ),
    Channels(
        f"{_AT}.query_latent",
        "heads",
        (*_outputs(f"{_AT}.q_a_proj"), *_norm(f"{_AT}.q_a_layernorm"), _inputs(f"{_AT}.q_b_proj")),
    ),
)


def _residual(
    reads: tuple[str, ...], writes: tuple[str, ...], more: tuple[Along, ...] = (), head: Layout = whole
) -> Channels:
    """The residual stream of a decoder with linear layers.

    Args:
        reads: the layers that it goes into.
        writes: the layers whose output is added to it.
        more: its norms, and whatever else has its channels.
        head: of the embedding and the head.
    """
    return Channels(
        "residual",
        "residual",
        (
            *(Along(f"{name}.weight", -1, head) for name in ("embed_tokens", "lm_head")),
            *(_inputs(name) for name in reads),
            *(along for name in writes for along in _outputs(name)),
            *more,
        ),
    )


_NORMS = (
    *_norm("norm"),
    *_norm("layers.*.input_layernorm"),
    *_norm("layers.*.post_attention_layernorm"),
)
_QKV = tuple(f"{_AT}.{name}_proj" for name in "qkv")
_LATENT_QKV = (f"{_AT}.q_proj", f"{_AT}.q_a_proj", f"{_AT}.kv_a_proj_with_mqa")
_OTHERS = (
    f"{_AT}.q_norm.weight",
    f"{_AT}.k_norm.weight",
    f"{_AT}.q_proj.bias",
    f"{_AT}.k_proj.bias",
    f"{_AT}.rotary_emb.inv_freq",
    "rotary_emb.inv_freq",
    "layers.*.mlp.gate.e_score_correction_bias",
)
_FUSED_RESIDUAL = (
    Along("layers.*.mlp.experts.gate_up_proj", -1, shared),
    Along("layers.*.mlp.experts.down_proj", -2, shared),
)


def _decoder(
    mlps: tuple[str, ...] = (),
    listed: tuple[str, str, str, str] | None = None,
    routers: tuple[str, ...] = (),
    latent: bool = False,
) -> FamilyChannels:
    """A family of Llama's kind.

    Args:
        mlps: its gated MLPs, in a layer.
        listed: where files have its routed experts, and their layers: gate, up, down.
        routers: what chooses or weighs experts, in a layer.
        latent: whether it has latent attention.
    """
    reads = [*(_LATENT_QKV if latent else _QKV), *(f"layers.*.{router}" for router in routers)]
    reads += [f"layers.*.{mlp}.{name}" for mlp in mlps for name in ("gate_proj", "up_proj")]
    writes = [f"{_AT}.o_proj", *(f"layers.*.{mlp}.down_proj" for mlp in mlps)]
    rows = [*map(_gated, mlps), *(_LATENT_HEADS if latent else (_HEADS,))]
    if listed is not None:
        where, gate, up, down = listed
        rows.append(_experts(*listed))
        reads += [f"layers.*.{where}.*.{name}" for name in (gate, up)]
        writes.append(f"layers.*.{where}.*.{down}")
    more = _NORMS if listed is None else (*_NORMS, *_FUSED_RESIDUAL)
    return FamilyChannels((*rows, _residual(tuple(reads), tuple(writes), more)), _OTHERS)


_LLAMA = _decoder(("mlp",))
_QWEN3_MOE = _decoder(("mlp",), _LISTED, ("mlp.gate",))
_DEEPSEEK_MLA = _decoder(("mlp", "mlp.shared_experts"), _LISTED, ("mlp.gate",), latent=True)
_MIXTRAL = _decoder(
    listed=("block_sparse_moe.experts", "w1", "w3", "w2"), routers=("mlp.gate", "block_sparse_moe.gate")
)

_OPT = FamilyChannels(
    (
        Channels("layers.*.mlp", "mlp", (*_outputs("layers.*.fc1"), _inputs("layers.*.fc2"))),
        Channels(
            f"{_AT}.values", "heads", (*_outputs(f"{_AT}.v_proj", each_head), _inputs(f"{_AT}.out_proj", each_head))
        ),
        _residual(
            (*_QKV, "layers.*.fc1", "project_out"),
            (f"{_AT}.out_proj", "layers.*.fc2", "project_in"),
            (
                Along("embed_positions.weight", -1),
                *_norm("layers.*.self_attn_layer_norm"),
                *_norm("layers.*.final_layer_norm"),
                *_norm("final_layer_norm"),
            ),
            embedded,
        ),
    ),
    _OTHERS,
)

# Conv1D stores (in, out). `attn.bias` and `masked_bias` are the causal mask that old checkpoints carry.
_GPT2 = FamilyChannels(
    (
        Channels(
            "h.*.mlp",
            "mlp",
            (Along("h.*.mlp.c_fc.weight", -1), Along("h.*.mlp.c_fc.bias", -1), Along("h.*.mlp.c_proj.weight", -2)),
        ),
        Channels(
            "h.*.attn.values",
            "heads",
            (
                Along("h.*.attn.c_attn.weight", -1, values_of_fused),
                Along("h.*.attn.c_attn.bias", -1, values_of_fused),
                Along("h.*.attn.c_proj.weight", -2, each_head),
            ),
        ),
        Channels(
            "residual",
            "residual",
            (
                *(Along(f"{name}.weight", -1) for name in ("wte", "wpe", "lm_head")),
                *_norm("h.*.ln_1"),
                *_norm("h.*.ln_2"),
                *_norm("ln_f"),
                Along("h.*.attn.c_attn.weight", -2),
                Along("h.*.mlp.c_fc.weight", -2),
                *(Along(f"h.*.{name}.c_proj.{kind}", -1) for name in ("attn", "mlp") for kind in ("weight", "bias")),
            ),
        ),
    ),
    ("h.*.attn.bias", "h.*.attn.masked_bias"),
)

CHANNELS: dict[str, FamilyChannels] = {
    "deepseek": _decoder(("mlp", "mlp.shared_experts"), _LISTED, ("mlp.gate",)),
    "deepseek_v2": _DEEPSEEK_MLA,
    "deepseek_v3": _DEEPSEEK_MLA,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _MIXTRAL,
    "olmoe": _decoder(listed=_LISTED, routers=("mlp.gate",)),
    "opt": _OPT,
    "qwen2": _LLAMA,
    "qwen2_moe": _decoder(("mlp", "mlp.shared_expert"), _LISTED, ("mlp.gate", "mlp.shared_expert_gate")),
    "qwen3": _LLAMA,
    "qwen3_moe": _QWEN3_MOE,
}
"""Keyed by the `model_type` of the model's config."""
