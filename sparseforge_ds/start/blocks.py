"""Decoder blocks of a model, and the inputs that each of them gets.

Legend of shape suffixes: B sequences of a batch, S their tokens, H hidden size.
"""

from __future__ import annotations

import inspect
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
"""Recent sets of arguments that are searched for an equal one."""


@dataclass(frozen=True)
class DecoderBlock:
    """One decoder block of a model."""

    name: str
    """Name of its module, as in `model.get_submodule`."""
    weights: tuple[PrunableWeight, ...]
    """Its weights under a mask, by names inside the block; empty if all of it stays dense."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of the decoder blocks for one batch of sequences."""

    hidden_BSH: Tensor
    """Input of the first block: the embedded tokens."""
    arguments: tuple[dict[str, Any], ...]
    """Keyword arguments of every block beside its hidden states, such as attention masks and position embeddings.
    Blocks and batches with equal arguments share the tensors."""


def decoder_blocks(model: nn.Module, weights: Sequence[PrunableWeight]) -> list[DecoderBlock]:
    """Return the decoder blocks of a model in order, with their prunable weights.

    Raises:
        ValueError: a weight belongs to no numbered block, or weights belong to blocks of several lists.
    """
    weights_of: dict[str, list[PrunableWeight]] = {}
    lists: dict[str, str] = {}
    # Each weight gets its name inside of its block.
    for weight in weights:
        if (match := _NUMBERED.match(weight.name)) is None:
            raise ValueError(
                f"{weight.name} belongs to no numbered decoder block, so it cannot be pruned block by block; keep it "
                f'dense with "exclude": ["{weight.name}"]'
            )
        lists.setdefault(match["layers"], weight.name)
        prefix = match[0]
        inner = replace(weight, name=weight.name.removeprefix(prefix), module=weight.module.removeprefix(prefix))
        weights_of.setdefault(prefix.removesuffix("."), []).append(inner)
    # Hidden states are followed through one list of blocks, with those that stay dense.
    if len(lists) != 1:
        first, second = list(lists.values())[:2]
        raise ValueError(
            f"{first} and {second} belong to two lists of blocks, and only one stream can be followed; prune one of "
            "them with include"
        )
    layers = next(iter(lists))
    names = [f"{layers}.{number}" for number, _ in model.get_submodule(layers).named_children()]
    return [DecoderBlock(name, tuple(weights_of.get(name, ()))) for name in names]


def body_of(blocks: Sequence[DecoderBlock]) -> str:
    """Return the name of the module that calls the blocks, from embedded tokens to the last norm."""
    layers = blocks[0].name.rpartition(".")[0]
    return layers.rpartition(".")[0]


@torch.no_grad()
def capture_inputs(
    model: nn.Module, blocks: Sequence[DecoderBlock], batches: Sequence[Mapping[str, Tensor]]
) -> Iterator[Inputs]:
    """Yield the inputs of the blocks for each batch, without computing any block.

    The weights of the blocks may be on the meta device.

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
        # Either kind of output is tried.
        inputs = None
        for as_tuple in (False, True):  # blocks of some families return a tuple
            if (inputs := _captured(body, modules, batch, as_tuple)) is not None:
                break
        if inputs is None:
            raise ValueError(
                f"{type(model).__name__} does not hand its hidden states from block to block as they are, so its "
                "blocks cannot be trained one after the other; use the mask of another method"
            )
        arguments = tuple(shared_arguments(block_arguments, shared) for block_arguments in inputs.arguments)
        yield Inputs(inputs.hidden_BSH, arguments)


class _AllCalledError(Exception):
    """Signal that ends a pass at the last block; no error."""


def _captured(
    body: nn.Module, modules: Sequence[nn.Module], batch: Mapping[str, Tensor], as_tuple: bool
) -> Inputs | None:
    """Return the inputs of a batch, from a pass in which every block returns its own input.

    Args:
        body: calls the blocks.
        modules: the blocks.
        batch: keyword arguments of the body.
        as_tuple: True if a block returns its hidden states in a tuple.

    Returns:
        None if a block gets other hidden states than the block before returned.
    """
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    # Hidden states that go from block to block as they are stay the same object.
    def called(hidden: Tensor, arguments: dict[str, Any]) -> Any:
        if calls and hidden is not calls[0][0]:
            raise _AllCalledError
        calls.append((hidden, arguments))
        if len(calls) == len(modules):
            raise _AllCalledError
        return (hidden,) if as_tuple else hidden

    with _in_place_of(modules, called), suppress(_AllCalledError):
        body(**batch, use_cache=False)
    if len(calls) < len(modules):
        return None
    return Inputs(calls[0][0], tuple(arguments for _, arguments in calls))


@contextmanager
def _in_place_of(modules: Sequence[nn.Module], hook: Callable[[Tensor, dict[str, Any]], Any]) -> Iterator[None]:
    """Replace the modules' forward in the block by hook(hidden states, other arguments by name)."""

    def forward(module: nn.Module) -> Callable[..., Any]:
        names = argument_names(module)

        def call_hook(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            return hook(arguments.pop(names[0]), arguments)

        return call_hook

    try:
        for module in modules:
            module.forward = forward(module)  # type: ignore[method-assign]
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward; the first has the hidden states."""
    return [name for name in inspect.signature(type(module).forward).parameters if name != "self"]


def shared_arguments(arguments: dict[str, Any], known: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an equal set of arguments from `known`, or this one, which is added to it."""
    for other in known[-_KNOWN:]:
        if are_equal(arguments, other):
            return other
    known.append(arguments)
    return arguments


def are_equal(a: Any, b: Any) -> bool:
    """Return True for equal arguments of a block: tensors by their values, collections by what they hold."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(are_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(are_equal, a, b))
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


def run_block(block: nn.Module, hidden_BSH: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Run a block and return its hidden states."""
    return hidden_of(block(hidden_BSH, **arguments))


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in a block's output, which may be a tuple or, in OpenAI GPT, a list."""
    hidden: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return hidden
