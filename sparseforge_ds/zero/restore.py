"""Fills an engine of any layout from a checkpoint of any layout: ranks, ZeRO stage and offload may all be others.

Every rank reads the elements that it holds, and no others, straight from the mapped files. What cannot be cut into
elements (steps, hyperparameters, the loss scale) is the same on all ranks. Nothing is changed before all ranks have
read everything; DeepSpeed's own `load_checkpoint`, which unpickles and knows one layout only, is not called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.reader import Checkpoint, Group
from sparseforge_ds.checkpoint.zero_partitions import Number
from sparseforge_ds.mask.kernels.codes import stored_as, values_of
from sparseforge_ds.zero.shard import Shard, ShardLayout
from sparseforge_ds.zero.state import ShardState

_KINDS = ("betas", "eps", "momentum", "alpha", "rho", "lambd", "etas")
"""Hyperparameters that tell one kind of optimizer from another."""
T = TypeVar("T")
Masks = Literal["none", "moving", "frozen"]
"""What a checkpoint holds of masks: nothing before the first step, states while they move, zeros once frozen."""


@dataclass
class _Read:
    """What this rank is going to hold, on the host where it is not optimizer state."""

    masters: list[Tensor]
    states: list[dict[str, Any]]
    settings: list[dict[str, Any]]
    untrained: dict[str, Tensor]
    buffers: dict[str, Tensor]


@torch.no_grad()
def restore(layout: ShardLayout, state: ShardState, checkpoint: Checkpoint, masks: Masks) -> None:
    """Put weights, optimizer state, loss scale and counters of a checkpoint into an engine. Collective.

    Args:
        layout: of the engine.
        state: of the prunable weights.
        checkpoint: checked for damaged bytes by the caller.
        masks: what it holds of them.

    Raises:
        ValueError: on all ranks, with nothing changed: the checkpoint does not fit the model or the optimizer, or one
            of them cannot read it; the message names the file.
    """
    read = together(layout, lambda: _Reader(layout, state, checkpoint, masks).read())
    for flat, master in zip(layout.flats, read.masters, strict=True):
        flat.data.copy_(master)
    for name, (_, _, own) in layout.untrained().items():
        own.copy_(read.untrained[name])
    for name, buffer in _buffers(layout).items():
        buffer.copy_(read.buffers[name])
    state.reset()
    layout.load_optimizer(read.states, read.settings)
    engine = layout.engine
    if checkpoint.loss_scale is not None:
        layout.set_loss_scale(checkpoint.loss_scale)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(checkpoint.lr_scheduler)
    engine.global_steps, engine.global_samples = checkpoint.step, checkpoint.samples
    engine.skipped_steps = checkpoint.skipped
    engine.micro_steps = checkpoint.step * engine.gradient_accumulation_steps()
    layout.push()


def together(layout: ShardLayout, work: Callable[[], T]) -> T:
    """The result of every rank's own work, or the first ValueError on all of them. Collective."""
    result, problem = None, None
    try:
        result = work()
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        problem = str(error)
    for told in layout.all_gather_object(problem):
        if told is not None:
            raise ValueError(told)
    return cast(T, result)


def _buffers(layout: ShardLayout) -> dict[str, Tensor]:
    """Persistent buffers of the module, by name."""
    found = {}
    for prefix, module in layout.engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


class _Reader:
    """One rank's reading."""

    def __init__(self, layout: ShardLayout, state: ShardState, checkpoint: Checkpoint, masks: Masks) -> None:
        self.layout = layout
        self.state = state
        self.checkpoint = checkpoint
        self.masks = masks
        self.where = checkpoint.folder
        self._largest_of: dict[tuple[str, ...], dict[str, Number]] = {}
        self.group_of = {name: group for group in checkpoint.groups for name in group.names}
        self.shards: list[list[Shard]] = [[] for _ in layout.flats]
        for shard in layout.shards.values():
            self.shards[shard.flat].append(shard)
        self.source = self._sources()

    def read(self) -> _Read:
        self._check_optimizer()
        untrained = self.layout.untrained()
        indices = range(len(self.layout.flats))
        return _Read(
            masters=[self._read_flat(index, None, self.layout.flats[index].dtype, "cpu") for index in indices],
            states=[self._read_state(index) for index in indices],
            settings=self._settings(),
            untrained={
                name: self.checkpoint.slice(self.source[name], None, start, stop)
                for name, (start, stop, _) in untrained.items()
            },
            buffers={name: self.checkpoint.weight(self.source[name]) for name in _buffers(self.layout)},
        )

    def _sources(self) -> dict[str, str]:
        """The checkpoint's name of every parameter and buffer of the model; tied weights may have another one there."""
        shapes, aliases = self.checkpoint.shapes, self.checkpoint.aliases
        wanted = {name: tuple(buffer.shape) for name, buffer in _buffers(self.layout).items()}
        for name, parameter in self.layout.engine.module.named_parameters():
            wanted[name] = tuple(getattr(parameter, "ds_shape", parameter.shape))
        source = {name: name if name in shapes else aliases.get(name, name) for name in wanted}
        for name, shape in wanted.items():
            if (held := shapes.get(source[name])) != shape:
                raise ValueError(
                    f"{self.where}: {name} is {shape} in this model, {held or 'missing'} in the checkpoint; "
                    "resume with the model of the saved run"
                )
        if left := sorted(shapes.keys() - set(source.values())):
            raise ValueError(f"{self.where}: holds {left[0]}, which this model does not; resume with the saved model")
        if len(set(source.values())) != len(source):
            raise ValueError(f"{self.where}: weights are tied in the checkpoint that are not tied in this model")
        return source

    def _check_optimizer(self) -> None:
        """What is trained here was trained there, by the same kind of optimizer, with states that can be cut."""
        entries = self.checkpoint.entries
        for name in self.layout.shards:
            if self.source[name] not in self.group_of:
                raise ValueError(
                    f"{self.where}: knows no optimizer state of {name}, which is trained here: it was frozen in the "
                    "saved run; train what that run trained, or start a fresh run from its weights with --model"
                )
            if indivisible := entries[self.source[name]].indivisible:
                raise ValueError(
                    f"{self.where}: the optimizer state {indivisible[0]!r} of {name} has not one value per element and "
                    "is no number; continue with an optimizer like AdamW"
                )
        for name in self.layout.untrained():
            if self.source[name] in self.group_of:
                raise ValueError(f"{self.where}: {name} was trained in the saved run and is frozen here")
        here, there = self.layout.engine.lr_scheduler, self.checkpoint.lr_scheduler
        if (here is None) != (there is None):
            raise ValueError(
                f"{self.where}: was saved {'without' if there is None else 'with'} an lr scheduler in the engine, "
                f"this engine has {'none' if here is None else type(here).__name__}; use the settings of the saved run"
            )
        expected = {"moving": set(self.state.keys), "frozen": set(), "none": set()}[self.masks]
        for index in self.state.flats:
            for shard in self.shards[index]:
                held = set(self.checkpoint.states(self.source[shard.name]))
                if missing := expected - held:
                    raise ValueError(
                        f"{self.where}: holds no {', '.join(sorted(missing))} of {shard.name}; "
                        "it was not saved by a run with this importance"
                    )
                if self.masks == "frozen" and "mask" in held:
                    raise ValueError(
                        f"{self.where}: holds a mask of {shard.name} that was frozen before; it is inconsistent, use "
                        "another one"
                    )

    def _read_flat(self, index: int, key: str | None, dtype: torch.dtype, device: Any) -> Tensor:
        """What a flat, or a state laid out like it, is going to hold; padding is 0.

        Masks may be stored in another form than here. Of a frozen run W is beside masters of 16 bits, or is the master.
        """
        out = torch.zeros(self.layout.flats[index].shape, dtype=dtype, device=device)
        for shard in self.shards[index]:
            source = self.source[shard.name]
            states = self.checkpoint.entries[source].states
            if key == "dense" and key not in states:
                where = None
            elif key is None and index in self.state.flats and self.masks == "frozen" and "dense" in states:
                where = "dense"
            else:
                where = key
            if shard.numel and (where is None or where in states):
                taken = self.checkpoint.slice(source, where, shard.start, shard.stop)
                shard.slice_of_flat(out).copy_(stored_as(values_of(taken), dtype) if key == "mask" else taken)
        return out

    def _read_state(self, index: int) -> dict[str, Any]:
        """A flat's optimizer state; empty where no weight in it had a gradient yet."""
        entries = [self.checkpoint.entries[self.source[shard.name]] for shard in self.shards[index]]
        keys = {key for entry in entries for key in entry.states}
        if index in self.state.flats and self.masks == "frozen":
            keys -= {"dense"}
            keys |= {"dense"} if self.layout.flats[index].dtype != torch.float32 else set()
        if not keys:
            return {}
        state: dict[str, Any] = self._read_scalars(index)
        for key in sorted(keys, key=lambda key: (key in self.state.keys, key)):
            dtype = self.state.state_dtype(index, key)
            state[key] = self._read_flat(index, key, dtype, self.layout.flats[index].device)
        return state

    def _read_scalars(self, index: int) -> dict[str, Any]:
        scalars: dict[str, Number] = {}
        for shard in self.shards[index]:
            source = self.source[shard.name]
            for key, value in self.checkpoint.entries[source].scalars.items():
                # DeepSpeed's optimizers count in integers, and FusedAdam in one weight of a param group only.
                value = self._largest(self.group_of[source], key) if isinstance(value, int) else value
                scalars[key] = max(value, scalars.get(key, value))
        of_deepspeed = type(self.layout.inner).__module__.startswith("deepspeed.")
        return {
            key: int(value) if of_deepspeed and key == "step" else torch.tensor(value, dtype=torch.float32)
            for key, value in scalars.items()
        }

    def _largest(self, group: Group, key: str) -> Number:
        known = self._largest_of.setdefault(group.names, {})
        if key not in known:
            scalars = [self.checkpoint.entries[name].scalars for name in group.names]
            known[key] = max(held[key] for held in scalars if key in held)
        return known[key]

    def _settings(self) -> list[dict[str, Any]]:
        """Learning rate and other numbers of each param group, as in the saved group of its first weight."""
        settings = []
        for names, group in zip(self.layout.groups, self.layout.inner.param_groups, strict=True):
            saved = self.group_of[self.source[names[0]]].settings if names else {}
            for key in _KINDS if names else ():
                if (key in saved) != (key in group):
                    raise ValueError(
                        f"{self.where}: was saved with another kind of optimizer: its groups have "
                        f"{'a' if key in saved else 'no'} {key}, unlike {type(self.layout.inner).__name__}"
                    )
            if bool(saved.get("amsgrad")) != bool(group.get("amsgrad")) and names:
                raise ValueError(
                    f"{self.where}: was saved with amsgrad = {bool(saved.get('amsgrad'))}, unlike this run"
                )
            settings.append({key: _like(saved[key], group[key]) for key in saved.keys() & group.keys()})
        return settings


def _like(saved: Any, present: Any) -> Any:
    """The saved number, or numbers, in the form of the present ones; flags and names stay the present ones."""
    if isinstance(present, tuple) and isinstance(saved, (tuple, list)):
        return tuple(saved)
    number = saved.item() if isinstance(saved, Tensor) and saved.numel() == 1 else saved
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return present
    if isinstance(present, Tensor):
        return torch.full_like(present, number)
    return number if isinstance(present, (int, float)) and not isinstance(present, bool) else present
