"""Full weights and optimizer states out of a DeepSpeed checkpoint, one at a time, without engine or process group.

    checkpoint = Checkpoint("runs/qwen3")
    for name in checkpoint.shapes:
        weight = checkpoint.weight(name)                     # the fp32 master, full shape
        if "mask" in checkpoint.states(name):
            mask = checkpoint.state(name, "mask")

ZeRO stages 0 to 3 and BF16_Optimizer, fp32, bf16 and fp16, any world size, as DeepSpeed 0.19 writes them. Files are
mapped, never loaded whole, and unmapped after every `RESIDENT_BYTES` read: memory is a small multiple of the largest
weight. At stages 0 to 2 every master is compared with the low-precision copy in the same checkpoint, so that files of
different steps, or a layout that is not understood, end in an error and never in a wrong weight.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint import layout
from sparseforge_ds.checkpoint.archive import Archive
from sparseforge_ds.checkpoint.flats import (
    RankFlats,
    element_states,
    field,
    read_flats,
    read_stage,
    same_bits,
    stage0_names,
    zero12_alignment,
    zero12_partitions,
)
from sparseforge_ds.checkpoint.folder import find_checkpoint, list_files

RESIDENT_BYTES = 1 << 29
"""Bytes read from mapped files before they are unmapped."""


class Checkpoint:
    """A checkpoint folder that can be asked for any weight.

    Args:
        path: a run's folder, its `checkpoints` folder (both mean the newest complete checkpoint), or one checkpoint.

    Raises:
        ValueError: (constructor, methods) a file is missing, damaged, foreign or of another step; the message names it.
    """

    def __init__(self, path: str | Path) -> None:
        files = list_files(find_checkpoint(path))
        self.folder = files.folder
        self._model = [Archive(file) for file in files.model]
        self._optimizer = [Archive(file) for file in files.optimizer]
        self._flats: dict[int, RankFlats] = {}
        self._bytes_read = 0
        first = self._model[0]
        module = field(first, dict, "module")
        self.stage = read_stage(first, self._optimizer[0] if self._optimizer else None)
        self.step = field(first, int, "global_steps")
        """Steps as DeepSpeed counts them, skipped ones included."""
        self.world_size = field(first, int, "dp_world_size")
        self._check_ranks()
        self.client_state = {key: field(first, dict, key) for key in ("sparseforge", "train") if key in first.content}
        """What our own save put beside the weights."""
        self.aliases = self._read_aliases(module)
        """Tied weights: name without data -> name that holds it."""
        self.buffers = set(field(first, list, "buffer_names"))
        """Names that are persistent buffers of the module, not parameters."""
        groups = self._read_groups(module)
        self._slots = self._read_slots(groups)
        self.shapes = self._read_shapes(module, groups)
        """Full shape of everything that `weight` returns, in the module's order."""
        self._states = {name: self._list_states(slots) for name, slots in self._slots.items()}
        self._check_sizes()
        self._release()

    def states(self, name: str) -> tuple[str, ...]:
        """Names of the per-element optimizer states of a weight, such as dense, exp_avg, mask."""
        return self._states.get(name, ())

    def state(self, name: str, key: str) -> Tensor:
        """A per-element optimizer state in the weight's full shape, in the dtype in which it was saved."""
        if key not in self.states(name):
            held = ", ".join(self.states(name)) or "no state"
            raise ValueError(f"{self.folder}: {name} has no optimizer state {key!r}, it has {held}")
        return self._assemble(name, key)

    def weight(self, name: str) -> Tensor:
        """The fp32 master, or what the module holds where the optimizer has no master (frozen weights, buffers).

        Returns:
            A tensor of its own, of `shapes[name]`.
        """
        if name not in self.shapes:
            raise ValueError(f"{self.folder}: holds no weight {name!r}")
        if name in self._slots and self._rank_flats(0).masters is not None:
            master = self._assemble(name, None)
            if self.stage < 3:
                self._check_copy(name, master)
            return master
        if self.stage < 3 or name in self.buffers:
            return self._take(field(self._model[0], Tensor, "module", name)).clone()
        return self._assemble_frozen(name)

    def trained_dtype(self, name: str) -> torch.dtype:
        """The dtype that the network computed with."""
        dtype: torch.dtype = field(self._model[0], Tensor, "module", name).dtype
        return dtype

    def check_bytes(self) -> None:
        """Compare the checksums of all files, which reads them whole."""
        for archive in (*self._model, *self._optimizer):
            archive.check_bytes()

    def _check_ranks(self) -> None:
        """One file per rank, all of the same moment."""
        for kind, archives, expected in (
            ("optimizer", self._optimizer, self.world_size if self.stage else 0),
            ("model", self._model, self.world_size if self.stage == 3 else 1),
        ):
            if len(archives) != expected:
                raise ValueError(
                    f"{self.folder}: has {len(archives)} {kind} files, but it was saved at stage {self.stage} by "
                    f"{self.world_size} ranks, which makes {expected}; use another checkpoint"
                )
        for archive in self._model[1:]:
            if (step := field(archive, int, "global_steps")) != self.step:
                raise ValueError(f"{archive.path}: is of step {step}, the file of rank 0 is of step {self.step}")
        for rank, archive in enumerate(self._optimizer):
            counts = field(archive, dict, "optimizer_state_dict").get("partition_count")
            for count in counts if isinstance(counts, (list, tuple)) else [counts]:
                if count != self.world_size:
                    raise ValueError(f"{archive.path}: was saved by {count} ranks, the model file by {self.world_size}")
            if read_stage(self._model[0], archive) != self.stage:
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
        if self.stage:
            return dict(field(self._model[0], dict, "shared_params"))
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        aliases = {}
        for name, tensor in module.items():
            if isinstance(tensor, Tensor) and tensor.numel():
                source = seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
                if source != name:
                    aliases[name] = source
        return aliases

    def _read_groups(self, module: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes in the order of each flat."""
        if self.stage == 0:
            shapes = {name: tuple(value.shape) for name, value in module.items() if isinstance(value, Tensor)}
            forge_state = self.client_state.get("sparseforge", {})
            return stage0_names(self._model[0], self._rank_flats(0), shapes, forge_state)
        groups = field(self._model[0], list, "param_shapes")
        return [{name: tuple(shape) for name, shape in group.items()} for group in groups]

    def _read_slots(self, groups: list[dict[str, tuple[int, ...]]]) -> dict[str, list[layout.Slot]]:
        masters = self._rank_flats(0).masters
        if masters is not None and len(masters) != len(groups):
            raise ValueError(
                f"{self._state_file(0).path}: has {len(masters)} partitions, "
                f"{self._model[0].path.name} names {len(groups)}"
            )
        if self.stage == 3:
            return layout.zero3_slots(groups, self.world_size)
        if self.stage == 0:
            return layout.whole_slots(groups)
        partitions = [zero12_partitions(archive, self._rank_flats(r)) for r, archive in enumerate(self._optimizer)]
        for archive, partition in zip(self._optimizer, partitions, strict=True):
            if partition != partitions[0]:
                raise ValueError(f"{archive.path}: partitions of {partition} elements, rank 0 has {partitions[0]}")
        return layout.zero12_slots(groups, zero12_alignment(self._optimizer[0], groups), partitions[0])

    def _read_shapes(
        self, module: dict[str, Any], groups: list[dict[str, tuple[int, ...]]]
    ) -> dict[str, tuple[int, ...]]:
        if self.stage < 3:
            held = {name: tuple(value.shape) for name, value in module.items() if isinstance(value, Tensor)}
        else:
            held = {name: shape for group in groups for name, shape in group.items()}
            frozen = self._model[0].content.get("frozen_param_shapes") or {}
            held.update({name: tuple(shape) for name, shape in frozen.items()})
            held.update({name: tuple(module[name].shape) for name in self.buffers if name in module})
        order = {name: position for position, name in enumerate(module)}
        for group in groups:
            for name, shape in group.items():
                if held.get(name) != shape:
                    raise ValueError(
                        f"{self._model[0].path}: {name} is {held.get(name)} in the module, {shape} in the optimizer"
                    )
        names = sorted(
            (name for name in held if name not in self.aliases), key=lambda name: order.get(name, len(order))
        )
        return {name: held[name] for name in names}

    def _list_states(self, slots: list[layout.Slot]) -> tuple[str, ...]:
        held = [element_states(self._rank_flats(s.rank).states[s.group], s.stop) for s in slots]
        return tuple(sorted(set.intersection(*held))) if held else ()

    def _check_sizes(self) -> None:
        """Every slot lies inside the tensors it points into."""
        for name, slots in self._slots.items():
            for slot in slots:
                flats = self._rank_flats(slot.rank)
                if flats.masters is not None and flats.masters[slot.group].numel() < slot.stop:
                    archive = self._state_file(slot.rank)
                    raise ValueError(
                        f"{archive.path}: its partition {slot.group} has {flats.masters[slot.group].numel()} elements, "
                        f"{name} needs {slot.stop}; the file does not belong to {self._model[0].path.name}"
                    )

    def _assemble(self, name: str, key: str | None) -> Tensor:
        """Concatenate the slots of a weight: of the masters, or of a state."""
        pieces = []
        for slot in self._slots[name]:
            flats = self._rank_flats(slot.rank)
            if key is None:
                assert flats.masters is not None
                flat = flats.masters[slot.group]
            else:
                flat = flats.states[slot.group][key]
            pieces.append(self._take(flat.detach().reshape(-1)[slot.start : slot.stop]))
        return (torch.cat(pieces) if pieces else torch.empty(0)).view(self.shapes[name])

    def _assemble_frozen(self, name: str) -> Tensor:
        numel = math.prod(self.shapes[name])
        pieces = [self._take(field(archive, Tensor, "frozen_param_fragments", name)) for archive in self._model]
        whole = torch.cat([piece.reshape(-1) for piece in pieces])
        if whole.numel() < numel:
            raise ValueError(f"{self._model[0].path}: the pieces of the frozen {name} are smaller than its shape")
        return whole[:numel].clone().view(self.shapes[name])

    def _check_copy(self, name: str, master: Tensor) -> None:
        copy = self._take(field(self._model[0], Tensor, "module", name))
        if not same_bits(master.to(copy.dtype), copy):
            raise ValueError(
                f"{self._model[0].path}: {name} is not what {self._state_file(0).path.name} and its peers "
                "hold; the files are of different steps or runs, use another checkpoint"
            )

    def _state_file(self, rank: int) -> Archive:
        """The file that holds masters and states of a rank: at stage 0 that is the model file."""
        return self._optimizer[rank] if self.stage else self._model[0]

    def _rank_flats(self, rank: int) -> RankFlats:
        if rank not in self._flats:
            self._flats[rank] = read_flats(self._state_file(rank), self.stage)
        return self._flats[rank]

    def _take(self, tensor: Tensor) -> Tensor:
        """Count what is read, and unmap the files when it was much."""
        self._bytes_read += tensor.numel() * tensor.element_size()
        if self._bytes_read > RESIDENT_BYTES:
            self._release()
        return tensor

    def _release(self) -> None:
        self._bytes_read = 0
        self._flats.clear()
        for archive in (*self._model, *self._optimizer):
            archive.release()
