"""Reader of full weights and optimizer states from a checkpoint, one at a time, without engine or process group.

The files are those of DeepSpeed 0.19: ZeRO stages 0 to 3 and BF16_Optimizer, fp32, bf16 and fp16, any world size. They
are mapped rather than loaded, and unmapped now and then: memory is a small multiple of the largest weight. At stages 0
to 2 every master is compared with the low-precision copy in the same checkpoint, so that files of different steps, or
of an unknown layout, end in an error and never in a wrong weight. Any number of threads may read at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.folder import MANIFEST, find_checkpoint
from sparseforge_ds.checkpoint.manifest import Manifest
from sparseforge_ds.checkpoint.rank_files import RankFiles
from sparseforge_ds.checkpoint.slots import FlatShapes, read_aliases, read_flat_shapes, read_shapes, read_slots
from sparseforge_ds.checkpoint.zero_partitions import (
    KEPT,
    Number,
    element_states,
    number_states,
    read_bits,
    read_field,
    read_loss_scale,
)

_DAMAGE = (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""Errors that entries of a wrong type raise where they are first used."""

_OF_DEEPSPEED = {
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    "checkpoint_parallel_dimensions",
}
"""Keys of a model file that are DeepSpeed's own."""


@dataclass(frozen=True)
class StoredTensor:
    """Description of one weight, or of one persistent buffer of the module."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of the master, or of the module's own tensor if there is no master."""
    trained_dtype: torch.dtype
    """Dtype in which the network computed."""
    states: dict[str, torch.dtype]
    """Dtype of each per-element optimizer state, by key."""
    scalars: dict[str, Number]
    """Optimizer states that are one number, such as `step`: floats if the optimizer keeps tensors, else ints."""
    indivisible: tuple[str, ...]
    """Keys of optimizer states of other shapes, which cannot be cut into shards."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParamGroup:
    """Param group of the optimizer."""

    names: tuple[str, ...]
    """Names of its weights; empty at stage 0 if the client state has no names."""
    settings: dict[str, Any]
    """Hyperparameters and other keys of the param group, without the parameters."""


class Checkpoint:
    """Weights and optimizer states of a checkpoint folder, each read in full or in part.

    Args:
        path: one checkpoint, or a run's folder or its `checkpoints` folder, whose newest checkpoint is read.

    Raises:
        ValueError: (constructor, methods) a file is missing, damaged, foreign or of another step; the message names it.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = find_checkpoint(path)
        if (self.folder / MANIFEST).exists():
            Manifest.read(self.folder).check_shards()
        # Stage 3 has a model file a rank, other stages have one; what all ranks share is in the first.
        self._files = files = RankFiles(self.folder)
        self.files = (*files.model, *files.optimizer)
        """Files of all ranks."""
        self._first = first = files.model[0]
        try:
            files.open()
            # Facts of the run, and the entries that other programs put beside DeepSpeed's own.
            module = read_field(first, dict, "module")
            self.stage = files.stage
            """ZeRO stage of the run that saved it."""
            self.world_size = files.world_size
            """Number of ranks of the run that saved it."""
            self.step = files.step
            """Number of steps as DeepSpeed counts them, skipped ones included."""
            self.samples: int = read_field(first, int, "global_samples")
            """Number of sequences trained on."""
            self.skipped: int = read_field(first, int, "skipped_steps")
            """Number of steps that an fp16 overflow skipped."""
            self.client_state: dict[str, Any] = {
                key: read_field(first, dict, key) if key == "sparseforge" else value
                for key, value in first.content.items()
                if key not in _OF_DEEPSPEED
            }
            """Entries of the model file that are not DeepSpeed's own: a user's loop may store anything."""
            train_state = self.client_state.get("train")
            self.launcher_state: dict[str, Any] = train_state if isinstance(train_state, dict) else {}
            """State of the launcher's run; empty if something else has saved the checkpoint."""
            # Names and shapes of all weights, and where each lies in the flat partitions of the ranks.
            self.aliases = read_aliases(files, module)
            """Tied weights: name without data -> name that holds it."""
            self.buffers = frozenset(read_field(first, list, "buffer_names"))
            """Names that are persistent buffers of the module, not parameters."""
            flat_shapes = read_flat_shapes(files, module, self.client_state.get("sparseforge", {}))
            self._slots = read_slots(files, flat_shapes)
            self.shapes = read_shapes(files, module, flat_shapes, set(self.aliases))
            """Full shape of everything that `weight` returns, in the module's order."""
            self.entries = {name: self._describe(name, shape) for name, shape in self.shapes.items()}
            """Description of everything that `weight` returns."""
            # What the optimizer and its schedule need to go on.
            self.param_groups = self._read_param_groups(flat_shapes)
            """Param groups of the optimizer."""
            self.loss_scale = read_loss_scale(files.state_file(0), files.stage)
            """State of a dynamic fp16 loss scale (scale, iteration, last_overflow, hysteresis), or None."""
            scheduled = first.content.get("lr_scheduler") is not None
            self.lr_scheduler = read_field(first, dict, "lr_scheduler") if scheduled else None
            """State of the engine's own scheduler, or None."""
        except _DAMAGE as error:
            raise ValueError(f"{first.path}: it or a file of its ranks is damaged ({error!r:.200})") from None
        files.release()

    def release(self) -> None:
        """Unmap the files, so that removing them frees the disk; a further read opens them again."""
        self._files.release()

    def states(self, name: str) -> tuple[str, ...]:
        """Return the keys of a weight's per-element optimizer states, such as dense, exp_avg, mask."""
        entry = self.entries.get(name)
        return () if entry is None else tuple(sorted(entry.states))

    def state(self, name: str, key: str) -> Tensor:
        """Return a per-element optimizer state in the weight's full shape and in the dtype in which it was saved."""
        return self.slice(name, key, 0, self._entry(name).numel).view(self.shapes[name])

    def weight(self, name: str) -> Tensor:
        """Return the master in full shape, or the module's tensor if there is no master (frozen weights, buffers)."""
        return self.slice(name, None, 0, self._entry(name).numel).view(self.shapes[name])

    def slice(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """Return (stop - start,) elements of a flattened state, or of the weight if `key` is None.

        They have memory of their own; no other bytes are read.
        """
        entry = self._entry(name)
        if key is not None and key not in entry.states:
            known = ", ".join(self.states(name)) or "no state"
            raise ValueError(f"{self.folder}: {name} has no optimizer state {key!r}, it has {known}")
        if not 0 <= start <= stop <= entry.numel:
            raise ValueError(f"{self.folder}: {name} has {entry.numel} elements, not {start}..{stop}")
        try:
            values = self._read_range(name, key, start, stop)
        except _DAMAGE as error:
            raise ValueError(f"{self.folder}: {name} cannot be read, its files are damaged ({error!r:.200})") from None
        self._files.count_read(values)
        return values

    def _entry(self, name: str) -> StoredTensor:
        if name not in self.entries:
            raise ValueError(f"{self.folder}: holds no weight {name!r}")
        return self.entries[name]

    def _describe(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Describe a weight or buffer by its slots and by the module; all ranks must have the same dtypes."""
        trained_dtype = read_field(self._first, Tensor, "module", name).dtype
        slots = self._slots.get(name, [])
        pieces = [(slot, self._files.flats(slot.rank)) for slot in slots]
        # Per-element states that every piece has.
        dtypes = [element_states(flats.states[slot.flat], slot.stop) for slot, flats in pieces]
        keys = sorted(set.intersection(*map(set, dtypes))) if dtypes else []
        masters = {flats.masters[slot.flat].dtype for slot, flats in pieces if flats.masters is not None}
        if len(masters) > 1 or any(states[key] != dtypes[0][key] for states in dtypes for key in keys):
            raise ValueError(f"{self.folder}: the ranks hold {name} in different dtypes; use another checkpoint")
        if not masters and self._in_fragments(name):
            masters = {read_field(self._first, Tensor, "frozen_param_fragments", name).dtype}
        # Mask bits that some piece has too few of, or lacks, are no state of another kind.
        if KEPT not in keys and any(KEPT in flats.states[slot.flat] for slot, flats in pieces):
            raise ValueError(f"{self.folder}: the mask bits of {name} are damaged; use another checkpoint")
        # The first piece tells of all other states.
        state = pieces[0][1].states[slots[0].flat] if pieces else {}
        scalars = number_states(state)
        indivisible = sorted(key for key, value in state.items() if key not in {*keys, *scalars} and value is not None)
        return StoredTensor(
            shape=shape,
            dtype=next(iter(masters), trained_dtype),
            trained_dtype=trained_dtype,
            states={key: dtypes[0][key] for key in keys},
            scalars=scalars,
            indivisible=tuple(indivisible),
        )

    def _read_param_groups(self, flat_shapes: FlatShapes) -> list[ParamGroup]:
        flats = self._files.flats(0)
        names: list[list[str]] = [[] for _ in flats.param_groups]
        for number, shapes in zip(flats.param_group_of_flat, flat_shapes, strict=True):
            names[number].extend(shapes)
        return [
            ParamGroup(tuple(own_names), settings)
            for own_names, settings in zip(names, flats.param_groups, strict=True)
        ]

    def _in_fragments(self, name: str) -> bool:
        """Return whether ZeRO-3 keeps this weight in pieces outside of the optimizer, since it is not trained."""
        return self.stage == 3 and name not in self._slots and name not in self.buffers

    def _read_range(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """Read elements of a weight or state from where this stage keeps them."""
        files = self._files
        # Untrained weights of ZeRO-3 lie in pieces in the model files of all ranks.
        if key is None and self._in_fragments(name):
            fragments = (read_field(archive, Tensor, "frozen_param_fragments", name) for archive in files.model)
            flats = (fragment.detach().reshape(-1) for fragment in fragments)
            return self._assemble(name, key, ((flat, 0, flat.numel()) for flat in flats), start, stop)
        # Without a master the module holds the weight.
        if key is None and (name not in self._slots or files.flats(0).masters is None):
            return self._in_module(name, start, stop).clone()
        # All else lies in the slots of the flats.
        slots = self._slots[name]
        pieces = ((files.flats(slot.rank).flat(slot.flat, key), slot.start, slot.stop) for slot in slots)
        values = self._assemble(name, key, pieces, start, stop)
        if key is None and self.stage < 3:
            self._check_copy(name, values, start, stop)
        return values

    def _assemble(
        self, name: str, key: str | None, pieces: Iterable[tuple[Tensor, int, int]], start: int, stop: int
    ) -> Tensor:
        """Return elements [start, stop) of pieces that lie end to end, each a flat, its first element and its stop."""
        entry = self.entries[name]
        dtype = entry.dtype if key is None else entry.states[key]
        parts = [torch.empty(0, dtype=dtype)]
        position = 0
        for flat, first, end in pieces:
            low = first + max(start - position, 0)
            high = max(min(first + stop - position, end), low)
            part = read_bits(flat, low, high) if key == KEPT else flat[low:high]
            if part.dtype != dtype:
                raise ValueError(f"{self.folder}: the ranks hold {name} as {part.dtype} and as {dtype}")
            parts.append(part)
            position += end - first
        values = torch.cat(parts)
        if len(values) < stop - start:
            raise ValueError(f"{self.folder}: the pieces of {name} are smaller than its shape; it is damaged")
        return values

    def _in_module(self, name: str, start: int, stop: int) -> Tensor:
        """Return a view of elements [start, stop) of the module's own tensor."""
        tensor: Tensor = read_field(self._first, Tensor, "module", name)
        return tensor.detach().reshape(-1)[start:stop]

    def _check_copy(self, name: str, master: Tensor, start: int, stop: int) -> None:
        """Raise ValueError unless elements of a master are those of the module, rounded to its dtype."""
        # DeepSpeed's 16-bit constructors of stage 0 step once and leave master and weight apart.
        if self.stage == 0 and self.step == 0:
            return
        copy = self._in_module(name, start, stop)
        # Bytes are compared, so that NaN and -0.0 count too.
        if not torch.equal(master.to(copy.dtype).view(torch.uint8), copy.view(torch.uint8)):
            raise ValueError(
                f"{self._first.path}: {name} is not what {self._files.state_file(0).path.name} and its peers "
                "hold; the files are of different steps or runs, use another checkpoint"
            )
