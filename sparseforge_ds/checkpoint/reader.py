"""Full weights and optimizer states out of a checkpoint, one at a time, without engine or process group.

    checkpoint = Checkpoint("runs/qwen3")
    for name in checkpoint.shapes:
        weight = checkpoint.weight(name)                     # the fp32 master, full shape
        if "mask" in checkpoint.states(name):
            mask = checkpoint.state(name, "mask")

The files are DeepSpeed's (`deepspeed_files.py`): ZeRO stages 0 to 3, any world size. Any number of threads may read at
once.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.contents import Number
from sparseforge_ds.checkpoint.deepspeed_files import DeepSpeedFiles
from sparseforge_ds.checkpoint.folder import find_checkpoint
from sparseforge_ds.checkpoint.manifest import NAME as MANIFEST
from sparseforge_ds.checkpoint.manifest import Manifest


class Checkpoint:
    """A checkpoint folder that can be asked for any weight, or for any run of its elements.

    Args:
        path: a run's folder, its `checkpoints` folder (both mean the newest complete checkpoint), or one checkpoint.

    Raises:
        ValueError: (constructor, methods) a file is missing, damaged, foreign or of another step; the message names it.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = find_checkpoint(path)
        if (self.folder / MANIFEST).exists():
            Manifest.read(self.folder).check_shards()
        self._files = DeepSpeedFiles(self.folder)
        self.contents = contents = self._files.contents
        """All that is known of it besides the elements."""
        self.stage = contents.stage
        """The ZeRO stage of the run that saved it."""
        self.step = contents.step
        """Steps as DeepSpeed counts them, skipped ones included."""
        self.world_size = contents.world_size
        """Ranks of the run that saved it."""
        self.client_state = contents.client_state
        """What our own save put beside the weights."""
        self.aliases = contents.aliases
        """Tied weights: name without data -> name that holds it."""
        self.buffers = contents.buffers
        """Names that are persistent buffers of the module, not parameters."""
        self.shapes = {name: entry.shape for name, entry in contents.entries.items()}
        """Full shape of everything that `weight` returns, in the module's order."""

    def states(self, name: str) -> tuple[str, ...]:
        """Names of the per-element optimizer states of a weight, such as dense, exp_avg, mask."""
        entry = self.contents.entries.get(name)
        return () if entry is None else tuple(sorted(entry.states))

    def scalars(self, name: str) -> dict[str, Number]:
        """The optimizer states of a weight that are one number, such as step."""
        entry = self.contents.entries.get(name)
        return {} if entry is None else dict(entry.scalars)

    def state(self, name: str, key: str) -> Tensor:
        """A per-element optimizer state in the weight's full shape, in the dtype in which it was saved."""
        self._check(name, key)
        return self._files.read(name, key, 0, self.contents.entries[name].numel).view(self.shapes[name])

    def weight(self, name: str) -> Tensor:
        """The fp32 master, or what the module holds where the optimizer has no master (frozen weights, buffers).

        Returns:
            A tensor of its own, of `shapes[name]`.
        """
        self._check(name, None)
        return self._files.read(name, None, 0, self.contents.entries[name].numel).view(self.shapes[name])

    def slice(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """Elements start..stop of a flat weight (`key` None: what `weight` returns) or of one of its states.

        Returns:
            (stop - start,) in memory of its own; only the bytes of these elements are read.
        """
        self._check(name, key)
        if not 0 <= start <= stop <= self.contents.entries[name].numel:
            raise ValueError(
                f"{self.folder}: {name} has {self.contents.entries[name].numel} elements, not {start}..{stop}"
            )
        return self._files.read(name, key, start, stop)

    def trained_dtype(self, name: str) -> torch.dtype:
        """The dtype that the network computed with."""
        self._check(name, None)
        return self.contents.entries[name].trained_dtype

    def check_bytes(self, part: int = 0, parts: int = 1) -> None:
        """Compare the checksums of all bytes, which reads them whole.

        Args:
            part: which share of the work, of `parts` that together are all of it: one rank each.
        """
        self._files.check_bytes(part, parts)

    def _check(self, name: str, key: str | None) -> None:
        if name not in self.shapes:
            raise ValueError(f"{self.folder}: holds no weight {name!r}")
        if key is not None and key not in self.contents.entries[name].states:
            held = ", ".join(self.states(name)) or "no state"
            raise ValueError(f"{self.folder}: {name} has no optimizer state {key!r}, it has {held}")
