"""Counts what operations on fake CUDA tensors would cost, and finds what a real device would not do with them.

Above a FakeTensorMode, `Counter` sees every operation after autograd and after composite ones were taken apart: what is
left is, with few exceptions, one kernel each. Fused operators of the package (`sparseforge::...`) are the kernels that
the compiler makes of them, write each operand once, and read it as often as these kernels do.
"""

from __future__ import annotations

import sys
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._pytree import tree_leaves

from sparseforge_ds.mask.kernels.fusing import KERNELS, READS, UNREAD
from sparseforge_ds.model.peak_memory import PeakMemoryCounter

aten = torch.ops.aten

NCCL_DTYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}
"""Dtypes that a sum over ranks can be taken of. NCCL carries bool as bytes, whose sum is not the tensor's; it refuses
16-bit integers and unsigned ones above 8 bits."""

_ALLOCATES = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "detach", "alias"}
_ONLY_WRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
_PICKS = {"index", "index_select", "gather", "embedding", "take"}
"""Operations that read of their source as much as they return."""
_PLACES = {"index_put_", "index_copy_", "scatter_", "scatter_add_", "index_add_", "_index_put_impl_"}
"""Operations that change of their target as much as they are given."""
_PACKAGE = "/sparseforge_ds/"


class DeviceMixingError(RuntimeError):
    """An operation was given CUDA and CPU tensors."""


@dataclass
class Cost:
    """Cost of one phase on one rank."""

    kernels: int = 0
    read: int = 0
    """Bytes that kernels read on the device."""
    written: int = 0
    host: int = 0
    """Bytes that operations on CPU tensors read and write."""
    peak: int = 0
    """Bytes on the device at the fullest moment, beyond what there was at the beginning and is at the end."""
    held: int = 0
    """Bytes on the device at the end, of all storages that were made under the counter."""
    collectives: Tally[str] = field(default_factory=Tally)
    """Bytes by kind, of the larger side on this rank."""
    calls: Tally[str] = field(default_factory=Tally)
    syncs: Tally[str] = field(default_factory=Tally)
    """Values that the host waits for, by place: item, tolist, copies to the host, shapes that depend on values."""
    uploads: Tally[str] = field(default_factory=Tally)
    """Copies from the host to the device, by place. From memory that is not pinned, the host waits for these too."""
    copied: Tally[str] = field(default_factory=Tally)
    """Bytes between devices, by direction."""
    faults: list[str] = field(default_factory=list)
    """Calls that a real device or NCCL would refuse."""
    places: Tally[str] = field(default_factory=Tally)
    """Bytes that kernels read and write, by place."""
    kernels_at: Tally[str] = field(default_factory=Tally)

    def seconds(self, bandwidth: float, launch: float) -> float:
        """Roofline of memory and launches: the larger of the two, since launches run ahead of kernels."""
        return max((self.read + self.written) / bandwidth, self.kernels * launch)

    def less(self, other: Cost) -> Cost:
        """Return the difference to another cost."""
        rest = Cost(self.kernels - other.kernels, self.read - other.read, self.written - other.written)
        rest.host = self.host - other.host
        rest.held = self.held - other.held
        rest.peak = max(self.peak - other.peak, 0)
        for name in ("collectives", "calls", "syncs", "uploads", "copied", "places", "kernels_at"):
            setattr(rest, name, getattr(self, name) - getattr(other, name))
        rest.faults = self.faults
        return rest


def place() -> str:
    """Return the innermost running function of the package, as file:function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _PACKAGE in file and not file.endswith("/model/peak_memory.py"):
            return f"{file.rpartition(_PACKAGE)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class Counter(PeakMemoryCounter):
    """While active, counts. Values that the host asks for are answered by 1, true, or a size that could be."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()
        self._paused = False

    @contextmanager
    def phase(self) -> Iterator[Cost]:
        """Count the block in a cost of its own."""
        before = self.cost
        self.cost = Cost()
        begun = self.bytes
        self.restart()
        try:
            yield self.cost
        finally:
            self.cost.peak = self.restart() - max(begun, self.bytes)
            self.cost.held = self.bytes
            self.cost = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing of what is inside, and follow no memory that is made there."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def __enter__(self) -> Counter:
        counter = self
        torchs_own = FakeTensor.tolist

        def tolist(tensor: FakeTensor) -> Any:
            if not tensor.is_cuda:
                return torchs_own(tensor)
            counter._sync("tolist")
            return _ones(tensor.shape, tensor.dtype)

        self._tolist = mock.patch.object(FakeTensor, "tolist", tolist)
        self._tolist.start()
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *exception: Any) -> None:
        self._tolist.stop()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "c10d":
            self._collective(func, arguments)
            return func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name == "_local_scalar_dense":
            return self._scalar(func, args[0])
        self._check_devices(func, arguments)
        if any(tensor.is_cuda for tensor in arguments):
            if name == "equal":
                self._sync("equal")
                return True
            func, args, kwargs = self._with_a_size(func, name, args, kwargs)
        result = func(*args, **kwargs)
        owners = {tensor.untyped_storage()._cdata for tensor in arguments}
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in owners]
        for tensor in fresh:
            if tensor.is_cuda:
                self._follow(tensor.untyped_storage())
        if not func.is_view and name not in _ALLOCATES:
            self._account(func, name, args, kwargs, arguments, fresh)
        return result

    # -- what is counted ----------------------------------------------------------------------------------------------

    def _account(
        self, func: Any, name: str, args: Any, kwargs: Any, arguments: list[Tensor], fresh: list[Tensor]
    ) -> None:
        cost = self.cost
        changed = [leaf for value in _changed(func, args, kwargs) for leaf in tree_leaves(value)]
        changed = [leaf for leaf in changed if isinstance(leaf, Tensor)]
        if not changed and not fresh:
            return  # a view, whatever it is called
        moved = {tensor.device.type for tensor in (*arguments, *fresh)}
        if len(moved) > 1 and name in ("copy_", "_to_copy"):
            self._copy(name, args, kwargs, arguments, fresh or changed)
            return
        largest = max((_bytes(tensor) for tensor in fresh), default=0)
        unread = UNREAD.get(name, ()) if func.namespace == "sparseforge" else ()
        named = zip(func._schema.arguments, args, strict=False)
        only_written = {id(value) for argument, value in named if argument.name in unread}
        read = written = 0
        for tensor in () if name.startswith("new_") or name.endswith("_like") else arguments:
            size = _bytes(tensor)
            is_changed = any(tensor is first for first in changed)
            if name in _PICKS and tensor is arguments[0]:
                size = min(size, largest)
            if name in _PLACES and tensor is arguments[0]:
                size = min(size, _bytes(arguments[-1]))
            if not (is_changed and (name in _ONLY_WRITES or "out" in kwargs or id(tensor) in only_written)):
                read += size * (READS.get(name, 1) if func.namespace == "sparseforge" else 1)
            if is_changed:
                written += size
        written += sum(_bytes(tensor) for tensor in fresh)
        if not written and not read:
            return  # nothing in it: no launch
        if any(tensor.is_cuda for tensor in (*arguments, *fresh)):
            kernels = KERNELS.get(name, 1) if func.namespace == "sparseforge" else 1
            cost.kernels += kernels
            cost.read += read
            cost.written += written
            source = place()
            cost.places[source] += read + written
            cost.kernels_at[source] += kernels
        else:
            cost.host += read + written

    def _copy(self, name: str, args: Any, kwargs: Any, arguments: list[Tensor], written: list[Tensor]) -> None:
        source = arguments[-1]
        if not source.numel():
            return
        target = written[0]
        direction = f"{source.device.type} to {target.device.type}"
        self.cost.copied[direction] += _bytes(target)
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if source.is_cuda and waits:
            self._sync("copy to the host")
        elif target.is_cuda:
            self.cost.uploads[place()] += 1

    def _sync(self, subject: str) -> None:
        if not self._paused:
            self.cost.syncs[f"{place()} ({subject})"] += 1

    def _scalar(self, func: Any, tensor: Tensor) -> Any:
        if tensor.is_cuda:
            self._sync("item")
        else:
            try:
                return func(tensor)
            except DataDependentOutputException:
                pass  # a host value that was computed, which fake tensors do not know either
        return _ones((), tensor.dtype)

    def _with_a_size(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return the operation, or a replacement with a possible size if the result's shape depends on values."""
        if name == "bincount":
            self._sync("bincount")
            size = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return aten.new_zeros.default, (args[0], [max(size, 1)]), {"dtype": torch.int64}
        if name == "nonzero":
            self._sync("nonzero")
            shape = [max(args[0].numel() // 2, 1), args[0].dim()]
            return aten.new_zeros.default, (args[0], shape), {"dtype": torch.int64}
        if name == "index" and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            self._sync("boolean index")
            chosen = [i if i is None or i.dtype not in (torch.bool, torch.uint8) else _half(i) for i in args[1]]
            return func, (args[0], chosen), kwargs
        return func, args, kwargs

    # -- what is refused ----------------------------------------------------------------------------------------------

    def _check_devices(self, func: Any, arguments: list[Tensor]) -> None:
        kinds = {tensor.device.type for tensor in arguments if tensor.dim() or tensor.is_cuda}
        if len(kinds) > 1 and func is not aten.copy_.default:
            shapes = ", ".join(f"{tensor.device.type} {tuple(tensor.shape)}" for tensor in arguments)
            fault = f"{func} on {shapes} at {place()}"
            self.cost.faults.append(fault)
            raise DeviceMixingError(fault)

    def _collective(self, func: Any, arguments: list[Tensor]) -> None:
        kind = func._schema.name.rpartition("::")[2].strip("_")
        for tensor in arguments:
            if not tensor.is_cuda:
                self.cost.faults.append(f"{kind} of a {tensor.device.type} tensor at {place()}")
            if tensor.dtype not in NCCL_DTYPES:
                self.cost.faults.append(f"{kind} of {tensor.dtype} at {place()}")
            if not tensor.is_contiguous():
                self.cost.faults.append(f"{kind} of a tensor that is not contiguous at {place()}")
        self.cost.calls[kind] += 1
        self.cost.collectives[kind] += max((tensor.nbytes for tensor in arguments), default=0)


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Arguments that an operation writes to."""
    fused_adam = func._schema.name.startswith("aten::_fused_adam")  # writes gradients that it unscales, and only those
    for number, argument in enumerate(func._schema.arguments):
        if fused_adam and argument.name == "grads":
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            if number < len(args):
                yield args[number]
            elif argument.name in kwargs:
                yield kwargs[argument.name]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies; a broadcast axis counts once."""
    elements = 1
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= extent if stride or not extent else 1
    return elements * tensor.element_size()


def _half(mask: Tensor) -> Tensor:
    return mask.new_zeros((max(mask.numel() // 2, 1),), dtype=torch.int64)


def _ones(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return the `tolist` of a tensor of ones."""
    if shape:
        return [_ones(shape[1:], dtype) for _ in range(shape[0])]
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
