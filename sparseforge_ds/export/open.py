"""Choice of the kind of `Source` for a path that a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparseforge_ds.checkpoint.tensors import unread_weight_files
from sparseforge_ds.export.folder_source import FolderSource
from sparseforge_ds.export.run_source import RunSource
from sparseforge_ds.export.source import Source


def open_source(
    path: str | Path,
    model: str | Path | None = None,
    dtype: str = "auto",
    exclude: Sequence[str] = (),
    pattern: str | None = None,
    workers: int | None = None,
) -> Source:
    """Open a run, a checkpoint or a model's folder, and check everything that an export needs.

    Args:
        path: a run's folder, one of its checkpoints, a Hugging Face folder that `consolidate` wrote or any other that
            is 2:4.
        model: folder of config.json and the tokenizer; by default the run's `model`, or the folder itself.
        dtype: one of `DTYPES`, or auto for that of config.json.
        exclude: globs of weights that are dense, in a folder without a sparsity.json.
        pattern: of the weights in such a folder; None for 2:4.
        workers: threads that read all weights of such a folder, to see that they are in the pattern.

    Raises:
        ValueError: the path is none of these, or is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(
            f"{path}: no such folder; give a run's output folder, one checkpoint in it, or a model's folder"
        )
    if is_model_folder(path):
        return FolderSource(path, model, dtype, exclude, pattern, workers)
    if exclude:
        raise ValueError(f"--exclude {exclude[0]}: {path} is a run, whose block says what is dense; leave it out")
    if pattern is not None:
        raise ValueError(f"--pattern {pattern}: {path} is a run, whose block says the pattern; leave it out")
    return RunSource(path, model, dtype)


def is_model_folder(path: Path) -> bool:
    """Return True for the folder of a model, and False for a run or a checkpoint."""
    # FolderSource says what is wrong with weights that are pickles.
    has_pickles = any(name.startswith("pytorch_model") for name in unread_weight_files(path))
    has_weights = any(path.glob("model*.safetensors*")) or has_pickles
    is_model = (path / "config.json").is_file() and has_weights
    is_checkpoint = (path / "latest").is_file()  # transformers' Trainer saves weights beside its checkpoint
    return (is_model and not is_checkpoint) or (path / "sparsity.json").is_file()
