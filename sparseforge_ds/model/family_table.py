"""All model families, as a table. CONTRIBUTING.md says what a new family needs besides.

A row is a glob over parameter names, written without the prefix that the surrounding model class adds (`model.`,
`model.decoder.`, `transformer.`, none), plus the axis which the matmul contracts. Routers, embeddings and heads are
named too, as dense: `model.families` refuses a matrix that has no name here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Row:
    """Weights that a family names prunable."""

    names: str
    """Glob over parameter names, anchored at a dot and at the end."""
    input_axis: int = -1
    """The axis that the matmul contracts: -1 for (..., out, in), -2 for (..., in, out)."""
    experts: bool = False
    """True for a weight of routed experts. In three dimensions, the first axis is experts."""
    stacked: int = 1
    """Matrices that lie end to end along the output axis of one expert: 2 if gate and up are one weight."""

    def __post_init__(self) -> None:
        """Raise ValueError for an axis that no weight contracts, or matrices whose elements are not consecutive."""
        if self.input_axis not in (-1, -2):
            raise ValueError(
                f"{self.names}: input_axis = {self.input_axis}; use -1 for (..., out, in), -2 for (in, out)"
            )
        if self.stacked != 1 and self.input_axis == -2:
            raise ValueError(
                f"{self.names}: stacked = {self.stacked} with input_axis = -2, where matrices end to end are not "
                "consecutive; leave stacked out"
            )


@dataclass(frozen=True)
class SavedAs:
    """A weight that has another name, or is divided, in the files that `save_pretrained` writes."""

    name: str
    """End of its name in memory, after a dot. If the parts have a `*`, the first axis of the weight counts experts."""
    parts: tuple[str, ...]
    """Ends of its parts' names in files, in the order in which they lie end to end. `*` is the number of an expert."""


@dataclass(frozen=True)
class Family:
    """All matrices of an architecture: each is named once, by a prunable row or by a dense glob."""

    prunable: tuple[Row, ...]
    dense: tuple[str, ...]
    experts: tuple[str, ...] = ()
    """Globs over the names of the modules that hold all routed experts of a layer; see `leaf_modules`."""
    saved_as: tuple[SavedAs, ...] = ()
    """Weights that `save_pretrained` of transformers writes under other names than the model has."""


def _gated(module: str, experts: bool = False) -> tuple[Row, ...]:
    """Return the rows of an MLP of three nn.Linear."""
    return tuple(Row(f"layers.*.{module}.{name}_proj.weight", experts=experts) for name in ("gate", "up", "down"))


_HEAD = ("embed_tokens.weight", "lm_head.weight")
_ATTENTION = (Row("layers.*.self_attn.[qkvo]_proj.weight"),)
_LATENT_ATTENTION = (
    Row("layers.*.self_attn.q_proj.weight"),  # where queries have no latent (q_lora_rank null)
    Row("layers.*.self_attn.q_a_proj.weight"),
    Row("layers.*.self_attn.q_b_proj.weight"),
    Row("layers.*.self_attn.kv_a_proj_with_mqa.weight"),
    Row("layers.*.self_attn.kv_b_proj.weight"),
    Row("layers.*.self_attn.o_proj.weight"),
)
_FUSED_EXPERTS = (
    Row("layers.*.mlp.experts.gate_up_proj", experts=True, stacked=2),
    Row("layers.*.mlp.experts.down_proj", experts=True),
)
# transformers 5 fuses the experts of a layer. In files, and in other model code, each expert has three weights.
_EXPERTS = (*_FUSED_EXPERTS, *_gated("mlp.experts.*", experts=True))
_ROUTER = "layers.*.mlp.gate.weight"
_SAVED_EXPERTS = (
    SavedAs("mlp.experts.gate_up_proj", ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight")),
    SavedAs("mlp.experts.down_proj", ("mlp.experts.*.down_proj.weight",)),
)

_LLAMA = Family(prunable=(*_ATTENTION, *_gated("mlp")), dense=_HEAD)

_GATE_UP = (Row("layers.*.mlp.gate_up_proj.weight"), Row("layers.*.mlp.down_proj.weight"))
_PHI3 = Family(
    prunable=(Row("layers.*.self_attn.qkv_proj.weight"), Row("layers.*.self_attn.o_proj.weight"), *_GATE_UP),
    dense=_HEAD,
)
_GLM4 = Family(prunable=(*_ATTENTION, *_GATE_UP), dense=_HEAD)
_STARCODER2 = Family(prunable=(*_ATTENTION, Row("layers.*.mlp.c_*.weight")), dense=_HEAD)

# `attention.bias` is the causal mask that old checkpoints carry. transformers calls the head `lm_head` in memory.
_GPT_NEOX = Family(
    prunable=(
        Row("layers.*.attention.query_key_value.weight"),
        Row("layers.*.attention.dense.weight"),
        Row("layers.*.mlp.dense_*.weight"),
    ),
    dense=("embed_in.weight", "lm_head.weight", "embed_out.weight", "layers.*.attention.bias"),
    saved_as=(SavedAs("lm_head.weight", ("embed_out.weight",)),),
)
_GPT_NEO = Family(
    prunable=(
        Row("h.*.attn.attention.[qkv]_proj.weight"),
        Row("h.*.attn.attention.out_proj.weight"),
        Row("h.*.mlp.c_*.weight"),
    ),
    dense=("wte.weight", "wpe.weight", "lm_head.weight", "h.*.attn.attention.bias"),
)
_FALCON = Family(
    prunable=(
        Row("h.*.self_attention.query_key_value.weight"),
        Row("h.*.self_attention.dense.weight"),
        Row("h.*.mlp.dense_*.weight"),
    ),
    dense=("word_embeddings.weight", "lm_head.weight"),
)

# transformers' Conv1D stores (in, out). `attn.bias` is the causal mask that old checkpoints carry, not a bias.
_GPT2 = Family(
    prunable=(
        Row("h.*.attn.c_attn.weight", input_axis=-2),
        Row("h.*.attn.c_proj.weight", input_axis=-2),
        Row("h.*.mlp.c_fc.weight", input_axis=-2),
        Row("h.*.mlp.c_proj.weight", input_axis=-2),
    ),
    dense=("wte.weight", "wpe.weight", "lm_head.weight", "h.*.attn.bias"),
)

# Only the 350M model has project_in, a part of its embedding, and project_out, a part of its head.
_OPT = Family(
    prunable=(
        Row("layers.*.self_attn.[qkv]_proj.weight"),
        Row("layers.*.self_attn.out_proj.weight"),
        Row("layers.*.fc[12].weight"),
    ),
    dense=(*_HEAD, "embed_positions.weight", "project_in.weight", "project_out.weight"),
)

_MIXTRAL = Family(
    prunable=(
        *_ATTENTION,
        *_FUSED_EXPERTS,
        Row("layers.*.block_sparse_moe.experts.*.w[123].weight", experts=True),
    ),
    dense=(*_HEAD, _ROUTER, "layers.*.block_sparse_moe.gate.weight"),
    experts=("layers.*.mlp.experts", "layers.*.block_sparse_moe.experts"),
    saved_as=(
        SavedAs(
            "mlp.experts.gate_up_proj",
            ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
        ),
        SavedAs("mlp.experts.down_proj", ("block_sparse_moe.experts.*.w2.weight",)),
        SavedAs("mlp.gate.weight", ("block_sparse_moe.gate.weight",)),
    ),
)
_OLMOE = Family(
    prunable=(*_ATTENTION, *_EXPERTS),
    dense=(*_HEAD, _ROUTER),
    experts=("layers.*.mlp.experts",),
    saved_as=_SAVED_EXPERTS,
)
_QWEN3_MOE = replace(_OLMOE, prunable=(*_LLAMA.prunable, *_EXPERTS))
_QWEN2_MOE = replace(
    _OLMOE,
    prunable=(*_QWEN3_MOE.prunable, *_gated("mlp.shared_expert")),
    dense=(*_OLMOE.dense, "layers.*.mlp.shared_expert_gate.weight"),
)
_DEEPSEEK = replace(_OLMOE, prunable=(*_QWEN3_MOE.prunable, *_gated("mlp.shared_experts")))
_DEEPSEEK_MLA = replace(_OLMOE, prunable=(*_LATENT_ATTENTION, *_gated("mlp"), *_EXPERTS, *_gated("mlp.shared_experts")))

# Linear attention: the projections to and from its state are pruned; its decay and its convolution stay dense.
_LINEAR_ATTENTION = (Row("layers.*.linear_attn.in_proj_[qz]*.weight"), Row("layers.*.linear_attn.out_proj.weight"))
_STATE = ("layers.*.linear_attn.in_proj_[ab]*.weight", "layers.*.linear_attn.conv1d.weight")
_QWEN3_NEXT = replace(
    _QWEN2_MOE, prunable=(*_QWEN2_MOE.prunable, *_LINEAR_ATTENTION), dense=(*_QWEN2_MOE.dense, *_STATE)
)
_QWEN3_5 = Family(prunable=(*_LLAMA.prunable, *_LINEAR_ATTENTION), dense=(*_HEAD, *_STATE))
_QWEN3_5_MOE = replace(_QWEN3_NEXT, prunable=(*_OLMOE.prunable, *_gated("mlp.shared_expert"), *_LINEAR_ATTENTION))

# Experts are stored (experts, in, out); gate and up of GPT-OSS alternate along the last axis, those of Llama 4 do not.
_GPT_OSS = Family(
    prunable=(
        *_ATTENTION,
        Row("layers.*.mlp.experts.gate_up_proj", input_axis=-2, experts=True),
        Row("layers.*.mlp.experts.down_proj", input_axis=-2, experts=True),
    ),
    dense=(*_HEAD, "layers.*.mlp.router.weight", "layers.*.mlp.experts.*_proj_bias"),
    experts=("layers.*.mlp.experts",),
)
_LLAMA4 = Family(
    prunable=(
        *_ATTENTION,
        *_gated("feed_forward"),
        *_gated("feed_forward.shared_expert"),
        Row("layers.*.feed_forward.experts.gate_up_proj", input_axis=-2, experts=True),
        Row("layers.*.feed_forward.experts.down_proj", input_axis=-2, experts=True),
    ),
    dense=(*_HEAD, "layers.*.feed_forward.router.weight"),
    experts=("layers.*.feed_forward.experts",),
)

FAMILIES: dict[str, Family] = {
    "cohere2": _LLAMA,
    "deepseek": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK_MLA,
    "deepseek_v3": _DEEPSEEK_MLA,
    "falcon": _FALCON,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "glm4": _GLM4,
    "glm4_moe": _DEEPSEEK,
    "gpt2": _GPT2,
    "gpt_neo": _GPT_NEO,
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": _GPT_OSS,
    "granite": _LLAMA,
    "internlm3": _LLAMA,
    "llama": _LLAMA,
    "llama4_text": _LLAMA4,
    "mistral": _LLAMA,
    "mixtral": _MIXTRAL,
    "olmo2": _LLAMA,
    "olmo3": _LLAMA,
    "olmoe": _OLMOE,
    "opt": _OPT,
    "phi3": _PHI3,
    "qwen2": _LLAMA,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3": _LLAMA,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN3_NEXT,
    "smollm3": _LLAMA,
    "starcoder2": _STARCODER2,
}
"""Keyed by the `model_type` of the model's config."""


def register_family(
    model_type: str,
    *,
    like: str | None = None,
    prunable: Iterable[Row | str] = (),
    dense: Iterable[str] = (),
    experts: Iterable[str] = (),
    saved_as: Iterable[SavedAs] = (),
) -> None:
    """Add a family to the table, for this process, without editing this file.

        register_family("seed_oss", like="llama")
        register_family(
            "mpt",
            prunable=["blocks.*.attn.Wqkv.weight", "blocks.*.attn.out_proj.weight", "blocks.*.ffn.*_proj.weight"],
            dense=["wte.weight", "lm_head.weight"],
        )

    Call it before `prepare`. Checkpoints and exports list the weights that they have under a mask, so that the offline
    tools work without it.

    Args:
        model_type: of the model's config.
        like: a family whose rows it has; the other arguments come in addition.
        prunable: rows, or globs for weights stored as (..., out, in).
        dense: globs for embeddings, heads, routers and all other matrices that stay dense.
        experts: globs for the modules that hold all routed experts of a layer.
        saved_as: weights that `save_pretrained` of transformers writes under other names than the model has.

    Raises:
        ValueError: the family has other rows already, `like` has none, nothing is prunable, or an argument is one glob
            where a list belongs.
    """
    for key, value in {"prunable": prunable, "dense": dense, "experts": experts, "saved_as": saved_as}.items():
        if isinstance(value, str | Row | SavedAs):  # the letters of a text would be globs, and * one of them
            raise ValueError(f"register_family: {key} = {value!r} is no list; write [{value!r}]")
    if like is not None and like not in FAMILIES:
        raise ValueError(f"register_family: like={like!r} has no rows; known families: {', '.join(FAMILIES)}")
    # The rows of the other family come first.
    base = Family((), ()) if like is None else FAMILIES[like]
    rows = tuple(Row(row) if isinstance(row, str) else row for row in prunable)
    family = Family(
        prunable=(*base.prunable, *rows),
        dense=(*base.dense, *dense),
        experts=(*base.experts, *experts),
        saved_as=(*base.saved_as, *saved_as),
    )
    if not family.prunable:
        raise ValueError(f"register_family: {model_type!r} has nothing that is prunable; give rows, or like")
    if FAMILIES.setdefault(model_type, family) != family:
        raise ValueError(f"register_family: {model_type!r} has other rows in the family table already")


LOW_RANK = "low_rank_b"
"""Name of the learned matrix B that `model.low_rank` adds to a layer; dense in every family."""

PROJECTION = "low_rank_p"
"""Name of the matrix P that it adds if P is learned; dense in every family."""

BRANCH = (LOW_RANK, PROJECTION)

SCALE = "weight_scale"
"""Name of the learned factors that `model.weight_scale` adds to a layer."""
