"""What a model is before it has weights: sizes and shapes, from its config alone."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.branch import branches
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.model.loading_error import reason
from sparseforge_ds.model.low_rank import prepare
from sparseforge_ds.zero.expert_hooks import sees_all_tokens

_ATTENTION = "sparseforge_planned"
"""As `attn_implementation` of a transformers model."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor."""

    name: str
    numel: int
    masked: bool


@dataclass(frozen=True)
class Architecture:
    """A model as the planner sees it. Numbers count elements unless a field says otherwise."""

    parameters: tuple[Parameter, ...]
    """In `named_parameters` order; tied ones once."""
    matrices: tuple[tuple[int, int, int], ...]
    """(experts or 1, outputs, inputs) of every weight under a mask."""
    rows_and_columns: int
    """Of all matrices that are scored by themselves: gate and up of an expert apart."""
    input_first: bool
    """Whether some of them are stored as (in, out)."""
    largest_module: int
    """What ZeRO-3 must gather at once at the very least."""
    active: int
    """Parameters that one token is multiplied by: all, less the experts that it is not routed to. Llama 4's experts
    are given all tokens, as zeros where they are not routed."""
    hidden: int
    vocabulary: int

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


class _Attention(torch.autograd.Function):
    """The shapes and the memory of a fused kernel (flash attention), and no result.

    It keeps q, k, v, its output and one fp32 number a token and head for the backward pass, never a square of the
    sequence length. A model on the meta device that runs with it looks at no numbers, which transformers' masks would.
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
    """A causal language model on the meta device, which a forward pass can be run through where its family lets it.
    Raises ValueError for a config that no model can be made of."""
    chosen = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        try:
            try:  # transformers writes the chosen attention into the config, so it gets a copy
                return AutoModelForCausalLM.from_config(
                    copy.deepcopy(config), **chosen, attn_implementation=_ATTENTION, trust_remote_code=False
                )
            except KeyError as error:
                if error.args != (_ATTENTION,):  # a family that keeps its attention classes in a table of its own
                    raise
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), **chosen, trust_remote_code=False)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"no {config.model_type} model can be made of this config.json ({reason(error)}); a size or a name in "
                "it is wrong"
            ) from error


def empty_model(config: PretrainedConfig, forge: SparseForgeConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model that a run would train, low-rank branches included, on the meta device."""
    model = bare_model(config, dtype)
    prepare(model, forge)
    for branch in branches(model).values():
        branch.enabled = True
    return model


@contextmanager
def without_numbers(config: PretrainedConfig) -> Iterator[None]:
    """A model of this config runs on the meta device here. Raises ValueError where its pass looks at numbers."""
    try:
        yield
    except (RuntimeError, AttributeError, LookupError, TypeError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"a {config.model_type} model cannot be run on the meta device, where the planner measures activations: "
            f"{why}; plan with a model of similar shape, or measure a few steps on a GPU"
        ) from error


def describe(
    model: PreTrainedModel, weights: Collection[PrunableWeight], leaf_suffixes: Collection[str] = ()
) -> Architecture:
    """The sizes of a model, which may have no weights: a student with its branches, or a teacher.

    Modules with `leaf_suffixes` (`leaf_module.name_suffixes`) are gathered as a whole.
    """
    config = model.config.get_text_config()
    masked = {weight.name for weight in weights}
    experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = 1.0 if experts is None or chosen is None else chosen / experts  # of the routed experts, for one token
    if any(sees_all_tokens(module) for module in model.modules()):
        share = 1.0
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
        hidden=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
    )


def _matrices(weight: PrunableWeight) -> tuple[int, int, int]:
    """An entry of `Architecture.matrices`."""
    outputs, inputs = weight.shape[-2:] if weight.input_axis == -1 else weight.shape[:-3:-1]
    return weight.numel // (outputs * inputs), outputs, inputs
