"""All model families, as a table. Adding a family is adding a row.

A row is a glob over parameter names, written without the prefix that the surrounding model class adds (`model.`,
`model.decoder.`, `transformer.`, none), plus the axis which the matmul contracts. Routers, embeddings and heads are
named too, as dense: `model.families` refuses a matrix that has no name here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Row:
    """Weights that a family names prunable."""

    names: str
    """Glob over parameter names, anchored at a dot and at the end."""
    input_axis: int = -1
    """The axis that the matmul contracts: -1 for (..., out, in), -2 for (..., in, out)."""
    experts: bool = False
    """Whether only the tokens that are routed to it see the weight. In three dimensions, the first axis is experts."""
    stacked: int = 1
    """Matrices that lie end to end along the output axis of one expert: 2 where gate and up are one weight."""

    def __post_init__(self) -> None:
        assert self.stacked == 1 or self.input_axis == -1, "matrices stacked along the last axis are not consecutive"


@dataclass(frozen=True)
class Published:
    """A weight that transformers keeps otherwise than the files that a family is published in."""

    name: str
    """End of its name in memory, after a dot. Its first axis is experts where the parts have a `*`."""
    parts: tuple[str, ...]
    """Ends of the names in files, in the order in which they lie end to end in an expert. `*` is its number."""


@dataclass(frozen=True)
class Family:
    """All matrices of an architecture: each is named once, by a prunable row or by a dense glob."""

    prunable: tuple[Row, ...]
    dense: tuple[str, ...]
    experts: tuple[str, ...] = ()
    """Globs over the names of the modules that hold all routed experts of a layer; see `leaf_modules`."""
    published: tuple[Published, ...] = ()
    """What `save_pretrained` of transformers gives other names than the model has."""


def _gated(where: str, experts: bool = False) -> tuple[Row, ...]:
    """An MLP of three nn.Linear."""
    return tuple(Row(f"layers.*.{where}.{name}_proj.weight", experts=experts) for name in ("gate", "up", "down"))


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
# transformers 5 fuses the experts of a layer; in published files, and in models of others, each has its own three.
_EXPERTS = (*_FUSED_EXPERTS, *_gated("mlp.experts.*", experts=True))
_ROUTER = "layers.*.mlp.gate.weight"
_PUBLISHED_EXPERTS = (
    Published("mlp.experts.gate_up_proj", ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight")),
    Published("mlp.experts.down_proj", ("mlp.experts.*.down_proj.weight",)),
)

_LLAMA = Family(prunable=(*_ATTENTION, *_gated("mlp")), dense=_HEAD)

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

# project_in and project_out, which only the 350M model has, are the second factor of its embedding and of its head.
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
    published=(
        Published(
            "mlp.experts.gate_up_proj",
            ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
        ),
        Published("mlp.experts.down_proj", ("block_sparse_moe.experts.*.w2.weight",)),
        Published("mlp.gate.weight", ("block_sparse_moe.gate.weight",)),
    ),
)
_OLMOE = Family(
    prunable=(*_ATTENTION, *_EXPERTS),
    dense=(*_HEAD, _ROUTER),
    experts=("layers.*.mlp.experts",),
    published=_PUBLISHED_EXPERTS,
)
_QWEN3_MOE = replace(_OLMOE, prunable=(*_LLAMA.prunable, *_EXPERTS))
_QWEN2_MOE = replace(
    _OLMOE,
    prunable=(*_QWEN3_MOE.prunable, *_gated("mlp.shared_expert")),
    dense=(*_OLMOE.dense, "layers.*.mlp.shared_expert_gate.weight"),
)
_DEEPSEEK = replace(_OLMOE, prunable=(*_QWEN3_MOE.prunable, *_gated("mlp.shared_experts")))
_DEEPSEEK_MLA = replace(_OLMOE, prunable=(*_LATENT_ATTENTION, *_gated("mlp"), *_EXPERTS, *_gated("mlp.shared_experts")))

FAMILIES: dict[str, Family] = {
    "deepseek": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK_MLA,
    "deepseek_v3": _DEEPSEEK_MLA,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _MIXTRAL,
    "olmoe": _OLMOE,
    "opt": _OPT,
    "qwen2": _LLAMA,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3": _LLAMA,
    "qwen3_moe": _QWEN3_MOE,
}
"""Keyed by the `model_type` of the model's config."""

LOW_RANK = "low_rank_b"
"""Name of the learned matrix that `model.low_rank` adds to a layer; dense in every family."""

SCALE = "weight_scale"
"""Name of the learned factors that `model.weight_scale` adds to a layer."""
