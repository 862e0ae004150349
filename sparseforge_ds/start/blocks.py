"""The decoder blocks of a model, and what each of them is called with.

Legend of shape suffixes: B sequences of a batch, S their tokens, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparseforge_ds.model.families import PrunableWeight

_NUMBERED = re.compile(r"(?P<layers>.+?)\.(?P<number>\d+)\.")
_KNOWN = 8
"""Sets of arguments, the newest, that a further one is compared with."""


@dataclass(frozen=True)
class DecoderBlock:
    """One decoder block of a model."""

    name: str
    """Name of its module, as in `model.get_submodule`."""
    weights: tuple[PrunableWeight, ...]
    """Its weights under a mask, by names inside the block; empty where all of it stays dense."""


@dataclass(frozen=True)
class Inputs:
    """Inputs and arguments of the decoder blocks for one batch of sequences."""

    hidden_BSH: Tensor
    """Input of the first block: the embedded tokens."""
    arguments: tuple[dict[str, Any], ...]
    """Keyword arguments of every block beside its hidden states: attention masks, position embeddings. Blocks that are
    called alike, and batches that are masked alike, share the tensors."""


def decoder_blocks(model: nn.Module, weights: Sequence[PrunableWeight]) -> list[DecoderBlock]:
    """Return the decoder blocks of a model in order, with their prunable weights.

    Raises:
        ValueError: a weight belongs to no numbered block, or weights belong to blocks of several lists.
    """
    inside: dict[str, list[PrunableWeight]] = {}
    lists: dict[str, str] = {}
    for weight in weights:
        if (match := _NUMBERED.match(weight.name)) is None:
            raise ValueError(
                f"{weight.name} belongs to no numbered decoder block, so it cannot be pruned block by block; keep it "
                f'dense with "exclude": ["{weight.name}"]'
            )
        lists.setdefault(match["layers"], weight.name)
        prefix = match[0]
        part = replace(weight, name=weight.name.removeprefix(prefix), module=weight.module.removeprefix(prefix))
        inside.setdefault(prefix.removesuffix("."), []).append(part)
    if len(lists) != 1:
        first, second = list(lists.values())[:2]
        raise ValueError(
            f"{first} and {second} belong to two lists of blocks, and only one stream can be followed; prune one of "
            "them with include"
        )
    layers = next(iter(lists))
    names = [f"{layers}.{number}" for number, _ in model.get_submodule(layers).named_children()]
    return [DecoderBlock(name, tuple(inside.get(name, ()))) for name in names]


def body_of(blocks: Sequence[DecoderBlock]) -> str:
    """Return the name of the module that calls the blocks, from embedded tokens to the last norm."""
    layers = blocks[0].name.rpartition(".")[0]
    return layers.rpartition(".")[0]


@torch.no_grad()
def capture_inputs(
    model: nn.Module, blocks: Sequence[DecoderBlock], batches: Sequence[Mapping[str, Tensor]]
) -> Iterator[Inputs]:
    """Yield what the blocks are given for each batch, without computing any of them; their weights may be on the meta
    device.

    Args:
        model: a transformers model.
        blocks: of `decoder_blocks`.
        batches: keyword arguments of the model's forward, such as `input_ids`, on the model's device.

    Raises:
        ValueError: the model hands other tensors than hidden states from block to block.
    """
    modules = [model.get_submodule(block.name) for block in blocks]
    body = model.get_submodule(body_of(blocks))
    shared: list[dict[str, Any]] = []
    for batch in batches:
        inputs = None
        for as_tuple in (False, True):  # families differ in what a block returns
            if (inputs := _captured(body, modules, batch, as_tuple)) is not None:
                break
        if inputs is None:
            raise ValueError(
                f"{type(model).__name__} does not hand its hidden states from block to block as they are, so its "
                "blocks cannot be trained one after the other; use the mask of another method"
            )
        arguments = tuple(shared_arguments(given, shared) for given in inputs.arguments)
        yield Inputs(inputs.hidden_BSH, arguments)


class _AllCalled(Exception):  # no error: ends a pass at the last block
    pass


def _captured(
    body: nn.Module, modules: Sequence[nn.Module], batch: Mapping[str, Tensor], as_tuple: bool
) -> Inputs | None:
    """Inputs of a batch, from a pass in which blocks return what they are given; None where they are given something
    else than the block before returned."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def called(hidden: Tensor, arguments: dict[str, Any]) -> Any:
        if calls and hidden is not calls[0][0]:
            raise _AllCalled
        calls.append((hidden, arguments))
        if len(calls) == len(modules):
            raise _AllCalled
        return (hidden,) if as_tuple else hidden

    with _in_place_of(modules, called), suppress(_AllCalled):
        body(**batch, use_cache=False)
    if len(calls) < len(modules):
        return None
    return Inputs(calls[0][0], tuple(arguments for _, arguments in calls))


@contextmanager
def _in_place_of(modules: Sequence[nn.Module], hook: Callable[[Tensor, dict[str, Any]], Any]) -> Iterator[None]:
    """While active, the modules compute hook(hidden states, other arguments by name) instead of their forward."""

    def forward(module: nn.Module) -> Callable[..., Any]:
        names = [name for name in type(module).forward.__code__.co_varnames if name != "self"]

        def called(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            return hook(given.pop(names[0]), given)

        return called

    try:
        for module in modules:
            module.forward = forward(module)  # type: ignore[method-assign]
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def shared_arguments(arguments: dict[str, Any], known: list[dict[str, Any]]) -> dict[str, Any]:
    """An equal set of arguments that was met before, or this one."""
    for other in known[-_KNOWN:]:
        if _equal(arguments, other):
            return other
    known.append(arguments)
    return arguments


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)


def run_block(block: nn.Module, hidden_BSH: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Return the hidden states behind a block."""
    output = block(hidden_BSH, **arguments)
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
