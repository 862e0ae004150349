"""Model folders that bring code of their own, which must not run: every piece of it leaves a file behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch

YES = "y\n" * 1000
"""Input with the answer "y" to every question."""

_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class PlantedConfig(LlamaConfig):
    model_type = "planted"
class PlantedModel(LlamaForCausalLM):
    config_class = PlantedConfig
class PlantedTokenizer(PreTrainedTokenizerFast):
    pass
def generate(model, *args, **kwargs):
    return None
"""


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def plant_model(folder: Path, dense: Path) -> Path:
    """Copy `dense` so that it would run its own config and model; return the file that exists once it has."""
    mark = folder.with_name(f"{folder.name}.ran")
    shutil.copytree(dense, folder)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "planted.PlantedConfig", "AutoModelForCausalLM": "planted.PlantedModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "planted", "auto_map": auto_map}))
    (folder / "planted.py").write_text(_CODE.format(mark=str(mark)))
    return mark


def plant_tokenizer(folder: Path, dense: Path) -> Path:
    """Copy `dense` without a config, so that its tokenizer would run its own class."""
    mark = folder.with_name(f"{folder.name}.ran")
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("config.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": ["planted.PlantedTokenizer", "planted.PlantedTokenizer"]}
    config |= {"tokenizer_class": "PlantedTokenizer", "auto_map": auto_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "planted.py").write_text(_CODE.format(mark=str(mark)))
    return mark


def plant_generate(folder: Path, dense: Path) -> Path:
    """Copy `dense` so that it would generate by a function of its own."""
    mark = folder.with_name(f"{folder.name}.ran")
    shutil.copytree(dense, folder)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(_CODE.format(mark=str(mark)))
    return mark


def plant_pickle(folder: Path, dense: Path) -> Path:
    """Copy `dense` with weights in a pickle that would make a folder."""
    mark = folder.with_name(f"{folder.name}.ran")
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"model.norm.weight": Touch(mark)}, folder / "pytorch_model.bin")
    return mark
