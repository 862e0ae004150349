"""What an export starts from: a checkpoint with masks in it, and the config and tokenizer that belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.folder import find_run, read_json
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.config import SparseForgeConfig


@dataclass(frozen=True)
class Prunable:
    """A weight under a mask, as the checkpoint's client state lists it."""

    name: str
    shape: tuple[int, ...]
    input_axis: int


@dataclass(frozen=True)
class Source:
    """What is exported: weights, and what belongs to them."""

    checkpoint: Checkpoint
    config: SparseForgeConfig
    prunable: dict[str, Prunable]
    model_folder: Path
    model_config: dict[str, Any]
    coverage: dict[str, Any]


def open_source(path: str | Path, model_folder: str | Path | None = None) -> Source:
    """Find and check everything that an export needs, before anything is written.

    Args:
        path: a run's folder, or one of its checkpoints.
        model_folder: where config.json and the tokenizer are; by default the run's `model`.

    Raises:
        ValueError: something is missing, damaged, or does not fit together.
    """
    checkpoint = Checkpoint(path)
    checkpoint.check_bytes()
    run = find_run(path)
    state = checkpoint.client_state.get("sparseforge")
    if state is None or not isinstance(state.get("config"), dict) or not isinstance(state.get("weights"), list):
        raise ValueError(
            f"{checkpoint.folder}: was not saved by SparseForge (its client state has no config and weights); "
            'save with client_state={"sparseforge": forge.state_dict()}'
        )
    config = SparseForgeConfig.from_dict(state["config"])
    prunable = {}
    for entry in state["weights"]:
        weight = _listed(checkpoint, entry)
        if checkpoint.shapes.get(weight.name) != weight.shape:
            held = checkpoint.shapes.get(weight.name, "missing")
            raise ValueError(f"{checkpoint.folder}: {weight.name} is {held}, its client state says {weight.shape}")
        if not {"mask", "dense"} <= set(checkpoint.states(weight.name)):
            raise ValueError(
                f"{checkpoint.folder}: {weight.name} has no mask yet; export after the first optimizer step"
            )
        if (why := config.parsed_pattern.misfit(weight.shape, weight.input_axis)) is not None:
            raise ValueError(f"{checkpoint.folder}: {weight.name} cannot be {config.pattern}: {why}")
        prunable[weight.name] = weight
    if model_folder is None:
        if run is None:
            raise ValueError(f"{path}: is in no run folder; give the folder with config.json and tokenizer by --model")
        model_folder = run / "model"
    model_config = read_json(Path(model_folder) / "config.json")
    if "quantization_config" in model_config:
        raise ValueError(f"{model_folder}/config.json: has a quantization_config, which the trained weights do not fit")
    coverage = read_json(run / "sparseforge.json").get("coverage") if run else None
    return Source(checkpoint, config, prunable, Path(model_folder), model_config, coverage or {})


def _listed(checkpoint: Checkpoint, entry: object) -> Prunable:
    """One entry of the client state's list of weights."""
    if isinstance(entry, dict):
        name, shape, input_axis = entry.get("name"), entry.get("shape"), entry.get("input_axis")
        if isinstance(name, str) and isinstance(shape, (list, tuple)) and input_axis in (-1, -2):
            return Prunable(name, tuple(shape), int(input_axis))
    raise ValueError(f"{checkpoint.folder}: the client state lists a damaged weight, {entry!r}")
