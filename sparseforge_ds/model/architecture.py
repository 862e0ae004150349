"""Models on the meta device: sizes, shapes and forward passes from a config alone, without weights."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.branch import branches
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.model.low_rank import prepare
from sparseforge_ds.model.registration import BUILD_ERRORS, not_built
from sparseforge_ds.zero.expert_hooks import sees_all_tokens

_ATTENTION = "sparseforge_planned"
"""Our `attn_implementation` of a transformers model."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json for the number of routed experts."""
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
"""Keys of config.json for the number of experts that a router chooses, or for a list of it by layer."""


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor."""

    name: str
    numel: int
    masked: bool


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model for the planner. Numbers count elements unless a field says otherwise."""

    parameters: tuple[Parameter, ...]
    """Parameters in `named_parameters` order; tied ones once."""
    matrices: tuple[tuple[int, int, int], ...]
    """Sizes (experts or 1, outputs, inputs) of every weight under a mask."""
    rows_and_columns: int
    """Rows and columns of all matrices that are scored by themselves; gate and up of an expert are two."""
    input_first: bool
    """True if some of these matrices are stored as (in, out)."""
    largest_module: int
    """Elements of the largest module that ZeRO-3 gathers at once."""
    active: int
    """Parameters that one token uses: all but the experts that it is not routed to. Llama 4's experts get all tokens,
    as zeros if they are not routed to them."""
    looked_up: int
    """Parameters among them that no token is multiplied by: embeddings that are no head."""
    hidden: int
    """Width of the hidden states."""
    vocabulary: int
    """Entries of the vocabulary."""

    @property
    def total(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def masked(self) -> int:
        """Elements of the parameters under a mask."""
        return sum(parameter.numel for parameter in self.parameters if parameter.masked)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(parameter.numel for parameter in self.parameters)


class _Attention(torch.autograd.Function):
    """Attention with the shapes and the memory of a fused kernel (flash attention), but no result.

    It keeps q, k, v, its output and one fp32 number for each token and head for the backward pass, never a square of
    the sequence length. On the meta device transformers' own attention would fail, since its masks depend on values.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        B, H, S, _ = query.shape
        output_BSHD = value.new_empty(B, S, H, value.shape[-1])
        ctx.save_for_backward(query, key, value, output_BSHD, query.new_empty(B, H, S, dtype=torch.float32))
        return output_BSHD

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _output, _sums = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(_module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value), None  # type: ignore[no-untyped-call]


AttentionInterface.register(_ATTENTION, _attention)


def bare_model(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build a causal language model on the meta device, with our attention if its family allows that.

    Raises:
        ValueError: no model can be built from the config.
    """
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        try:
            # transformers writes the attention into the config, so it gets a copy.
            try:
                return AutoModelForCausalLM.from_config(
                    copy.deepcopy(config), **options, attn_implementation=_ATTENTION, trust_remote_code=False
                )
            except KeyError as error:
                if error.args != (_ATTENTION,):  # some families have attention classes in a table of their own
                    raise
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), **options, trust_remote_code=False)
        except BUILD_ERRORS as error:
            raise not_built(config, error) from error


def empty_model(config: PretrainedConfig, forge: SparseForgeConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model that a run would train, with its low-rank branches, on the meta device."""
    model = bare_model(config, dtype)
    prepare(model, forge)
    for branch in branches(model).values():
        branch.enabled = True
    return model


@contextmanager
def without_numbers(config: PretrainedConfig) -> Iterator[None]:
    """Turn errors of a model that runs on the meta device in the block into a ValueError: its pass needs values."""
    try:
        yield
    except (RuntimeError, AttributeError, LookupError, TypeError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"a {config.model_type} model cannot be run on the meta device, where the planner measures activations: "
            f"{cause}; plan with a model of similar shape, or measure a few steps on a GPU"
        ) from error


def share_of_experts(model: PreTrainedModel) -> float:
    """Return the share of its routed experts that a token passes; 1 where there are none, or it passes all."""
    text = model.config.get_text_config()
    sizes = getattr(text, "ffn_config", text)  # DBRX has them apart
    experts = next((getattr(sizes, name) for name in _EXPERTS if getattr(sizes, name, None)), None)
    chosen = next((getattr(sizes, name) for name in _CHOSEN if getattr(sizes, name, None)), None)
    if experts is None or chosen is None or any(sees_all_tokens(module) for module in model.modules()):
        return 1.0
    by_layer = chosen if isinstance(chosen, list) else [chosen]
    return min(float(sum(by_layer) / len(by_layer) / experts), 1.0)


def architecture_of(
    model: PreTrainedModel, weights: Collection[PrunableWeight], leaf_suffixes: Collection[str] = ()
) -> Architecture:
    """Return the sizes of a model, a student with its branches or a teacher.

    Args:
        model: with or without weights.
        weights: those under a mask.
        leaf_suffixes: ends of the names of modules that ZeRO-3 gathers as a whole (`leaf_module.name_suffixes`).
    """
    config = model.config.get_text_config()
    masked = {weight.name for weight in weights}
    share = share_of_experts(model)
    # A row of an embedding is looked up; the head multiplies all of them, where it has the same weight.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {id(getattr(model.get_output_embeddings(), "weight", None))}
    return Architecture(
        parameters=tuple(Parameter(name, p.numel(), name in masked) for name, p in model.named_parameters()),
        matrices=tuple(_matrices(weight) for weight in weights),
        rows_and_columns=sum(weight.matrices * sum(weight.matrix) for weight in weights),
        input_first=any(weight.input_axis == -2 for weight in weights),
        largest_module=max(
            sum(p.numel() for p in module.parameters(recurse=any(name.endswith(leaf) for leaf in leaf_suffixes)))
            for name, module in model.named_modules()
        ),
        active=sum(int(p.numel() * (share if ".experts." in f".{n}" else 1)) for n, p in model.named_parameters()),
        looked_up=sum(p.numel() for p in model.parameters() if id(p) in tables),
        hidden=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
    )


def _matrices(weight: PrunableWeight) -> tuple[int, int, int]:
    """Return the entry of `Architecture.matrices` for a weight."""
    outputs, inputs = weight.shape[-2:] if weight.input_axis == -1 else weight.shape[:-3:-1]
    return weight.numel // (outputs * inputs), outputs, inputs


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a config cut to some decoder layers.

    Raises:
        ValueError: the model has fewer layers, or none is asked for.
    """
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    if not 1 <= layers <= text.num_hidden_layers:
        raise ValueError(f"--layers {layers} is not valid: the model has {text.num_hidden_layers}; use 1 to that many")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return cut
