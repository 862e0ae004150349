"""Inputs of decoder blocks in a run's passes: their arguments, and streams of hidden states.

Legend of shape suffixes: B sequences of a micro-batch, S their tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from sparseforge_ds.start.blocks import argument_names, hidden_of, shared_arguments
from sparseforge_ds.zero.layer_hooks import uncompiled

_ON_DEVICE = 0.25
"""Share of a GPU's free memory that both streams may take before they wait on the host."""


class BlockInputs:
    """Arguments of the decoder blocks, one call a micro-batch, and their streams of hidden states."""

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self.dense: HiddenStates = HiddenStates(dtype)
        self.pruned: HiddenStates = HiddenStates(dtype)
        self.arguments: list[list[dict[str, Any]]] = []
        """Other arguments of every block by name, for each micro-batch; equal ones share their tensors."""
        self.ends: list[Tensor] = []
        """(B, H) output of each block in the engine, at the last token of the first micro-batch."""
        self.per_step = 0
        """Micro-batches of this rank in an optimizer step."""
        self.is_chain = True
        """True while blocks are called once a pass, and in the first micro-batch with the output of the one before."""
        self._modules = modules
        self._in_16_bits = dtype == torch.float16
        self._known: list[dict[str, Any]] = []
        self._last: Tensor | None = None

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Keep what passes of the model, which is not in training, call the blocks with."""
        # Listen at the entry and the exit of every block.
        training = model.training
        handles = []
        for number, module in enumerate(self._modules):
            handles += [
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, n=number: self._enter(n, module, args, kwargs), with_kwargs=True
                ),
                module.register_forward_hook(lambda _module, _args, output, n=number: self._leave(n, output)),
            ]
        model.eval()
        try:
            with uncompiled():
                yield
        finally:
            model.train(training)
            for handle in handles:
                handle.remove()
        # A block that was called twice, or never, breaks the chain.
        complete = all(len(calls) == len(self._modules) for calls in self.arguments)
        self.is_chain &= complete and len(self.ends) == len(self._modules)

    def settle(self, batches: int) -> None:
        """Keep both streams on the host where a GPU has no room for so many batches as large as the first one.

        Other arguments stay on the GPU. They differ between batches where documents share a sequence: a mask of S x S.
        """
        first = self.dense[0]
        arguments = {id(tensor): tensor.nbytes for known in self._known for tensor in _tensors(known)}
        size = 2 * sum(hidden.nbytes for hidden in self.dense) + sum(arguments.values())
        if first.is_cuda and batches * size > _ON_DEVICE * torch.cuda.mem_get_info(first.device)[0]:
            self.dense.to_host()

    def _enter(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = argument_names(module)
        by_name = dict(zip(names, args, strict=False)) | kwargs
        hidden = by_name.pop(names[0])
        if number == 0:
            self.dense.append(hidden)
            self.arguments.append([])
        elif len(self.arguments) == 1 and (self._last is None or not torch.equal(hidden, self._last)):
            self.is_chain = False
        arguments = {key: self._to_keep(value) for key, value in by_name.items()}
        self.arguments[-1].append(shared_arguments(arguments, self._known))

    def _leave(self, number: int, output: Any) -> None:
        hidden = hidden_of(output)
        if len(self.arguments) == 1:
            self.ends.append(hidden[:, -1].detach().clone())
            self._last = hidden.detach()
        else:
            self._last = None

    def _to_keep(self, value: Any) -> Any:
        """Return an argument as a block is called with it again.

        It has no cache of keys and values, and no 16 bits that an fp32 block would not take.
        """
        if isinstance(value, Tensor):
            value = value.detach()
            return value.float() if self._in_16_bits and value.is_floating_point() else value
        if isinstance(value, (tuple, list)):
            kept = map(self._to_keep, value)
            return type(value)(*kept) if hasattr(value, "_fields") else type(value)(kept)
        return None if isinstance(value, Cache) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of a block's arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


class HiddenStates(MutableSequence[Tensor]):
    """(B, S, H) hidden states of every micro-batch, in the dtype of a forward pass, perhaps on the host.

    They are read and written by number alone; slices, which a `MutableSequence` has too, are no part of it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._hidden: list[Tensor] = []
        self._device: torch.device | None = None
        self._on_host = False

    def __len__(self) -> int:
        return len(self._hidden)

    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        """Return the hidden states where they are computed with."""
        return self._hidden[number].to(self._device, non_blocking=True)

    def __setitem__(self, number: int, hidden: Tensor) -> None:  # type: ignore[override]
        """Overwrite in place: what is pinned is read again in the order of the device's work."""
        self._hidden[number].copy_(hidden, non_blocking=True)

    def __delitem__(self, number: int) -> None:  # type: ignore[override]
        del self._hidden[number]

    def insert(self, number: int, hidden: Tensor) -> None:
        """Add a copy."""
        self._device = hidden.device
        self._hidden.insert(number, self._home(hidden.detach().to(self._dtype, copy=True)))

    def shape(self, number: int) -> torch.Size:
        """Return the shape of a micro-batch's hidden states, without a copy to the device."""
        return self._hidden[number].shape

    def copy(self) -> HiddenStates:
        """Return another stream of the same hidden states."""
        other = HiddenStates(self._dtype)
        other._on_host = self._on_host
        for hidden in self:
            other.append(hidden)
        return other

    def to_host(self) -> None:
        """Keep what is here, and what comes, in pinned memory of the host."""
        self._on_host = True
        self._hidden = [self._home(hidden) for hidden in self._hidden]

    def _home(self, hidden: Tensor) -> Tensor:
        return hidden.cpu().pin_memory() if self._on_host else hidden
