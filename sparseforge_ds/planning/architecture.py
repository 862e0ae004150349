"""What a model is before it has weights: sizes, shapes and the order in which modules run, from its config alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.coverage import Coverage
from sparseforge_ds.model.families import PrunableWeight, coverage, prunable_weights, uncovered_weights
from sparseforge_ds.model.low_rank import branches, prepare
from sparseforge_ds.planning.attention import NAME
from sparseforge_ds.planning.live import Live

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor."""

    name: str
    numel: int
    masked: bool
    """Whether it goes under a mask."""


@dataclass(frozen=True)
class Module:
    """One call of a module in a forward pass, as ZeRO-3 sees it."""

    name: str
    parameters: tuple[int, ...]
    """Parameters, by position, that it needs by itself; a leaf module needs all below it at once."""
    block: int
    """Number of the decoder block that it is inside of, or -1."""
    innermost: bool
    """Whether it calls no other module."""


@dataclass(frozen=True)
class Sizes:
    """How large a model is, in elements."""

    parameters: tuple[Parameter, ...]
    """In `named_parameters` order; tied ones once."""
    rows_and_columns: int
    """Of all matrices that are scored by themselves."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def masked(self) -> int:
        """Parameters under a mask."""
        return sum(parameter.numel for parameter in self.parameters if parameter.masked)

    @property
    def largest(self) -> int:
        """The largest parameter tensor."""
        return max(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Architecture(Sizes):
    """A model as the planner sees it. Numbers are elements unless something else is said."""

    model_type: str
    modules: tuple[Module, ...]
    """In the order in which a forward pass enters them."""
    left: tuple[int, ...]
    """Positions in `modules` in the order in which a forward pass leaves them; a backward pass is the reverse."""
    coverage: Coverage
    uncovered: tuple[str, ...]
    """Linear weights that nobody has decided about, as lines for people."""
    masked_shapes: tuple[tuple[int, ...], ...]
    """Shape of every weight under a mask."""
    input_first: bool
    """Whether some of them are stored as (in, out)."""
    active: int
    """Parameters that one token uses: all, less the experts that it is not routed to."""
    expert_share: float
    """Share of the routed experts that one token uses; 1 without experts."""
    multiplied: int
    """Elements of the matrices that one token is multiplied with, the head included and the embedding not."""
    layers: int
    hidden: int
    vocabulary: int
    score_width: int
    """Heads times the width of a query."""
    value_width: int
    """Heads times the width of a value."""
    positions: int | None
    """Longest sequence, where the config says so."""

    @property
    def largest_module(self) -> int:
        """What ZeRO-3 must gather at once at the very least."""
        return max(sum(self.parameters[index].numel for index in module.parameters) for module in self.modules)


def bare_model(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A causal language model on the meta device, which a forward pass can be run through where its family lets it.

    Args:
        config: from `read_model_config`, or one that `require_causal` accepts.
        dtype: None for the config's.
    """
    chosen = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        try:  # what is said here is written into the config
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), **chosen, attn_implementation=NAME, trust_remote_code=False
            )
        except KeyError as error:
            if error.args != (NAME,):  # a family that keeps its attention classes in a table of its own
                raise
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **chosen, trust_remote_code=False)


def empty_model(config: PretrainedConfig, forge: SparseForgeConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model that a run would train, low-rank branches included, on the meta device.

    Raises:
        ValueError: the family table does not know it.
    """
    model = bare_model(config, dtype)
    prepare(model, forge)
    for branch in branches(model).values():
        branch.enabled = True
    return model


def sizes(model: nn.Module, weights: Iterable[PrunableWeight]) -> Sizes:
    """Of a model whose `weights` are under a mask; it may have no weights."""
    weights = list(weights)
    masked = {weight.name for weight in weights}
    return Sizes(
        parameters=tuple(Parameter(name, p.numel(), name in masked) for name, p in model.named_parameters()),
        rows_and_columns=sum(weight.matrices * sum(weight.matrix) for weight in weights),
    )


def describe(model: PreTrainedModel, forge: SparseForgeConfig, leaf_suffixes: tuple[str, ...] = ()) -> Architecture:
    """Take the sizes of a model, which may have no weights.

    Args:
        model: from `empty_model`.
        forge: decides what is under a mask.
        leaf_suffixes: names of modules that ZeRO-3 gathers as a whole (`leaf_module.name_suffixes`).
    """
    config = model.config.get_text_config()
    weights = prunable_weights(model, forge)
    named = list(model.named_parameters())
    modules, left = _forward_order(model, {id(p): i for i, (_, p) in enumerate(named)}, leaf_suffixes)
    share = _expert_share(config)
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    head = model.get_output_embeddings()
    multiplied = sum(
        int(p.numel() * (share if is_expert(n) else 1)) for n, p in named if p.dim() > 1 and id(p) not in embeddings
    )
    if head is not None and id(head.weight) in embeddings:
        multiplied += head.weight.numel()
    heads = int(getattr(config, "num_attention_heads", None) or 0)  # none in a state-space model
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0
    value, score = width, width
    if getattr(config, "qk_nope_head_dim", None):
        score, value = int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim)
    return Architecture(
        model_type=str(model.config.model_type),
        **vars(sizes(model, weights)),
        modules=modules,
        left=left,
        coverage=coverage(model, weights),
        uncovered=tuple(uncovered_weights(model, forge).lines()),
        masked_shapes=tuple(weight.shape for weight in weights),
        input_first=any(weight.input_axis == -2 for weight in weights),
        active=sum(int(p.numel() * (share if is_expert(n) else 1)) for n, p in named),
        expert_share=share,
        multiplied=multiplied,
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
        score_width=heads * score,
        value_width=heads * value,
        positions=getattr(config, "max_position_embeddings", None),
    )


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts, fused or one by one."""
    return ".experts." in f".{name}"


def _expert_share(config: PretrainedConfig) -> float:
    """Share of the routed experts that one token uses."""
    experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return 1.0 if experts is None or chosen is None else chosen / experts


def _forward_order(
    model: PreTrainedModel, index_of: dict[int, int], leaf_suffixes: tuple[str, ...]
) -> tuple[tuple[Module, ...], tuple[int, ...]]:
    """`Architecture.modules` and `Architecture.left`, by running a few tokens through a model without numbers.

    Raises:
        ValueError: the forward pass of this model looks at numbers.
    """
    entered: list[list[Any]] = []
    left: list[int] = []
    inside: list[int] = []
    blocks = _blocks(model)

    def enter(name: str, own: list[nn.Parameter], *_: Any) -> None:
        if inside:
            entered[inside[-1]][3] = False
        inside.append(len(entered))
        indices = tuple(dict.fromkeys(index_of[id(parameter)] for parameter in own))
        entered.append([name, indices, next((n for block, n in blocks if f"{name}.".startswith(block)), -1), True])

    handles = []
    leaves: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(leaf + ".") for leaf in leaves):
            continue
        leaf = bool(name) and any(name.endswith(suffix) for suffix in leaf_suffixes)
        leaves += [name] if leaf else []
        own = list(module.parameters(recurse=leaf))
        handles.append(module.register_forward_pre_hook(partial(enter, name, own)))
        handles.append(module.register_forward_hook(lambda *_: left.append(inside.pop())))
    try:
        with torch.no_grad(), Live():
            model(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"), use_cache=False)
    except (RuntimeError, AttributeError, LookupError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"a {model.config.model_type} model cannot be run on the meta device, which the planner does to see its "
            f"activations: {reason}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return tuple(Module(*entry) for entry in entered), tuple(left)


def _blocks(model: nn.Module) -> list[tuple[str, int]]:
    """("model.layers.3.", 3) of every decoder block: the entries of the longest, outermost module list."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        return []
    longest = max(lists, key=lambda name: (-name.count("."), lists[name]))
    return [(f"{longest}.{number}.", number) for number in range(lists[longest])]


def elements(shape: tuple[int, ...]) -> int:
    """Elements of one matrix of a weight: an expert's, where it holds many."""
    return math.prod(shape[-2:])


def largest_experts(model: Architecture) -> int:
    """Elements of one layer's routed experts, which a leaf module gathers at once; 0 without experts."""
    layers: dict[str, int] = {}
    for parameter in model.parameters:
        if is_expert(parameter.name):
            layer = parameter.name.partition(".experts.")[0]
            layers[layer] = layers.get(layer, 0) + parameter.numel
    return max(layers.values(), default=0)
