"""Whatever a user points an export at, as a `Source`."""

from __future__ import annotations

from pathlib import Path

from sparseforge_ds.checkpoint.tensors import unread_weight_files
from sparseforge_ds.export.folder_source import FolderSource
from sparseforge_ds.export.run_source import RunSource
from sparseforge_ds.export.source import Source


def open_source(path: str | Path, model: str | Path | None = None, dtype: str = "auto") -> Source:
    """Find and check everything that an export needs, before anything is written.

    Args:
        path: a run's folder, one of its checkpoints, a Hugging Face folder that `consolidate` wrote or any other that
            is 2:4.
        model: where config.json and the tokenizer are; by default the run's `model`, or the folder itself.
        dtype: one of `DTYPES`, or auto: what config.json says.
    """
    path = Path(path)
    has_weights = any(path.glob("model*.safetensors*")) or "pytorch_model.bin" in unread_weight_files(
        path
    )  # the second for its error
    plain = (path / "config.json").is_file() and has_weights
    masked = (path / "latest").is_file()  # a checkpoint of transformers' Trainer, which has the weights beside it
    if (plain and not masked) or (path / "sparsity.json").is_file():
        return FolderSource(path, model, dtype)
    return RunSource(path, model, dtype)
