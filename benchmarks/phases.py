"""Time, memory and messages of a forge by phase, measured from outside: the package has no instruments of its own."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparseforge_ds.forge import SparseForge
from sparseforge_ds.zero.step_hooks import StepHooks

STATE_KEYS = ("dense", "mask", "curvature")
"""Our tensors in the optimizer's state."""

FORGE_PHASES = {
    "curvature.refresh": "curvature",
    "curvature.take_measured": "curvature",
    "method.move": "gate",
    "method.project": "gate",
    "_republish": "push",
}
"""Methods of a forge by phase of an update; the two optimizer hooks are `publication`."""
PHASES = ("publication", "curvature", "gate", "push", "teacher", "distillation")


class Phases:
    """Stopwatches that do not overlap: a phase that begins inside another belongs to the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.current: str | None = None
        self.synchronize = False
        """Wait for the device at both ends of a phase: the split is then exact, and the step is slower."""

    def begin(self, name: str) -> None:
        """Start a phase, unless another one is running."""
        if self.current is None:
            self.current = name
            self._begun = self._now()

    def end(self, name: str) -> None:
        """End the phase that runs, if it has this name."""
        if self.current == name:
            self.seconds[name] += self._now() - self._begun
            self.current = None

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a block of code as a phase."""
        if self.current is not None:
            yield
            return
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Measure every call of `owner.method`, a class's or an object's."""
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.measure(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def wrap_hooks(self) -> None:
        """Measure the two optimizer hooks; call it before a forge registers them."""
        self.wrap(StepHooks, "_before_step", "publication")
        self.wrap(StepHooks, "_after_step", "publication")

    def wrap_forge(self, forge: SparseForge) -> None:
        """Measure what a forge does in an update."""
        for path, name in FORGE_PHASES.items():
            owner, _, method = path.rpartition(".")
            part = getattr(forge, owner) if owner else forge
            if hasattr(part, method):  # a mask that is frozen from the start has no gate
                self.wrap(part, method, name)

    def take(self) -> dict[str, float]:
        """Seconds of every phase since the last call."""
        taken = dict(self.seconds)
        self.seconds = defaultdict(float)
        return taken

    def _now(self) -> float:
        if self.synchronize:
            get_accelerator().synchronize()
        return time.perf_counter()


class Messages(TorchDispatchMode):
    """While active, adds up the payload of every collective by the phase in which it is called.

    The payload is the larger of what goes in and what comes out on one rank; what the wire carries depends on the
    backend's algorithm.
    """

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self.phases = phases
        self.bytes: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            phase = self.phases.current or "other"
            self.calls[phase] += 1
            self.bytes[phase] += max(
                sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args
            )
        return func(*args, **(kwargs or {}))


def held_bytes(forge: SparseForge) -> dict[str, int]:
    """Bytes of the tensors that exist on this rank because of a forge: its optimizer state, and all it can reach."""
    layout = forge.sharded.layout
    states = [forge.sharded.state.partition(index) for index in forge.sharded.state.shards_in]
    counted = {key: sum(state[key].nbytes for state in states if key in state) for key in STATE_KEYS}
    reference = [*layout.flats, *layout.low_precision.values()]
    reference += [tensor for state in states for tensor in state.values() if isinstance(tensor, Tensor)]
    reference += [parameter.ds_tensor for parameter in reference if hasattr(parameter, "ds_tensor")]
    known = {tensor.untyped_storage().data_ptr() for tensor in reference}
    cached = 0
    for tensor in _reachable(forge, set()):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            cached += storage.nbytes()
    return {**counted, "cached": cached}


def _reachable(thing: Any, records: set[int]) -> Iterator[Tensor]:
    """Tensors held by this package's objects and plain containers, not those of the engine and the model."""
    if id(thing) in records or isinstance(thing, (DeepSpeedEngine, nn.Module, torch.optim.Optimizer)):
        return
    records.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _reachable(value, records)
    elif isinstance(thing, (list, tuple, set)):
        for value in thing:
            yield from _reachable(value, records)
    elif type(thing).__module__.startswith("sparseforge_ds."):
        yield from _reachable(vars(thing) if hasattr(thing, "__dict__") else {}, records)
