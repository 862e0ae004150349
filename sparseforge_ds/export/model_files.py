"""What lies beside the weights of a model: config, tokenizer, licence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sparseforge_ds.export.adapter import CONFIG
from sparseforge_ds.export.source import Source

_COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken")
_WRITTEN = ("config.json", "sparsity.json", "mask.json", CONFIG)


def copy_model_files(source: Source, folder: Path, quantization_config: dict[str, Any] | None = None) -> None:
    """Everything that belongs to the model but its weights; config.json with the exported dtype."""
    copy_other_files(source.model_folder, folder)
    config = dict(source.model_config)
    config.pop("torch_dtype", None)
    config.pop("auto_map", None)  # names Python files, which are not copied
    config["dtype"] = str(source.dtype).removeprefix("torch.")
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_other_files(model_folder: Path, folder: Path) -> None:
    """Tokenizer, licence and the like: what is neither weights nor config.json, nor written by an export."""
    for file in sorted(model_folder.iterdir()):
        weights = ".safetensors" in file.name or ".bin" in file.name
        wanted = file.suffix in _COPIED or file.name.startswith("LICENSE")
        if file.is_file() and wanted and not weights and file.name not in _WRITTEN:
            shutil.copyfile(file, folder / file.name)
