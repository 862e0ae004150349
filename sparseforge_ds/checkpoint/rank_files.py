"""The files of all ranks of one checkpoint, checked to be of one save, and mapped rather than loaded."""

from __future__ import annotations

import threading
from pathlib import Path

from torch import Tensor

from sparseforge_ds.checkpoint.folder import list_files
from sparseforge_ds.checkpoint.pt_file import PtFile
from sparseforge_ds.checkpoint.zero_partitions import RankPartitions, read_field, read_flats, read_stage

RESIDENT_BYTES = 1 << 29
"""Number of bytes read from mapped files before they are unmapped."""


class RankFiles:
    """The `.pt` files of a checkpoint folder, in rank order.

    Raises:
        ValueError: (constructor, methods) a file is missing, damaged, foreign or of another step; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        files = list_files(folder)
        self.folder = files.folder
        if (self.folder / "zero").is_dir():
            raise ValueError(
                f"{folder}: is a universal checkpoint of DeepSpeed; give the one that it was made from, which goes on "
                "at any stage and on any number of ranks as it is"
            )
        self.model = [PtFile(file) for file in files.model]
        self.optimizer = [PtFile(file) for file in files.optimizer]
        self._flats: dict[int, RankPartitions] = {}
        self._bytes_read = 0
        self._counting = threading.Lock()

    def open(self) -> None:
        """Read stage, step and number of ranks, and check that every rank has its files, all of one save."""
        first = self.model[0]
        read_field(first, dict, "module")
        self.stage = read_stage(first, self.optimizer[0] if self.optimizer else None)
        self.step: int = read_field(first, int, "global_steps")
        self.world_size: int = read_field(first, int, "dp_world_size")
        # No file of a rank is missing.
        for kind, archives, expected in (
            ("optimizer", self.optimizer, self.world_size if self.stage else 0),
            ("model", self.model, self.world_size if self.stage == 3 else 1),
        ):
            if len(archives) != expected:
                raise ValueError(
                    f"{self.folder}: has {len(archives)} {kind} files, but it was saved at stage {self.stage} by "
                    f"{self.world_size} ranks, which makes {expected}; use another checkpoint"
                )
        # All files are of one step, stage and world size.
        for archive in self.model[1:]:
            if (step := read_field(archive, int, "global_steps")) != self.step:
                raise ValueError(f"{archive.path}: is of step {step}, the file of rank 0 is of step {self.step}")
        for rank, archive in enumerate(self.optimizer):
            counts = read_field(archive, dict, "optimizer_state_dict").get("partition_count")
            for count in counts if isinstance(counts, (list, tuple)) else [counts]:
                if count != self.world_size:
                    raise ValueError(f"{archive.path}: was saved by {count} ranks, the model file by {self.world_size}")
            if read_stage(first, archive) != self.stage:
                raise ValueError(f"{archive.path}: was saved at another ZeRO stage than {self.optimizer[0].path.name}")
            if self._save_point(rank) != self._save_point(0):
                raise ValueError(
                    f"{archive.path}: was saved at another step or by another run than {self.optimizer[0].path.name}; "
                    "use another checkpoint"
                )

    def _save_point(self, rank: int) -> tuple[object, object]:
        """Return what is equal in all files of one save: every flat's step and every param group's hyperparameters."""
        flats = self.flats(rank)
        return flats.step(), [
            {k: v for k, v in group.items() if not isinstance(v, Tensor)} for group in flats.param_groups
        ]

    def state_file(self, rank: int) -> PtFile:
        """Return the file with masters and states of a rank, which at stage 0 is the model file."""
        return self.optimizer[rank] if self.stage else self.model[0]

    def flats(self, rank: int) -> RankPartitions:
        """Return the masters and states of a rank."""
        # Another thread may replace `_flats` meanwhile.
        cache = self._flats
        flats = cache.get(rank)
        if flats is None:
            flats = cache[rank] = read_flats(self.state_file(rank), self.stage)
        return flats

    def count_read(self, values: Tensor) -> None:
        """Count the bytes of values that were read; after `RESIDENT_BYTES`, unmap the files to release page cache.

        Threads in the middle of a read keep their mapping.
        """
        with self._counting:
            self._bytes_read += values.numel() * values.element_size()
            if self._bytes_read > RESIDENT_BYTES:
                self.release()

    def release(self) -> None:
        """Unmap the files; the next access opens them again."""
        self._bytes_read = 0
        self._flats = {}
        for archive in (*self.model, *self.optimizer):
            archive.release()
