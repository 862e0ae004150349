"""Restoring of an engine from a checkpoint of any layout: world size, ZeRO stage and offload may all differ.

Every rank reads the elements that it holds, and no others, straight from the mapped files. State that cannot be cut
into elements (steps, hyperparameters, the loss scale) is the same on all ranks. Nothing is changed before all ranks
have read everything. DeepSpeed's own `load_checkpoint`, which unpickles and knows one layout only, is not called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.reader import Checkpoint, ParamGroup
from sparseforge_ds.checkpoint.zero_partitions import KEPT, Number
from sparseforge_ds.mask.kernels.bits import pack
from sparseforge_ds.mask.kernels.codes import stored_as, values_of
from sparseforge_ds.ranks import all_or_raise
from sparseforge_ds.zero.shard import ShardLayout
from sparseforge_ds.zero.state import ShardState

_INNER = "_schedulers"
"""Entry of a scheduler's state that holds the states of the schedulers that it is made of."""
_KINDS = ("betas", "eps", "momentum", "alpha", "rho", "lambd", "etas")
"""Hyperparameters by which kinds of optimizers differ."""
Masks = Literal["none", "moving", "frozen"]
"""Masks in a checkpoint: none before the first step, states while they move, one bit a weight once frozen."""


@dataclass
class _RankContent:
    """New content of this rank. Optimizer states are on their device, all else on the host."""

    masters: list[Tensor]
    """Master of each flat."""
    states: list[dict[str, Any]]
    """Optimizer state of each flat."""
    settings: list[dict[str, Any]]
    """Hyperparameters of each param group."""
    untrained: dict[str, Tensor]
    """Elements on this rank of each parameter that is not trained, by name."""
    buffers: dict[str, Tensor]
    """Persistent buffers, by name."""


@torch.no_grad()
def restore(layout: ShardLayout, state: ShardState, checkpoint: Checkpoint, masks: Masks) -> None:
    """Put weights, optimizer state, loss scale and counters of a checkpoint into an engine. Collective.

    Args:
        layout: shard map of the engine.
        state: state of the prunable weights.
        checkpoint: checkpoint whose bytes the caller has checked for damage; its files are unmapped at the end.
        masks: kind of masks in the checkpoint.

    Raises:
        AgreedError: on all ranks, with nothing changed: the checkpoint does not fit the model or the optimizer, or one
            of them cannot read it; the message names the file.
    """
    content = all_or_raise(lambda: _Reader(layout, state, checkpoint, masks).read(), layout.all_gather_object)
    # Weights, masters and buffers.
    for flat, master in zip(layout.flats, content.masters, strict=True):
        flat.data.copy_(master)
    for name, (_, _, own_values) in layout.untrained().items():
        own_values.copy_(content.untrained[name])
    for name, buffer in _buffers(layout).items():
        buffer.copy_(content.buffers[name])
    # The optimizer's state, with ours in it.
    has_begun = checkpoint.step > checkpoint.skipped
    state.load(content.states, content.settings, is_frozen=masks == "frozen", has_begun=has_begun)
    # Loss scale, scheduler and counters.
    engine = layout.engine
    if checkpoint.loss_scale is not None:
        layout.set_loss_scale(checkpoint.loss_scale)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(checkpoint.lr_scheduler)
    engine.global_steps = checkpoint.step
    engine.global_samples = checkpoint.samples
    engine.skipped_steps = checkpoint.skipped
    engine.micro_steps = checkpoint.step * engine.gradient_accumulation_steps()
    layout.push()
    # A checkpoint that is removed later must give its room on the disk back.
    del content
    checkpoint.release()


def _buffers(layout: ShardLayout) -> dict[str, Tensor]:
    """Return the persistent buffers of the module, by name."""
    buffers = {}
    for prefix, module in layout.engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


class _Reader:
    """Reader of one rank's new content from a checkpoint."""

    def __init__(self, layout: ShardLayout, state: ShardState, checkpoint: Checkpoint, masks: Masks) -> None:
        self.layout = layout
        self.state = state
        self.checkpoint = checkpoint
        self.masks = masks
        self.folder = checkpoint.folder
        self._largest_scalars: dict[tuple[str, ...], dict[str, Number]] = {}
        self.param_group_of = {name: group for group in checkpoint.param_groups for name in group.names}
        """Param group of each trained weight, by its name in the checkpoint."""
        self.source = self._match_names()
        """Name in the checkpoint of every parameter and buffer of the model."""

    def read(self) -> _RankContent:
        """Read everything that this rank holds, after checks that the checkpoint fits the model and optimizer."""
        self._check_trained()
        self._check_masks()
        untrained = self.layout.untrained()
        indices = range(len(self.layout.flats))
        return _RankContent(
            masters=[self._read_flat(index, None, self.layout.flats[index].dtype, "cpu") for index in indices],
            states=[self._read_state(index) for index in indices],
            settings=self._settings(),
            untrained={
                name: self.checkpoint.slice(self.source[name], None, start, stop)
                for name, (start, stop, _) in untrained.items()
            },
            buffers={name: self.checkpoint.weight(self.source[name]) for name in _buffers(self.layout)},
        )

    def _match_names(self) -> dict[str, str]:
        """Return the checkpoint's name of every parameter and buffer of the model; tied weights may have another."""
        saved_shapes = self.checkpoint.shapes
        aliases = self.checkpoint.aliases
        shapes = {name: tuple(buffer.shape) for name, buffer in _buffers(self.layout).items()}
        for name, parameter in self.layout.engine.module.named_parameters():
            shapes[name] = tuple(getattr(parameter, "ds_shape", parameter.shape))
        source = {name: name if name in saved_shapes else aliases.get(name, name) for name in shapes}
        # Both sides have the same names and shapes.
        for name, shape in shapes.items():
            if (saved_shape := saved_shapes.get(source[name])) != shape:
                raise ValueError(
                    f"{self.folder}: {name} is {shape} in this model, {saved_shape or 'missing'} in the checkpoint; "
                    "resume with the model of the saved run"
                )
        if extra := sorted(saved_shapes.keys() - set(source.values())):
            raise ValueError(f"{self.folder}: holds {extra[0]}, which this model does not; resume with the saved model")
        if len(set(source.values())) != len(source):
            raise ValueError(f"{self.folder}: weights are tied in the checkpoint that are not tied in this model")
        return source

    def _check_trained(self) -> None:
        """Check that the saved run trained the same weights, with optimizer states that can be cut into shards.

        Raises:
            ValueError: a weight is trained in one run alone, a state cannot be cut, or schedulers are unlike.
        """
        entries = self.checkpoint.entries
        # A weight that is trained now was trained then, and the other way round.
        for name in self.layout.shards:
            if self.source[name] not in self.param_group_of:
                raise ValueError(
                    f"{self.folder}: knows no optimizer state of {name}, which is trained here: it was frozen in the "
                    "saved run; train what that run trained, or start a fresh run from its weights with --model"
                )
            if indivisible := entries[self.source[name]].indivisible:
                raise ValueError(
                    f"{self.folder}: the optimizer state {indivisible[0]!r} of {name} has not one value per element "
                    "and is no number: it is damaged, or of an optimizer unlike AdamW; use another checkpoint"
                )
        for name in self.layout.untrained():
            if self.source[name] in self.param_group_of:
                raise ValueError(f"{self.folder}: {name} was trained in the saved run and is frozen here")
        # Both runs have a scheduler in the engine, or neither.
        scheduler = self.layout.engine.lr_scheduler
        saved_scheduler = self.checkpoint.lr_scheduler
        if (scheduler is None) != (saved_scheduler is None):
            raise ValueError(
                f"{self.folder}: was saved {'without' if saved_scheduler is None else 'with'} an lr scheduler in the "
                f"engine, this engine has {'none' if scheduler is None else type(scheduler).__name__}; use the "
                "settings of the saved run"
            )
        # Schedulers of torch take entries of another kind in silence, or stop halfway through their own.
        if saved_scheduler is not None and (missing := _missing_entries(scheduler.state_dict(), saved_scheduler)):
            raise ValueError(
                f"{self.folder}: the saved lr scheduler has no {', '.join(sorted(missing))}, which "
                f"{type(scheduler).__name__} needs; use the scheduler of the saved run"
            )

    def _check_masks(self) -> None:
        """Check that prunable weights have all states of ours while masks move, and bits alone once they are frozen."""
        expected = {"moving": set(self.state.keys), "frozen": {KEPT}, "none": set()}[self.masks]
        origin = "a run whose masks are frozen" if self.masks == "frozen" else "a run with this importance"
        for index in self.state.shards_in:
            for shard in self.layout.shards_in[index]:
                saved_states = set(self.checkpoint.states(self.source[shard.name]))
                if missing := expected - saved_states:
                    raise ValueError(
                        f"{self.folder}: holds no {', '.join(sorted(missing))} of {shard.name}; "
                        f"it was not saved by {origin}"
                    )
                if self.masks == "frozen" and "mask" in saved_states:
                    raise ValueError(
                        f"{self.folder}: holds a mask of {shard.name} that was frozen before; it is inconsistent, use "
                        "another one"
                    )

    def _read_flat(self, index: int, key: str | None, dtype: torch.dtype, device: Any) -> Tensor:
        """Return the new content of a flat (`key` None) or of a state laid out like it; padding is 0.

        Masks may be stored in another form than here. In a frozen run W lies beside masters of 16 bits or quantized
        ones, or is the master.
        """
        out = torch.zeros(self.layout.flats[index].shape, dtype=dtype, device=device)
        for shard in self.layout.shards_in[index]:
            source = self.source[shard.name]
            states = self.checkpoint.entries[source].states
            # Either of W and the master stands for the other where the saved run had only one.
            if key == "dense" and key not in states:
                saved_key = None
            elif key is None and index in self.state.shards_in and self.masks == "frozen" and "dense" in states:
                saved_key = "dense"
            else:
                saved_key = key
            if shard.numel and (saved_key is None or saved_key in states):
                values = self.checkpoint.slice(source, saved_key, shard.start, shard.stop)
                shard.slice_of_flat(out).copy_(stored_as(values_of(values), dtype) if key == "mask" else values)
        return out

    def _read_state(self, index: int) -> dict[str, Any]:
        """Return a flat's optimizer state, without moments if no weight in it had a gradient yet."""
        entries = [self.checkpoint.entries[self.source[shard.name]] for shard in self.layout.shards_in[index]]
        keys = {key for entry in entries for key in entry.states} - {KEPT}
        device = self.layout.flats[index].device
        state: dict[str, Any] = {}
        # After the freeze W is a state only beside masters of fewer bits, and the mask is one bit a weight.
        if index in self.state.shards_in and self.masks == "frozen":
            keys -= {"dense"}
            keys |= {"dense"} if self.state.keeps_dense(index) else set()
            state[KEPT] = pack(self._read_flat(index, KEPT, torch.bool, device).view(-1))
        if keys:
            state |= self._read_scalars(index)
        for key in sorted(keys, key=lambda key: (key in self.state.keys, key)):
            state[key] = self._read_flat(index, key, self.state.state_dtype(index, key), device)
        return state

    def _read_scalars(self, index: int) -> dict[str, Any]:
        """Return the optimizer states of a flat that are one number, such as `step`, in the optimizer's own form."""
        scalars: dict[str, Number] = {}
        for shard in self.layout.shards_in[index]:
            source = self.source[shard.name]
            for key, value in self.checkpoint.entries[source].scalars.items():
                # DeepSpeed's optimizers count in integers, FusedAdam in one weight of a param group alone.
                value = self._largest(self.param_group_of[source], key) if isinstance(value, int) else value
                scalars[key] = max(value, scalars.get(key, value))
        device = self.layout.flats[index].device
        states: dict[str, Any] = {
            key: torch.tensor(value, dtype=torch.float32, device=device) for key, value in scalars.items()
        }
        # DeepSpeed counts steps in integers, and torch on the host unless its kernels read them.
        param_group = self.layout.inner.param_groups[self.layout.param_group_of_flat[index]]
        if "step" in states and type(self.layout.inner).__module__.startswith("deepspeed."):
            states["step"] = int(scalars["step"])
        elif "step" in states and not (param_group.get("fused") or param_group.get("capturable")):
            states["step"] = states["step"].cpu()
        return states

    def _largest(self, param_group: ParamGroup, key: str) -> Number:
        """Return the largest value of a scalar state in a param group."""
        cache = self._largest_scalars.setdefault(param_group.names, {})
        if key not in cache:
            scalars = [self.checkpoint.entries[name].scalars for name in param_group.names]
            cache[key] = max(weight_scalars[key] for weight_scalars in scalars if key in weight_scalars)
        return cache[key]

    def _settings(self) -> list[dict[str, Any]]:
        """Return the numbers of each param group, such as its learning rate, from the saved group of its first weight.

        Raises:
            ValueError: another kind of optimizer was saved.
        """
        settings = []
        for names, param_group in zip(self.layout.param_group_names, self.layout.inner.param_groups, strict=True):
            saved = self.param_group_of[self.source[names[0]]].settings if names else {}
            for key in _KINDS if names else ():
                if (key in saved) != (key in param_group):
                    raise ValueError(
                        f"{self.folder}: was saved with another kind of optimizer: its param groups have "
                        f"{'a' if key in saved else 'no'} {key}, unlike {type(self.layout.inner).__name__}"
                    )
            if bool(saved.get("amsgrad")) != bool(param_group.get("amsgrad")) and names:
                raise ValueError(
                    f"{self.folder}: was saved with amsgrad = {bool(saved.get('amsgrad'))}, unlike this run"
                )
            settings.append({key: _like(saved[key], param_group[key]) for key in saved.keys() & param_group.keys()})
        return settings


def _like(saved: Any, present: Any) -> Any:
    """Return a saved number, or tuple of numbers, in the form of the present one; flags and names stay as present."""
    if isinstance(present, tuple) and isinstance(saved, (tuple, list)):
        return tuple(saved)
    number = saved.item() if isinstance(saved, Tensor) and saved.numel() == 1 else saved
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return present
    if isinstance(present, Tensor):
        return torch.full_like(present, number)
    return number if isinstance(present, (int, float)) and not isinstance(present, bool) else present


def _missing_entries(state: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    """Return the entries of a scheduler's state that a saved state lacks, with those of schedulers inside of it.

    Private entries do not count: they differ between releases of torch.
    """
    missing = {key for key in state if key == _INNER or not key.startswith("_")} - saved.keys()
    for inner, saved_inner in zip(state.get(_INNER, ()), saved.get(_INNER, ()), strict=False):
        missing |= _missing_entries(inner, saved_inner)
    return missing
