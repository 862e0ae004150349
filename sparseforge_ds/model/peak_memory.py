"""Peak memory of operations, counted storage by storage; on the meta device without allocating anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta and args[0].dtype != torch.bfloat16:
            result = _grouped_matmul(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._follow(value.untyped_storage())
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


def _grouped_matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the shape of a matmul of fused experts, which torch has on the meta device for bf16 alone."""
    in_bf16 = [torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device="meta") for x in args[:2]]
    result: Tensor = func(*in_bf16, *args[2:], **kwargs)
    return result.to(args[0].dtype)


def measured(function: Callable[[], object]) -> int:
    """Return the peak memory of a computation on the meta device, in bytes."""
    with PeakMemoryCounter() as counter:
        function()
    return counter.peak
