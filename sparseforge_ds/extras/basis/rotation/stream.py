"""Hidden vectors of a model that can be rotated, and their axes in its parameters.

A norm whose gains are all alike commutes with every rotation of the residual stream, as SliceGPT found for gains of 1
(arXiv 2401.15024). If it subtracts the mean, it commutes with those that keep the vector of ones. So the gains of every
norm move into the layers that read it, which are observed in a forward pass. Their size stays in the norm, as one power
of two: the layers' weights stay as large as they were, so that learning rates suit them as before, and a power of two
rounds nothing. The values of attention heads need no norm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparseforge_ds.extras.basis.permutation.channels import Axis, Dimension, dimensions

RESIDUAL = "residual"


@dataclass(frozen=True)
class Stream:
    """Residual stream and values of heads of a model in memory."""

    rotated: Mapping[str, Dimension]
    """Dimensions by name: `RESIDUAL`, and the values of every layer's attention."""
    norm_of: Mapping[str, str]
    """Norm of every weight that reads the residual stream."""
    gain_scales: Mapping[str, float]
    """Power of two next to the RMS of the gains of every norm of the residual stream, which stays in the norm."""
    gains: Mapping[str, Tensor]
    """Gains of these norms relative to their scales, (C,) fp32, which move into the layers."""
    keeps_ones: bool
    """True if the norms subtract the mean, so that rotations must keep the vector of ones."""

    def axes(self, tensor: str) -> Iterator[tuple[str, Axis]]:
        """Yield (dimension, axis) for every rotated axis of a tensor."""
        for name, dimension in self.rotated.items():
            for axis in dimension.axes:
                if axis.tensor == tensor:
                    yield name, axis


@torch.no_grad()
def find_stream(model: PreTrainedModel, tokens_BS: Tensor) -> Stream:
    """Find the dimensions of a model that can be rotated.

    Args:
        model: the model; its head must be untied.
        tokens_BS: (B, S) token ids for one forward pass.

    Raises:
        ValueError: the table of channels has no row for the family, or its norms follow its layers.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    by_name = dimensions(model.config.model_type, model.config.get_text_config(), shapes, "all")
    # Values that are clamped one by one do not commute with a rotation.
    clamped = getattr(model.config, "clip_qkv", None) is not None
    values = {name: dimension for name, dimension in by_name.items() if name.endswith(".values") and not clamped}
    # Every norm needs readers that take its gain.
    residual = by_name[RESIDUAL]
    norms, readers = _norms_and_readers(model, residual)
    input_norms = _observe_input_norms(model, norms, tokens_BS)
    norm_of = {name: _norm_of(name, input_norms, model) for name in readers}
    if unread := sorted(norms.keys() - set(norm_of.values())):
        raise ValueError(
            f"rotate: no layer reads the output of {unread[0]}, which is added to the residual stream. Its gain cannot "
            f"move into a layer; a {model.config.model_type!r} model can be permuted, not rotated"
        )
    gains = {name: parameters[f"{name}.weight"].detach().float().clone() for name in norms}
    scales = {name: _power_of_two(float(gain_C.square().mean().sqrt())) for name, gain_C in gains.items()}
    gains = {name: gain_C / scales[name] for name, gain_C in gains.items()}
    for name in norms:
        if f"{name}.bias" in parameters and bool((gains[name] == 0).any()):
            raise ValueError(f"rotate: {name} has gains of 0, by which its bias cannot be divided; permute instead")
    keeps_ones = subtracts_mean(next(iter(norms.values())), residual)
    return Stream({RESIDUAL: residual, **values}, norm_of, scales, gains, keeps_ones)


def _power_of_two(size: float) -> float:
    """Return the power of two next to a positive number; 1 for 0 and what is not finite."""
    return 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0


def untie(model: PreTrainedModel) -> bool:
    """Give a head that shares the embedding's weight its own copy, and return True if it did.

    A norm's gain moves into the head, and must not move into the embedding.
    """
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
    return True


def _norms_and_readers(model: PreTrainedModel, residual: Dimension) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the norms of the residual stream by name, and the names of the weights that read it, head included."""
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
    """Return True if a layer contracts the axis: the last, unless it stores (in, out)."""
    in_first = type(module).__name__ == "Conv1D" or getattr(module, "is_transposed", False)
    return axis.axis == (-2 if in_first else -1)


def _observe_input_norms(model: PreTrainedModel, norms: Mapping[str, nn.Module], tokens_BS: Tensor) -> dict[str, str]:
    """Run one forward pass, and return the norm of every module whose input is a norm's output."""
    outputs: dict[tuple[int, int], tuple[str, Tensor]] = {}
    input_norms: dict[str, str] = {}

    def on_output(name: str, _module: nn.Module, _args: object, output: Tensor) -> None:
        outputs[output.data_ptr(), output._version] = (name, output)  # the reference keeps its memory from being reused

    def on_input(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        hidden = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
        if hidden is not None and (hidden.data_ptr(), hidden._version) in outputs:
            input_norms[name] = outputs[hidden.data_ptr(), hidden._version][0]

    with ExitStack() as stack:
        for name, norm in norms.items():
            stack.enter_context(norm.register_forward_hook(partial(on_output, name)))
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_pre_hook(partial(on_input, name), with_kwargs=True))
        stack.callback(model.train, model.training)
        model.eval()
        model(input_ids=tokens_BS.to(model.device), use_cache=False)
    return input_norms


def _norm_of(weight: str, input_norms: Mapping[str, str], model: PreTrainedModel) -> str:
    """Return the norm whose output the weight's layer reads, or the nearest module around the layer."""
    owner = weight.rpartition(".")[0]
    while owner:
        if owner in input_norms:
            return input_norms[owner]
        owner = owner.rpartition(".")[0]
    raise ValueError(
        f"rotate: {weight} reads the residual stream, but not the output of a norm; a {model.config.model_type!r} "
        "model can be permuted, not rotated"
    )


def subtracts_mean(norm: nn.Module, residual: Dimension) -> bool:
    """Return True if adding a constant to a norm's input leaves its output as it is."""
    plain: Any = copy.deepcopy(norm).float()  # in 16 bits, or with large gains, rounding would hide the difference
    plain.weight.data.fill_(1.0)
    x_C = torch.randn(residual.channels, generator=torch.Generator().manual_seed(0)).to(plain.weight)
    return torch.allclose(plain(x_C + 4), plain(x_C), atol=0.1)
