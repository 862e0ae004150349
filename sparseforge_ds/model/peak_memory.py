"""Peak memory of operations, counted storage by storage; on the meta device without allocating anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemoryCounter(TorchDispatchMode):
    """Counter of the bytes of all storages that operations create while it is active."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        """Begin with 0 bytes; tensors that exist `before` do not count."""
        super().__init__()
        self.bytes = 0
        """Bytes at this moment."""
        self.peak = 0
        """Most bytes at any moment."""
        storages = [tensor.untyped_storage() for tensor in before]
        self._known: dict[int, Any] = {storage._cdata: storage for storage in storages}
        self._shapes: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta and args[0].dtype != torch.bfloat16:
            result = _grouped_matmul(func, args, kwargs)
        else:
            result = self._call(func, args, kwargs)
        for value in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(value, Tensor):
                self._follow(value.untyped_storage())
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation, or return an empty tensor of the known shape if equal arguments came before.

        The latter on the meta device alone. torch derives most shapes there in Python, layer by layer, which takes more
        than half of a trace.
        """
        leaves = [*_leaves(args), *_leaves(kwargs)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or not all(tensor.is_meta for tensor in tensors) or not _returns_new_tensor(func):
            return func(*args, **kwargs)
        # Equal arguments give equal shapes.
        key = (func, *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves))
        if (shape := self._shapes.get(key)) is not None:
            return _empty(*shape)
        result: Tensor = func(*args, **kwargs)
        # Some operations return an argument, or a part of what they made.
        storage = result.untyped_storage()
        is_argument = storage._cdata in {tensor.untyped_storage()._cdata for tensor in tensors}
        shape = (result.shape, result.stride(), result.dtype)
        if not is_argument and _empty(*shape).untyped_storage().nbytes() == storage.nbytes():
            self._shapes[key] = shape
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it is freed."""
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def forget(_: Any) -> None:
            del self._known[key]
            self.bytes -= size

        self._known[key] = weakref.ref(storage, forget)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def restart(self) -> int:
        """Return the peak so far, and begin a new one with the bytes of this moment."""
        peak = self.peak
        self.peak = self.bytes
        return peak


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested arguments.

    Lengths of sequences and names of keywords are among them, so that unlike calls differ.
    """
    if isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.items()))
    else:
        yield value


@cache
def _returns_new_tensor(func: Any) -> bool:
    """Return whether an operation returns one tensor, and changes and views none by its schema."""
    (*others, result) = func._schema.returns or [None]
    is_tensor = result is not None and str(result.type) == "Tensor"
    return is_tensor and not others and result.alias_info is None and not func._schema.is_mutable


def _empty(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the meta device."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _grouped_matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the shape of a matmul of fused experts, which torch has on the meta device for bf16 alone."""
    in_bf16 = [_empty(x.shape, x.stride(), torch.bfloat16) for x in args[:2]]
    result: Tensor = func(*in_bf16, *args[2:], **kwargs)
    return result.to(args[0].dtype)


def measured(function: Callable[[], object]) -> int:
    """Return the peak memory of a computation on the meta device, in bytes."""
    with PeakMemoryCounter() as counter:
        function()
    return counter.peak
