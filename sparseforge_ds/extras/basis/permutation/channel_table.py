"""Table of the channels that can be reordered without changing a model's function, by family.

A channel is one number of a hidden vector. If one tensor computes the vector and others read it channel by channel, the
order is free: reorder the rows of the first and the columns of the others alike. A row here names all tensors that have
such a vector along an axis. Channels of queries and keys have no row, since no prunable weight reads them.
"""

from __future__ import annotations

from sparseforge_ds.extras.basis.permutation.channel_rows import (
    ChannelAxis,
    Channels,
    FamilyChannels,
    experts,
    gated,
    heads,
    inputs,
    norm,
    outputs,
    plain,
    residual,
)
from sparseforge_ds.extras.basis.permutation.layouts import (
    attended,
    each_head,
    embedded,
    key_value_latent,
    shared,
    stacked,
    values,
    values_of_fused,
    values_of_groups,
    values_of_latent,
)

_AT = "layers.*.self_attn"
_LISTED = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
_HEADS = heads(_AT, "v_proj", values, "o_proj", attended)
_LATENT_HEADS = (
    heads(_AT, "kv_b_proj", values_of_latent, "o_proj", each_head),
    Channels(
        f"{_AT}.key_value_latent",
        "heads",
        (
            *outputs(f"{_AT}.kv_a_proj_with_mqa", key_value_latent),
            *norm(f"{_AT}.kv_a_layernorm"),
            inputs(f"{_AT}.kv_b_proj"),
        ),
    ),
    Channels(
        f"{_AT}.query_latent",
        "heads",
        (*outputs(f"{_AT}.q_a_proj"), *norm(f"{_AT}.q_a_layernorm"), inputs(f"{_AT}.q_b_proj")),
    ),
)


_NORMS = tuple(
    axis
    for name in (
        "norm",
        "layers.*.input_layernorm",
        "layers.*.post_attention_layernorm",
        *(f"layers.*.{position}_feedforward_layernorm" for position in ("pre", "post")),
        *(f"layers.*.post_{part}_layernorm" for part in ("self_attn", "mlp")),
    )
    for axis in norm(name)
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
    ChannelAxis("layers.*.mlp.experts.gate_up_proj", -1, shared),
    ChannelAxis("layers.*.mlp.experts.down_proj", -2, shared),
)


def _decoder(
    mlps: tuple[str, ...] = (),
    listed: tuple[str, str, str, str] | None = None,
    routers: tuple[str, ...] = (),
    latent: bool = False,
) -> FamilyChannels:
    """Return the channels of a family with Llama's block structure.

    Args:
        mlps: modules of the gated MLPs in a layer.
        listed: module of routed experts in files, with the names of their gate, up and down layers; None: no experts.
        routers: layers that route tokens to experts.
        latent: True for latent attention (MLA).
    """
    # Attention and dense MLPs.
    reads = [*(_LATENT_QKV if latent else _QKV), *(f"layers.*.{router}" for router in routers)]
    reads += [f"layers.*.{mlp}.{name}" for mlp in mlps for name in ("gate_proj", "up_proj")]
    writes = [f"{_AT}.o_proj", *(f"layers.*.{mlp}.down_proj" for mlp in mlps)]
    rows = [*map(gated, mlps), *(_LATENT_HEADS if latent else (_HEADS,))]
    # Routed experts.
    if listed is not None:
        module, gate, up, down = listed
        rows.append(experts(module, gate, up, down))
        reads += [f"layers.*.{module}.*.{name}" for name in (gate, up)]
        writes.append(f"layers.*.{module}.*.{down}")
    more = _NORMS if listed is None else (*_NORMS, *_FUSED_RESIDUAL)
    return FamilyChannels((*rows, residual(tuple(reads), tuple(writes), more)), _OTHERS)


_LLAMA = _decoder(("mlp",))
_QWEN3_MOE = _decoder(("mlp",), _LISTED, ("mlp.gate",))
_DEEPSEEK_MLA = _decoder(("mlp", "mlp.shared_experts"), _LISTED, ("mlp.gate",), latent=True)
_SHARED_EXPERTS = _decoder(("mlp", "mlp.shared_experts"), _LISTED, ("mlp.gate",))
_MIXTRAL = _decoder(
    listed=("block_sparse_moe.experts", "w1", "w3", "w2"), routers=("mlp.gate", "block_sparse_moe.gate")
)

_OPT = FamilyChannels(
    (
        Channels("layers.*.mlp", "mlp", (*outputs("layers.*.fc1"), inputs("layers.*.fc2"))),
        heads(_AT, "v_proj", each_head, "out_proj", each_head),
        residual(
            (*_QKV, "layers.*.fc1", "project_out"),
            (f"{_AT}.out_proj", "layers.*.fc2", "project_in"),
            (
                ChannelAxis("embed_positions.weight", -1),
                *norm("layers.*.self_attn_layer_norm"),
                *norm("layers.*.final_layer_norm"),
                *norm("final_layer_norm"),
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
            (
                ChannelAxis("h.*.mlp.c_fc.weight", -1),
                ChannelAxis("h.*.mlp.c_fc.bias", -1),
                ChannelAxis("h.*.mlp.c_proj.weight", -2),
            ),
        ),
        Channels(
            "h.*.attn.values",
            "heads",
            (
                ChannelAxis("h.*.attn.c_attn.weight", -1, values_of_fused),
                ChannelAxis("h.*.attn.c_attn.bias", -1, values_of_fused),
                ChannelAxis("h.*.attn.c_proj.weight", -2, each_head),
            ),
        ),
        Channels(
            "residual",
            "residual",
            (
                *(ChannelAxis(f"{name}.weight", -1) for name in ("wte", "wpe", "lm_head")),
                *norm("h.*.ln_1"),
                *norm("h.*.ln_2"),
                *norm("ln_f"),
                ChannelAxis("h.*.attn.c_attn.weight", -2),
                ChannelAxis("h.*.mlp.c_fc.weight", -2),
                *(
                    ChannelAxis(f"h.*.{name}.c_proj.{kind}", -1)
                    for name in ("attn", "mlp")
                    for kind in ("weight", "bias")
                ),
            ),
        ),
    ),
    ("h.*.attn.bias", "h.*.attn.masked_bias"),
)

_MLP = "layers.*.mlp"
_STARCODER2 = FamilyChannels(
    (
        plain(f"{_MLP}.c_fc", "c_proj"),
        _HEADS,
        residual((*_QKV, f"{_MLP}.c_fc"), (f"{_AT}.o_proj", f"{_MLP}.c_proj"), _NORMS),
    ),
    _OTHERS,
)
_GATE_UP = plain(f"{_MLP}.gate_up_proj", "down_proj", stacked)
_GLM4 = FamilyChannels(
    (
        _GATE_UP,
        _HEADS,
        residual((*_QKV, f"{_MLP}.gate_up_proj"), (f"{_AT}.o_proj", f"{_MLP}.down_proj"), _NORMS),
    ),
    _OTHERS,
)
_PHI3 = FamilyChannels(
    (
        _GATE_UP,
        heads(_AT, "qkv_proj", values_of_fused, "o_proj", attended),
        residual((f"{_AT}.qkv_proj", f"{_MLP}.gate_up_proj"), (f"{_AT}.o_proj", f"{_MLP}.down_proj"), _NORMS),
    ),
    _OTHERS,
)


def _query_key_value(layer: str, attention: str, names: tuple[str, ...], norms: tuple[str, ...]) -> FamilyChannels:
    """Return the channels of a family with a fused `query_key_value` layer: GPT-NeoX and Falcon."""
    at = f"{layer}.{attention}"
    up = f"{layer}.mlp.dense_h_to_4h"
    down = f"{layer}.mlp.dense_4h_to_h"
    more = tuple(axis for name in norms for axis in norm(name))
    return FamilyChannels(
        (
            plain(up, "dense_4h_to_h"),
            heads(at, "query_key_value", values_of_groups, "dense", attended),
            residual((f"{at}.query_key_value", up), (f"{at}.dense", down), more, embeddings=names),
        ),
        (f"{at}.bias", f"{at}.masked_bias", f"{at}.rotary_emb.inv_freq"),
    )


_GPT_NEOX = _query_key_value(
    "layers.*",
    "attention",
    ("embed_in", "embed_out", "lm_head"),
    ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "final_layer_norm"),
)
_FALCON = _query_key_value(
    "h.*",
    "self_attention",
    ("word_embeddings", "lm_head"),
    ("h.*.input_layernorm", "h.*.post_attention_layernorm", "h.*.ln_attn", "h.*.ln_mlp", "ln_f"),
)

_NEO = "h.*.attn.attention"
_GPT_NEO = FamilyChannels(
    (
        plain("h.*.mlp.c_fc", "c_proj"),
        heads(_NEO, "v_proj", each_head, "out_proj", each_head),
        residual(
            (*(f"{_NEO}.{name}_proj" for name in "qkv"), "h.*.mlp.c_fc"),
            (f"{_NEO}.out_proj", "h.*.mlp.c_proj"),
            (*norm("h.*.ln_1"), *norm("h.*.ln_2"), *norm("ln_f")),
            embeddings=("wte", "wpe", "lm_head"),
        ),
    ),
    (f"{_NEO}.bias", f"{_NEO}.masked_bias"),
)

CHANNELS: dict[str, FamilyChannels] = {
    "cohere2": _LLAMA,
    "deepseek": _SHARED_EXPERTS,
    "deepseek_v2": _DEEPSEEK_MLA,
    "deepseek_v3": _DEEPSEEK_MLA,
    "falcon": _FALCON,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "glm4": _GLM4,
    "glm4_moe": _SHARED_EXPERTS,
    "gpt2": _GPT2,
    "gpt_neo": _GPT_NEO,
    "gpt_neox": _GPT_NEOX,
    "granite": _LLAMA,
    "internlm3": _LLAMA,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _MIXTRAL,
    "olmo2": _LLAMA,
    "olmo3": _LLAMA,
    "olmoe": _decoder(listed=_LISTED, routers=("mlp.gate",)),
    "opt": _OPT,
    "phi3": _PHI3,
    "qwen2": _LLAMA,
    "qwen2_moe": _decoder(("mlp", "mlp.shared_expert"), _LISTED, ("mlp.gate", "mlp.shared_expert_gate")),
    "qwen3": _LLAMA,
    "qwen3_moe": _QWEN3_MOE,
    "smollm3": _LLAMA,
    "starcoder2": _STARCODER2,
}
"""Channels of each family, by the `model_type` of the model's config."""
