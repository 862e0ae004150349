"""Where the hidden vectors of a model that can be rotated lie in its parameters.

A norm without a gain commutes with every rotation of the residual stream (a norm that subtracts the mean: with every
rotation that keeps the vector of ones), as SliceGPT found (arXiv 2401.15024). So the gain of every norm moves into the
layers that read it. Which layers these are is observed in a forward pass. The values of attention heads need no norm.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparseforge_ds.extras.basis.permutation.channels import Axis, Dimension, dimensions

RESIDUAL = "residual"


@dataclass(frozen=True)
class Stream:
    """The residual stream and the values of heads, of a model in memory."""

    rotated: Mapping[str, Dimension]
    """By name: `RESIDUAL`, and the values of every layer's attention."""
    norm_of: Mapping[str, str]
    """For every weight that reads the residual stream, the norm through which it does."""
    gains: Mapping[str, Tensor]
    """(C,) fp32, of every norm of the residual stream."""
    keeps_ones: bool
    """Whether the norms subtract the mean, so that the vector of ones must stay where it is."""

    def axes(self, tensor: str) -> Iterator[tuple[str, Axis]]:
        """(dimension, axis) of every rotated axis of a tensor."""
        for name, held in self.rotated.items():
            for axis in held.axes:
                if axis.tensor == tensor:
                    yield name, axis


@torch.no_grad()
def find_stream(model: PreTrainedModel, tokens_BS: Tensor) -> Stream:
    """What can be rotated in a model whose head is untied. `tokens_BS` (B, S) are token ids for one forward pass.

    Raises ValueError for a family without a row in the table of channels, or whose norms stand behind its layers.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    found = dimensions(model.config.model_type, model.config.get_text_config(), shapes, "all")
    clamped = getattr(model.config, "clip_qkv", None) is not None  # number by number, which no rotation commutes with
    values = {name: held for name, held in found.items() if name.endswith(".values") and not clamped}
    residual = found[RESIDUAL]
    norms, readers = _norms_and_readers(model, residual)
    given = _given(model, norms, tokens_BS)
    norm_of = {name: _norm_of(name, given, model) for name in readers}
    if unread := sorted(norms.keys() - set(norm_of.values())):
        raise ValueError(
            f"rotate: no layer reads the output of {unread[0]}, which is added to the residual stream, so that "
            f"its gain cannot move into a layer; a {model.config.model_type!r} model can be permuted, not rotated"
        )
    gains = {name: parameters[f"{name}.weight"].detach().float().clone() for name in norms}
    for name in norms:
        if f"{name}.bias" in parameters and bool((gains[name] == 0).any()):
            raise ValueError(f"rotate: {name} has gains of 0, by which its bias cannot be divided; permute instead")
    return Stream({RESIDUAL: residual, **values}, norm_of, gains, _subtracts_mean(next(iter(norms.values())), residual))


def untie(model: PreTrainedModel) -> bool:
    """Give a head that shares the embedding's weight one of its own, since a norm's gain moves into the head alone."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
    return True


def _norms_and_readers(model: PreTrainedModel, residual: Dimension) -> tuple[dict[str, nn.Module], list[str]]:
    """Norms of the residual stream by name, and the names of the weights that read it, head and routers too."""
    norms: dict[str, nn.Module] = {}
    readers: list[str] = []
    for axis in residual.axes:
        owner, _, kind = axis.tensor.rpartition(".")
        module = model.get_submodule(owner)
        if len(axis.shape) == 1:
            if kind == "weight":
                norms[owner] = module
        elif not isinstance(module, nn.Embedding) and _is_input(module, axis):
            readers.append(axis.tensor)
    return norms, readers


def _is_input(module: nn.Module, axis: Axis) -> bool:
    """Whether a layer contracts the axis: the last, unless it stores (in, out)."""
    in_first = type(module).__name__ == "Conv1D" or getattr(module, "is_transposed", False)
    return axis.axis == (-2 if in_first else -1)


def _given(model: PreTrainedModel, norms: Mapping[str, nn.Module], tokens_BS: Tensor) -> dict[str, str]:
    """For every module that is given a norm's output, the norm."""
    outputs: dict[int, tuple[str, Tensor]] = {}
    given: dict[str, str] = {}

    def returned(name: str, output: Tensor) -> None:
        outputs[output.data_ptr()] = (name, output)  # kept, so that its memory is nobody else's

    def called(name: str, values: tuple[Any, ...]) -> None:
        hidden = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
        if hidden is not None and hidden.data_ptr() in outputs:
            given[name] = outputs[hidden.data_ptr()][0]

    with _hooks(model, norms, returned, called):
        model(input_ids=tokens_BS.to(model.device), use_cache=False)
    return given


@contextmanager
def _hooks(model: nn.Module, norms: Mapping[str, nn.Module], returned: Any, called: Any) -> Iterator[None]:
    handles = [
        norm.register_forward_hook(lambda _module, _args, output, name=name: returned(name, output))
        for name, norm in norms.items()
    ]
    handles += [
        module.register_forward_pre_hook(
            lambda _module, args, kwargs, name=name: called(name, (*args, *kwargs.values())), with_kwargs=True
        )
        for name, module in model.named_modules()
    ]
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()


def _norm_of(weight: str, given: Mapping[str, str], model: PreTrainedModel) -> str:
    """The norm whose output the layer of a weight is given; or the module around it, which hands out parts of it."""
    owner = weight.rpartition(".")[0]
    while owner:
        if owner in given:
            return given[owner]
        owner = owner.rpartition(".")[0]
    raise ValueError(
        f"rotate: {weight} reads the residual stream, but not the output of a norm; a {model.config.model_type!r} "
        "model can be permuted, not rotated"
    )


def _subtracts_mean(norm: nn.Module, residual: Dimension) -> bool:
    plain: Any = copy.deepcopy(norm).float()  # in 16 bits, or with large gains, x + 4 is rounded by as much
    plain.weight.data.fill_(1.0)
    x_C = torch.randn(residual.channels, generator=torch.Generator().manual_seed(0)).to(plain.weight)
    return torch.allclose(plain(x_C + 4), plain(x_C), atol=0.1)
