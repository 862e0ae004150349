"""The files that DeepSpeed 0.19 writes: ZeRO stages 0 to 3 and BF16_Optimizer, fp32, bf16 and fp16, any world size.

Files are mapped, never loaded whole, and unmapped after every `RESIDENT_BYTES` read: memory is a small multiple of the
largest weight. At stages 0 to 2 every master is compared with the low-precision copy in the same checkpoint, so that
files of different steps, or a layout that is not understood, end in an error and never in a wrong weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint import layout
from sparseforge_ds.checkpoint.contents import Contents, Group, StoredTensor
from sparseforge_ds.checkpoint.rank_files import RankFiles
from sparseforge_ds.checkpoint.zero_partitions import (
    element_states,
    field,
    number_states,
    read_loss_scale,
    same_bits,
    stage0_names,
    zero12_alignment,
    zero12_partitions,
)

# What entries of a wrong type raise, wherever they are first used.
_DAMAGE = (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


class DeepSpeedFiles:
    """The `.pt` files of one checkpoint folder.

    Raises:
        ValueError: (constructor, methods) a file is missing, damaged, foreign or of another step; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self._files = RankFiles(folder)
        self.folder = self._files.folder
        self.check_bytes = self._files.check_bytes
        self._first = self._files.model[0]
        try:
            self._open()
        except _DAMAGE as error:
            raise ValueError(f"{self._first.path}: it or a file of its ranks is damaged ({error!r:.200})") from None
        self._files.release()

    def _open(self) -> None:
        files = self._files
        files.open()
        first, self._stage = self._first, files.stage
        module = field(first, dict, "module")
        client_state = {str(key): field(first, dict, key) for key in ("sparseforge", "train") if key in first.content}
        aliases = self._read_aliases(module)
        buffers = frozenset(field(first, list, "buffer_names"))
        flat_shapes = self._read_flat_shapes(module, client_state.get("sparseforge", {}))
        self._slots = self._read_slots(flat_shapes)
        shapes = self._read_shapes(module, flat_shapes, aliases, buffers)
        self._check_sizes()
        self.contents = Contents(
            stage=self._stage,
            world_size=files.world_size,
            step=files.step,
            samples=field(first, int, "global_samples"),
            skipped=field(first, int, "skipped_steps"),
            entries={name: self._describe(name, shape) for name, shape in shapes.items()},
            buffers=buffers,
            aliases=aliases,
            groups=self._read_groups(flat_shapes),
            client_state=client_state,
            loss_scale=read_loss_scale(self._files.state_file(0), self._stage),
            lr_scheduler=field(first, dict, "lr_scheduler") if first.content.get("lr_scheduler") is not None else None,
        )

    def read(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """(stop - start,) elements of a weight (`key` None) or of one of its states, in memory of their own."""
        try:
            taken = self._take(name, key, start, stop)
        except _DAMAGE as error:
            raise ValueError(f"{self.folder}: {name} cannot be read, its files are damaged ({error!r:.200})") from None
        self._files.count(taken)
        return taken

    def _take(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        if key is None and not self._has_master(name):
            if self._stage < 3 or name in self.contents.buffers:
                return self._module_tensor(name, start, stop).clone()
            return self._read_frozen(name, start, stop)
        taken = self._assemble(name, key, start, stop)
        if key is None and self._stage < 3:
            self._check_copy(name, taken, start, stop)
        return taken

    def _read_aliases(self, module: dict[str, Any]) -> dict[str, str]:
        if self._stage:
            return dict(field(self._first, dict, "shared_params"))
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        aliases = {}
        for name, tensor in module.items():
            if isinstance(tensor, Tensor) and tensor.numel():
                source = seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
                if source != name:
                    aliases[name] = source
        return aliases

    def _read_flat_shapes(
        self, module: dict[str, Any], forge_state: dict[str, Any]
    ) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes in the order of each flat."""
        if self._stage == 0:
            shapes = {name: tuple(value.shape) for name, value in module.items() if isinstance(value, Tensor)}
            return stage0_names(self._first, self._files.flats(0), shapes, forge_state)
        groups = field(self._first, list, "param_shapes")
        return [{name: tuple(shape) for name, shape in group.items()} for group in groups]

    def _read_slots(self, flat_shapes: list[dict[str, tuple[int, ...]]]) -> dict[str, list[layout.Slot]]:
        masters = self._files.flats(0).masters
        if masters is not None and len(masters) != len(flat_shapes):
            raise ValueError(
                f"{self._files.state_file(0).path}: has {len(masters)} partitions, "
                f"{self._first.path.name} names {len(flat_shapes)}"
            )
        if self._stage == 3:
            return layout.zero3_slots(flat_shapes, self._files.world_size)
        if self._stage == 0:
            return layout.whole_slots(flat_shapes)
        optimizer = self._files.optimizer
        partitions = [zero12_partitions(archive, self._files.flats(r)) for r, archive in enumerate(optimizer)]
        for archive, partition in zip(optimizer, partitions, strict=True):
            if partition != partitions[0]:
                raise ValueError(f"{archive.path}: partitions of {partition} elements, rank 0 has {partitions[0]}")
        return layout.zero12_slots(flat_shapes, zero12_alignment(optimizer[0], flat_shapes), partitions[0])

    def _read_shapes(
        self,
        module: dict[str, Any],
        flat_shapes: list[dict[str, tuple[int, ...]]],
        aliases: dict[str, str],
        buffers: frozenset[str],
    ) -> dict[str, tuple[int, ...]]:
        if self._stage < 3:
            held = {name: tuple(value.shape) for name, value in module.items() if isinstance(value, Tensor)}
        else:
            held = {name: shape for group in flat_shapes for name, shape in group.items()}
            frozen = self._first.content.get("frozen_param_shapes") or {}
            held.update({name: tuple(shape) for name, shape in frozen.items()})
            held.update({name: tuple(module[name].shape) for name in buffers if name in module})
        order = {name: position for position, name in enumerate(module)}
        for group in flat_shapes:
            for name, shape in group.items():
                if held.get(name) != shape:
                    raise ValueError(
                        f"{self._first.path}: {name} is {held.get(name)} in the module, {shape} in the optimizer"
                    )
        names = sorted((name for name in held if name not in aliases), key=lambda name: order.get(name, len(order)))
        return {name: held[name] for name in names}

    def _read_groups(self, flat_shapes: list[dict[str, tuple[int, ...]]]) -> list[Group]:
        flats = self._files.flats(0)
        names: list[list[str]] = [[] for _ in flats.groups]
        for group, shapes in zip(flats.group_of_flat, flat_shapes, strict=True):
            names[group].extend(shapes)
        return [Group(tuple(held), settings) for held, settings in zip(names, flats.groups, strict=True)]

    def _describe(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        trained_dtype = field(self._first, Tensor, "module", name).dtype
        slots = self._slots.get(name, [])
        pieces = [(slot, self._files.flats(slot.rank)) for slot in slots]
        held = [element_states(flats.states[slot.group], slot.stop) for slot, flats in pieces]
        keys = sorted(set.intersection(*map(set, held))) if held else []
        dtype = trained_dtype
        masters = {flats.masters[slot.group].dtype for slot, flats in pieces if flats.masters is not None}
        if len(masters) > 1 or any(states[key] != held[0][key] for states in held for key in keys):
            raise ValueError(f"{self.folder}: the ranks hold {name} in different dtypes; use another checkpoint")
        if masters:
            dtype = masters.pop()
        elif (
            self._stage == 3
            and not slots
            and isinstance(fragments := self._first.content.get("frozen_param_fragments"), dict)
        ):
            dtype = fragments[name].dtype if isinstance(fragments.get(name), Tensor) else dtype
        state = pieces[0][1].states[slots[0].group] if pieces else {}
        scalars = number_states(state)
        others = tuple(
            sorted(key for key, value in state.items() if key not in {*keys, *scalars} and value is not None)
        )
        return StoredTensor(shape, dtype, trained_dtype, {key: held[0][key] for key in keys}, scalars, others)

    def _check_sizes(self) -> None:
        """Every slot lies inside the tensors it points into, and all masters have one dtype, as DeepSpeed has them."""
        masters = [
            m for rank in range(max(1, len(self._files.optimizer))) for m in self._files.flats(rank).masters or ()
        ]
        if len(dtypes := sorted({str(master.dtype) for master in masters})) > 1:
            raise ValueError(f"{self.folder}: its masters are of several dtypes, {', '.join(dtypes)}; it was changed")
        for name, slots in self._slots.items():
            for slot in slots:
                flats = self._files.flats(slot.rank)
                if flats.masters is not None and flats.masters[slot.group].numel() < slot.stop:
                    archive = self._files.state_file(slot.rank)
                    raise ValueError(
                        f"{archive.path}: its partition {slot.group} has {flats.masters[slot.group].numel()} elements, "
                        f"{name} needs {slot.stop}; the file does not belong to {self._first.path.name}"
                    )

    def _has_master(self, name: str) -> bool:
        return name in self._slots and self._files.flats(0).masters is not None

    def _assemble(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """Elements of the masters or of a state, from all slots that hold some of them."""
        entry = self.contents.entries[name]
        out = torch.empty(stop - start, dtype=entry.dtype if key is None else entry.states[key])
        position = 0
        for slot in self._slots[name]:
            first, last = max(start - position, 0), min(stop - position, slot.stop - slot.start)
            if first < last:
                flats = self._files.flats(slot.rank)
                if key is None:
                    assert flats.masters is not None
                    flat = flats.masters[slot.group]
                else:
                    flat = flats.states[slot.group][key]
                piece = flat.detach().reshape(-1)[slot.start + first : slot.start + last]
                out[position + first - start : position + last - start] = piece
            position += slot.stop - slot.start
        return out

    def _read_frozen(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of a weight that ZeRO-3 keeps in equal pieces outside of its optimizer."""
        out = torch.empty(stop - start, dtype=self.contents.entries[name].dtype)
        position = 0
        for archive in self._files.model:
            piece = field(archive, Tensor, "frozen_param_fragments", name).detach().reshape(-1)
            if piece.dtype != out.dtype:
                raise ValueError(f"{archive.path}: the frozen {name} is {piece.dtype}, of rank 0 {out.dtype}")
            first, last = max(start - position, 0), min(stop - position, piece.numel())
            if first < last:
                out[position + first - start : position + last - start] = piece[first:last]
            position += piece.numel()
        if position < stop:
            raise ValueError(f"{self._first.path}: the pieces of the frozen {name} are smaller than its shape")
        return out

    def _module_tensor(self, name: str, start: int, stop: int) -> Tensor:
        tensor: Tensor = field(self._first, Tensor, "module", name)
        return tensor.detach().reshape(-1)[start:stop]

    def _check_copy(self, name: str, master: Tensor, start: int, stop: int) -> None:
        if self._stage == 0 and self._files.step == 0:
            return  # DeepSpeed's 16-bit stage-0 constructors step once and leave master and weight apart
        copy = self._module_tensor(name, start, stop)
        if not same_bits(master.to(copy.dtype), copy):
            raise ValueError(
                f"{self._first.path}: {name} is not what {self._files.state_file(0).path.name} and its peers "
                "hold; the files are of different steps or runs, use another checkpoint"
            )
