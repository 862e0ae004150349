"""The files that DeepSpeed 0.19 writes: ZeRO stages 0 to 3 and BF16_Optimizer, fp32, bf16 and fp16, any world size.

Files are mapped, never loaded whole, and unmapped after every `RESIDENT_BYTES` read: memory is a small multiple of the
largest weight. At stages 0 to 2 every master is compared with the low-precision copy in the same checkpoint, so that
files of different steps, or a layout that is not understood, end in an error and never in a wrong weight.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint import layout
from sparseforge_ds.checkpoint.archive import Archive
from sparseforge_ds.checkpoint.contents import Contents, Entry, Group
from sparseforge_ds.checkpoint.flats import (
    RankFlats,
    element_states,
    field,
    number_states,
    read_flats,
    read_loss_scale,
    read_stage,
    same_bits,
    stage0_names,
    zero12_alignment,
    zero12_partitions,
)
from sparseforge_ds.checkpoint.folder import list_files

RESIDENT_BYTES = 1 << 29
"""Bytes read from mapped files before they are unmapped."""

# What entries of a wrong type raise, wherever they are first used.
_DAMAGE = (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


class ShardedFiles:
    """The `.pt` files of one checkpoint folder.

    Raises:
        ValueError: (constructor, methods) a file is missing, damaged, foreign or of another step; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        files = list_files(folder)
        self.folder = files.folder
        self._model = [Archive(file) for file in files.model]
        self._optimizer = [Archive(file) for file in files.optimizer]
        self._flats: dict[int, RankFlats] = {}
        self._bytes_read = 0
        self._counting = threading.Lock()
        try:
            self._open()
        except _DAMAGE as error:
            raise ValueError(f"{self._model[0].path}: it or a file of its ranks is damaged ({error!r:.200})") from None
        self._release()

    def _open(self) -> None:
        first = self._model[0]
        module = field(first, dict, "module")
        self._stage = read_stage(first, self._optimizer[0] if self._optimizer else None)
        self._step = field(first, int, "global_steps")
        self._world_size = field(first, int, "dp_world_size")
        self._check_ranks()
        client_state = {str(key): field(first, dict, key) for key in ("sparseforge", "train") if key in first.content}
        aliases = self._read_aliases(module)
        buffers = frozenset(field(first, list, "buffer_names"))
        flat_shapes = self._read_flat_shapes(module, client_state.get("sparseforge", {}))
        self._slots = self._read_slots(flat_shapes)
        shapes = self._read_shapes(module, flat_shapes, aliases, buffers)
        self._check_sizes()
        self.contents = Contents(
            stage=self._stage,
            world_size=self._world_size,
            step=self._step,
            samples=field(first, int, "global_samples"),
            skipped=field(first, int, "skipped_steps"),
            entries={name: self._describe(name, shape) for name, shape in shapes.items()},
            buffers=buffers,
            aliases=aliases,
            groups=self._read_groups(flat_shapes),
            client_state=client_state,
            loss_scale=read_loss_scale(self._state_file(0), self._stage),
            lr_scheduler=field(first, dict, "lr_scheduler") if first.content.get("lr_scheduler") is not None else None,
        )

    def read(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """(stop - start,) elements of a weight (`key` None) or of one of its states, in memory of their own."""
        try:
            taken = self._take(name, key, start, stop)
        except _DAMAGE as error:
            raise ValueError(f"{self.folder}: {name} cannot be read, its files are damaged ({error!r:.200})") from None
        self._count(taken)
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

    def check_bytes(self, part: int, parts: int) -> None:
        """Compare the checksums of every `parts`-th file."""
        for archive in (*self._model, *self._optimizer)[part::parts]:
            archive.check_bytes()

    def _check_ranks(self) -> None:
        """One file per rank, all of the same moment."""
        for kind, archives, expected in (
            ("optimizer", self._optimizer, self._world_size if self._stage else 0),
            ("model", self._model, self._world_size if self._stage == 3 else 1),
        ):
            if len(archives) != expected:
                raise ValueError(
                    f"{self.folder}: has {len(archives)} {kind} files, but it was saved at stage {self._stage} by "
                    f"{self._world_size} ranks, which makes {expected}; use another checkpoint"
                )
        for archive in self._model[1:]:
            if (step := field(archive, int, "global_steps")) != self._step:
                raise ValueError(f"{archive.path}: is of step {step}, the file of rank 0 is of step {self._step}")
        for rank, archive in enumerate(self._optimizer):
            counts = field(archive, dict, "optimizer_state_dict").get("partition_count")
            for count in counts if isinstance(counts, (list, tuple)) else [counts]:
                if count != self._world_size:
                    raise ValueError(
                        f"{archive.path}: was saved by {count} ranks, the model file by {self._world_size}"
                    )
            if read_stage(self._model[0], archive) != self._stage:
                raise ValueError(f"{archive.path}: was saved at another ZeRO stage than {self._optimizer[0].path.name}")
            if self._moment(rank) != self._moment(0):
                raise ValueError(
                    f"{archive.path}: was saved at another step or by another run than {self._optimizer[0].path.name}; "
                    "use another checkpoint"
                )

    def _moment(self, rank: int) -> tuple[object, object]:
        """What the files of one save have in common: the step of every flat and the hyperparameters of every group."""
        flats = self._rank_flats(rank)
        return flats.step(), [{k: v for k, v in group.items() if not isinstance(v, Tensor)} for group in flats.groups]

    def _read_aliases(self, module: dict[str, Any]) -> dict[str, str]:
        if self._stage:
            return dict(field(self._model[0], dict, "shared_params"))
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
            return stage0_names(self._model[0], self._rank_flats(0), shapes, forge_state)
        groups = field(self._model[0], list, "param_shapes")
        return [{name: tuple(shape) for name, shape in group.items()} for group in groups]

    def _read_slots(self, flat_shapes: list[dict[str, tuple[int, ...]]]) -> dict[str, list[layout.Slot]]:
        masters = self._rank_flats(0).masters
        if masters is not None and len(masters) != len(flat_shapes):
            raise ValueError(
                f"{self._state_file(0).path}: has {len(masters)} partitions, "
                f"{self._model[0].path.name} names {len(flat_shapes)}"
            )
        if self._stage == 3:
            return layout.zero3_slots(flat_shapes, self._world_size)
        if self._stage == 0:
            return layout.whole_slots(flat_shapes)
        partitions = [zero12_partitions(archive, self._rank_flats(r)) for r, archive in enumerate(self._optimizer)]
        for archive, partition in zip(self._optimizer, partitions, strict=True):
            if partition != partitions[0]:
                raise ValueError(f"{archive.path}: partitions of {partition} elements, rank 0 has {partitions[0]}")
        return layout.zero12_slots(flat_shapes, zero12_alignment(self._optimizer[0], flat_shapes), partitions[0])

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
            frozen = self._model[0].content.get("frozen_param_shapes") or {}
            held.update({name: tuple(shape) for name, shape in frozen.items()})
            held.update({name: tuple(module[name].shape) for name in buffers if name in module})
        order = {name: position for position, name in enumerate(module)}
        for group in flat_shapes:
            for name, shape in group.items():
                if held.get(name) != shape:
                    raise ValueError(
                        f"{self._model[0].path}: {name} is {held.get(name)} in the module, {shape} in the optimizer"
                    )
        names = sorted((name for name in held if name not in aliases), key=lambda name: order.get(name, len(order)))
        return {name: held[name] for name in names}

    def _read_groups(self, flat_shapes: list[dict[str, tuple[int, ...]]]) -> list[Group]:
        flats = self._rank_flats(0)
        names: list[list[str]] = [[] for _ in flats.groups]
        for group, shapes in zip(flats.group_of_flat, flat_shapes, strict=True):
            names[group].extend(shapes)
        return [Group(tuple(held), settings) for held, settings in zip(names, flats.groups, strict=True)]

    def _describe(self, name: str, shape: tuple[int, ...]) -> Entry:
        trained_dtype = field(self._model[0], Tensor, "module", name).dtype
        slots = self._slots.get(name, [])
        pieces = [(slot, self._rank_flats(slot.rank)) for slot in slots]
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
            and isinstance(fragments := self._model[0].content.get("frozen_param_fragments"), dict)
        ):
            dtype = fragments[name].dtype if isinstance(fragments.get(name), Tensor) else dtype
        state = pieces[0][1].states[slots[0].group] if pieces else {}
        scalars = number_states(state)
        others = tuple(
            sorted(key for key, value in state.items() if key not in {*keys, *scalars} and value is not None)
        )
        return Entry(shape, dtype, trained_dtype, {key: held[0][key] for key in keys}, scalars, others)

    def _check_sizes(self) -> None:
        """Every slot lies inside the tensors it points into, and all masters have one dtype, as DeepSpeed has them."""
        masters = [m for rank in range(max(1, len(self._optimizer))) for m in self._rank_flats(rank).masters or ()]
        if len(dtypes := sorted({str(master.dtype) for master in masters})) > 1:
            raise ValueError(f"{self.folder}: its masters are of several dtypes, {', '.join(dtypes)}; it was changed")
        for name, slots in self._slots.items():
            for slot in slots:
                flats = self._rank_flats(slot.rank)
                if flats.masters is not None and flats.masters[slot.group].numel() < slot.stop:
                    archive = self._state_file(slot.rank)
                    raise ValueError(
                        f"{archive.path}: its partition {slot.group} has {flats.masters[slot.group].numel()} elements, "
                        f"{name} needs {slot.stop}; the file does not belong to {self._model[0].path.name}"
                    )

    def _has_master(self, name: str) -> bool:
        return name in self._slots and self._rank_flats(0).masters is not None

    def _assemble(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """Elements of the masters or of a state, from all slots that hold some of them."""
        entry = self.contents.entries[name]
        out = torch.empty(stop - start, dtype=entry.dtype if key is None else entry.states[key])
        position = 0
        for slot in self._slots[name]:
            first, last = max(start - position, 0), min(stop - position, slot.stop - slot.start)
            if first < last:
                flats = self._rank_flats(slot.rank)
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
        for archive in self._model:
            piece = field(archive, Tensor, "frozen_param_fragments", name).detach().reshape(-1)
            if piece.dtype != out.dtype:
                raise ValueError(f"{archive.path}: the frozen {name} is {piece.dtype}, of rank 0 {out.dtype}")
            first, last = max(start - position, 0), min(stop - position, piece.numel())
            if first < last:
                out[position + first - start : position + last - start] = piece[first:last]
            position += piece.numel()
        if position < stop:
            raise ValueError(f"{self._model[0].path}: the pieces of the frozen {name} are smaller than its shape")
        return out

    def _module_tensor(self, name: str, start: int, stop: int) -> Tensor:
        tensor: Tensor = field(self._model[0], Tensor, "module", name)
        return tensor.detach().reshape(-1)[start:stop]

    def _check_copy(self, name: str, master: Tensor, start: int, stop: int) -> None:
        if self._stage == 0 and self._step == 0:
            return  # DeepSpeed's 16-bit stage-0 constructors step once and leave master and weight apart
        copy = self._module_tensor(name, start, stop)
        if not same_bits(master.to(copy.dtype), copy):
            raise ValueError(
                f"{self._model[0].path}: {name} is not what {self._state_file(0).path.name} and its peers "
                "hold; the files are of different steps or runs, use another checkpoint"
            )

    def _state_file(self, rank: int) -> Archive:
        """The file that holds masters and states of a rank: at stage 0 that is the model file."""
        return self._optimizer[rank] if self._stage else self._model[0]

    def _rank_flats(self, rank: int) -> RankFlats:
        known = self._flats  # another thread may replace it meanwhile
        flats = known.get(rank)
        if flats is None:
            flats = known[rank] = read_flats(self._state_file(rank), self._stage)
        return flats

    def _count(self, taken: Tensor) -> None:
        """Count what is read, and unmap the files when it was much. Threads in the midst of a read keep theirs."""
        with self._counting:
            self._bytes_read += taken.numel() * taken.element_size()
            if self._bytes_read > RESIDENT_BYTES:
                self._release()

    def _release(self) -> None:
        self._bytes_read = 0
        self._flats = {}
        for archive in (*self._model, *self._optimizer):
            archive.release()
