"""Folder of a dense model, and its copy with permuted channels."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.export.model_folder import copy_other_files
from sparseforge_ds.export.source import read_config_json
from sparseforge_ds.export.stored import open_dense_files
from sparseforge_ds.export.writer import parse_size, write_tensors
from sparseforge_ds.extras.basis.permutation.channels import check_family, dimensions
from sparseforge_ds.extras.basis.permutation.find import SearchSettings, find_permutation
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.extras.basis.permutation.reordering import Reordering
from sparseforge_ds.model.families import PrunableWeight, prunable_names
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.model.saved_names import saved_tensors


class DenseFolder:
    """Weights of a dense model in files, with their channels in the original order.

    Raises:
        ValueError: the folder cannot be read, stores a weight as no float, is sparse or permuted already, or has an
            adapter.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        stored_config = read_config_json(self.folder)
        self.model_type = str(stored_config.get("model_type"))
        check_family(self.model_type)
        self.tensors, self.specs, self.unused = open_dense_files(self.folder, stored_config, allow_permuted=False)
        """Specs of the model's tensors, and names of tensors that transformers does not load; those are not copied."""
        self.config = load_config(self.folder, str(folder)).get_text_config()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's tensors."""
        return {name: spec.shape for name, spec in self.specs.items()}

    def require_channels(self) -> None:
        """Raise ValueError for a tensor whose channels are not known, before a search."""
        dimensions(self.model_type, self.config, self.shapes, "all")

    def weights(self, config: SparseForgeConfig, shapes: dict[str, tuple[int, ...]]) -> list[PrunableWeight]:
        """Return the weights that `config` prunes, under their names in the files.

        Args:
            config: the block.
            shapes: shapes of the model in memory, to whose names the block's globs refer.
        """
        # A file name may lack the prefix of the model in memory.
        names = {name: part.memory_name for name, part in saved_tensors(self.model_type, shapes).items()}
        names |= {name.partition(".")[2]: in_memory for name, in_memory in names.items()}
        renamed = {name: in_memory for name, in_memory in names.items() if name in self.specs and name != in_memory}
        return prunable_names(self.model_type, self.shapes, config, renamed)

    def find(
        self,
        config: SparseForgeConfig,
        settings: SearchSettings,
        shapes: dict[str, tuple[int, ...]],
        device: torch.device | str = "cpu",
    ) -> Permutation:
        """Find the permutation by magnitude; arguments are those of `weights` and `find_permutation`."""
        return find_permutation(
            self.tensors.read,
            self.shapes,
            self.weights(config, shapes),
            self.model_type,
            self.config,
            settings,
            device=device,
        )

    def write(
        self,
        permutation: Permutation,
        folder: Path,
        max_shard_size: str = "5GB",
        workers: int | None = None,
    ) -> None:
        """Write the model with permuted channels, one tensor at a time, and the permutation's record beside it."""
        reorder = Reordering(permutation, self.model_type, self.config, self.shapes)

        def make(name: str) -> dict[str, Tensor]:
            return {name: reorder(name, self.tensors.read(name))}

        write_tensors(
            folder,
            "model",
            self.specs,
            make,
            max_shard_bytes=parse_size(max_shard_size),
            workers=workers,
        )
        copy_other_files(self.folder, folder)
        shutil.copyfile(self.folder / "config.json", folder / "config.json")
        permutation.save(folder)
