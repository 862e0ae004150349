"""Storage of the hidden states between two blocks: on the accelerator, in memory, or on the disk.

Legend of shape suffixes: N micro-batches, B sequences of one, S their tokens, H hidden size.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.disk import reserve
from sparseforge_ds.export.free_memory import free_memory

SHARE = 0.4
"""Share of the free memory that both streams together may take."""


class HiddenStream(MutableSequence[Tensor]):
    """Hidden states (B, S, H) of N micro-batches, each of which is returned on the device that computes."""

    def __init__(
        self, shape_NBSH: tuple[int, ...], dtype: torch.dtype, device: torch.device, storage: Path | str
    ) -> None:
        """Make room.

        Args:
            shape_NBSH: sizes of all hidden states.
            dtype: in which they are stored.
            device: that computes.
            storage: "device", "memory", or a file on the disk.
        """
        self._device = device
        if isinstance(storage, Path):
            numel = math.prod(shape_NBSH)
            reserve(storage, numel * dtype.itemsize)
            self._all = torch.from_file(str(storage), shared=True, size=numel, dtype=dtype).view(shape_NBSH)
            storage.unlink()  # the mapping lives on, and nothing is left of it however the process ends
        else:
            storage_device = device if storage == "device" else torch.device("cpu")
            self._all = torch.empty(shape_NBSH, dtype=dtype, device=storage_device)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: Any) -> Any:
        return self._all[number].to(self._device, non_blocking=True)

    def __setitem__(self, number: Any, value_BSH: Any) -> None:
        self._all[number].copy_(value_BSH)

    def __delitem__(self, number: Any) -> None:
        raise TypeError("a stream has one length")

    def insert(self, index: int, value: Tensor) -> None:
        """Raise TypeError, since a stream has one length."""
        raise TypeError("a stream has one length")


def make_streams(
    shape_NBSH: tuple[int, ...], dtype: torch.dtype, device: torch.device, folder: Path, room_for_blocks: int = 0
) -> tuple[HiddenStream, HiddenStream, str]:
    """Return the dense and the pruned stream, and a text with their size and storage.

    Args:
        shape_NBSH: shape of each stream.
        dtype: dtype of both.
        device: device that computes.
        folder: folder of streams that go to the disk.
        room_for_blocks: bytes of the disk that finished blocks will take.

    Raises:
        ValueError: they fit neither into memory nor on the disk of `folder`.
    """
    needed = 2 * math.prod(shape_NBSH) * dtype.itemsize
    storage = storage_for(needed, device, folder, room_for_blocks)
    storages: list[Path | str] = ["device" if storage == "on the GPU" else "memory"] * 2
    if storage == "on the disk":
        storages = [folder / "dense.stream", folder / "pruned.stream"]
    dense, pruned = (HiddenStream(shape_NBSH, dtype, device, storage) for storage in storages)
    return dense, pruned, f"{needed / 1e9:.1f} GB {storage}"


def storage_for(needed: int, device: torch.device, folder: Path, room_for_blocks: int = 0) -> str:
    """Return where both streams go: "on the GPU", "in memory" or "on the disk".

    Args:
        needed: bytes of both.
        device: that computes.
        folder: folder of streams that go to the disk.
        room_for_blocks: bytes of the disk that finished blocks will take.

    Raises:
        ValueError: they fit neither into memory nor on the disk.
    """
    if device.type == "cuda" and needed <= SHARE * torch.cuda.mem_get_info(device)[0]:
        return "on the GPU"
    if needed <= SHARE * free_memory():
        return "in memory"
    if needed + room_for_blocks <= shutil.disk_usage(folder).free:
        return "on the disk"
    raise ValueError(
        f"{folder}: the hidden states of all sequences take {needed / 1e9:.1f} GB, which neither memory nor this "
        f"disk has{f', beside {room_for_blocks / 1e9:.1f} GB of blocks' if room_for_blocks else ''}; use fewer --tokens"
    )
