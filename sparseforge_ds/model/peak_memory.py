"""Bytes that exist while operations run, counted storage by storage; on the meta device nothing is allocated for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemoryCounter(TorchDispatchMode):
    """Follows the bytes of all storages that operations create while it is active; what is there `before` does not
    count."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
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
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            del self._known[key]
            self.bytes -= size

        self._known[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def restart(self) -> int:
        """The peak so far; the next one is counted from here."""
        peak, self.peak = self.peak, self.bytes
        return peak


def _grouped_matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The matmul of fused experts, of which torch knows the shapes on the meta device in bf16 only."""
    in_bf16 = [torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device="meta") for x in args[:2]]
    result: Tensor = func(*in_bf16, *args[2:], **kwargs)
    return result.to(args[0].dtype)


def measured(function: Callable[[], object]) -> int:
    """Bytes at the peak of a computation on the meta device."""
    with PeakMemoryCounter() as live:
        function()
    return live.peak
