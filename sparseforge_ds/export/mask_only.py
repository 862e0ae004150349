"""`mask`: only the mask, one bit a weight (the first in the lowest bit of a byte), for its dense model.

With the dense model it is a source, mask * dense with exact +0.0: the model of a run that only learned its mask. From a
run, the mask is the run's; from an exported folder it is what is not zero, and in a group with fewer than N non-zeros
the first zeros count as kept. A permutation before the run lies beside the mask, and the dense model is read in it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from typing_extensions import override

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec, hash_tensor
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.export.source import (
    HEAD,
    MASK_ON,
    Source,
    buffer_names,
    choose_dtype,
    read_model_config,
    require_finite,
)
from sparseforge_ds.export.unused import divide
from sparseforge_ds.export.writer import write_tensors
from sparseforge_ds.mask.pattern import parse_pattern
from sparseforge_ds.model.hub_access import published_name
from sparseforge_ds.model.permutation_record import Permutation
from sparseforge_ds.model.published_names import published_tensors
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.model.rotation_record import FILE as ROTATION
from sparseforge_ds.model.rotation_record import keep_rotation, rotation_of
from sparseforge_ds.model.sound_weights import require_float_weights
from sparseforge_ds.permutation.reordering import Reordering

FORMAT = 1


def write_masks(source: Source, folder: Path, workers: int | None) -> dict[str, Any]:
    """Write mask.safetensors and mask.json, and return what mask.json holds; its `proof` is null."""
    specs, rows = {}, {}
    for name, weight in source.prunable.items():
        rows[name] = {"shape": list(weight.shape), "input_axis": weight.input_axis, "sha256": ""}
        if name in source.fused_name:
            rows[name]["fused_name"] = source.fused_name[name]
        specs[name] = TensorSpec((-(-math.prod(weight.shape) // 8),), torch.uint8)

    def make(name: str) -> dict[str, Tensor]:
        packed = torch.from_numpy(np.packbits(source.read_mask(name).reshape(-1).numpy(), bitorder="little"))
        rows[name]["sha256"] = hash_tensor(packed)
        return {name: packed}

    write_tensors(folder, "mask", specs, make, workers=workers)
    record = {
        "format": FORMAT,
        "model_type": source.model_config.get("model_type"),
        **{key: source.record[key] for key in HEAD},
        "weights": rows,
        "proof": None,
    }
    write_json(folder / "mask.json", record)
    if source.permutation is not None:
        source.permutation.save(folder)
    keep_rotation(source.model_folder, folder)
    return record


class MaskFolder:
    """The masks of a folder that `write_masks` wrote."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._path = self.folder / "mask.json"
        self.content = read_json(self._path)
        if self.content.get("format") != FORMAT:
            raise ValueError(f"{self._path}: format {self.content.get('format')!r}, this version reads {FORMAT}")
        if not isinstance(self.content.get("pattern"), str) or not set(HEAD) <= set(self.content):
            raise ValueError(f"{self._path}: is damaged; export the mask again")
        self.pattern = parse_pattern(self.content["pattern"])
        self.permutation = Permutation.load(self.folder)
        self._tensors = TensorFolder(self.folder, "mask")
        self.prunable: dict[str, SparseWeight] = {}
        self.fused_name: dict[str, str] = {}
        rows = self.content.get("weights")
        if not isinstance(rows, dict) or not rows or set(rows) != set(self._tensors.specs):
            raise ValueError(f"{self._path}: does not list the weights of mask.safetensors; export the mask again")
        self._rows: dict[str, dict[str, Any]] = rows
        for name, entry in rows.items():
            named = {"name": name, **entry} if isinstance(entry, dict) else entry
            self.prunable[name] = SparseWeight.parse(named, self.pattern, str(self._path))
            if "fused_name" in entry:
                self.fused_name[name] = str(entry["fused_name"])

    def read(self, name: str) -> Tensor:
        """The mask of a weight, bool in its shape."""
        weight, packed = self.prunable[name], self._tensors.read(name)
        if hash_tensor(packed) != self._rows[name].get("sha256"):
            raise ValueError(f"{self.folder}: the mask of {name} has not the sha256 that mask.json gives; export again")
        numel = math.prod(weight.shape)
        if packed.dtype != torch.uint8 or packed.shape != (-(-numel // 8),):
            raise ValueError(f"{self.folder}: the mask of {name} is not one bit a weight; export the mask again")
        mask = torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little")).view(torch.bool)
        kept_G = self.pattern.to_groups(mask, weight.shape, weight.input_axis).sum(1)
        if bool((kept_G != self.pattern.kept).any()):
            raise ValueError(f"{self.folder}: the mask of {name} is not {self.pattern}; export the mask again")
        return mask.view(weight.shape)


class MaskedSource(Source):
    """A mask on the dense model that it was learned for, a folder of safetensors; arguments of `open_source`."""

    def __init__(self, path: str | Path, model: str | Path | None, dtype: str = "auto") -> None:
        if model is None:
            raise ValueError(f"{path}: is a mask; give the folder of the dense model that it belongs to by --model")
        self._masks = masks = MaskFolder(path)
        self.model_folder = Path(model)
        self.folder = masks.folder
        self.model_config = read_model_config(self.model_folder)
        expected, held = masks.content.get("model_type"), self.model_config.get("model_type")
        if held != expected:
            raise ValueError(f"{model}: is a {held}, the mask in {path} is of a {expected}; give its dense model")
        self._tensors = TensorFolder(self.model_folder)
        dtypes = {name: spec.dtype for name, spec in self._tensors.specs.items()}
        require_float_weights(dtypes, self.model_folder, str(model))
        self.permutation = masks.permutation
        self.check_permutation(masks.content["permutation"], masks.folder / "mask.json")
        if rotation_of(self.model_folder) != rotation_of(masks.folder):
            raise ValueError(
                f"{model}: has its vectors in another basis than the mask in {path}; give the dense model that the run "
                f"had as --model, with its {ROTATION}, if it was rotated"
            )
        self.pattern, self.prunable, self.fused_name = masks.pattern, masks.prunable, masks.fused_name
        self.branches = {}
        prefix = self._prefix()
        shapes, self.unused = divide(self._tensors.shapes, self.model_config)
        self._stored = {prefix + name: part for name, part in published_tensors(held, shapes).items()}
        for name, weight in self.prunable.items():
            found = self._stored[name].shape if name in self._stored else None
            if found != weight.shape:
                raise ValueError(
                    f"{model}: {name} is {found or 'missing'} there, the mask in {path} is for {weight.shape}; give "
                    "the dense model that it was learned for"
                )
        self._reorder = self._order_of_dense()
        chosen = None if dtype == "auto" else choose_dtype(dtype, self.model_folder, self.model_config)
        kept = set[str]() if chosen is None else buffer_names(self.model_folder)
        self.specs = {}
        for name, part in self._stored.items():
            stored = self._tensors.specs[part.of].dtype
            casts = stored.is_floating_point and name not in kept
            self.specs[name] = TensorSpec(part.shape, chosen if chosen and casts else stored)
        self.dtype = self.specs[next(iter(self.prunable))].dtype
        head = {key: masks.content[key] for key in HEAD}
        for key in ("source", "run"):
            if not isinstance(head[key], dict):
                raise ValueError(f"{masks.folder / 'mask.json'}: {key} is damaged; export the mask again")
        head["source"] = {**head["source"], MASK_ON: published_name(str(model))}
        # The rest, tokens and scores, is of the weights that the run trained, which are not these.
        head["run"] = {key: value for key, value in head["run"].items() if key == "model"}
        self.record = {"format": 1, "dtype": str(self.dtype).removeprefix("torch."), **head}

    @override
    def read(self, name: str) -> Tensor:
        part = self._stored[name]
        value = self._tensors.read_slice(part.of, part.start, part.stop).view(part.shape)
        if self._reorder is not None:
            value = self._reorder(name, value)
        value = value.to(self.specs[name].dtype)
        if name in self.prunable:
            value = masked(value, self.read_mask(name))
        require_finite(value, name, self.model_folder)
        return value

    @override
    def read_mask(self, name: str) -> Tensor:
        return self._masks.read(name)

    def _order_of_dense(self) -> Reordering | None:
        """What the channels of the dense model go through to be in the order of the mask."""
        of_dense = Permutation.load(self.model_folder)
        held = None if of_dense is None else of_dense.sha256
        if held == self.permutation_sha256:
            return None
        if self.permutation is None or of_dense is not None:
            raise ValueError(
                f"{self.model_folder}: its channels are in the order of permutation {held}, those of the mask in "
                f"{self._masks.folder} of {self.permutation_sha256}; give the dense model in the order that it was "
                "trained in"
            )
        shapes = {name: part.shape for name, part in self._stored.items()}
        config = load_config(self.model_folder, str(self.model_folder)).get_text_config()
        return Reordering(self.permutation, str(self.model_config["model_type"]), config, shapes)

    def _prefix(self) -> str:
        """What the dense folder leaves away: some models are stored without the name of their class' inner model."""
        name = next(iter(self.prunable))
        first, _, rest = name.partition(".")
        return f"{first}." if name not in self._tensors.specs and rest in self._tensors.specs else ""


def masked(dense: Tensor, mask: Tensor) -> Tensor:
    """dense where the mask is True, else +0.0; -0.0 becomes +0.0, as in every export."""
    return torch.where(mask, dense, torch.zeros((), dtype=dense.dtype)) + 0.0


def prove_masks(source: Source, folder: Path) -> dict[str, Any]:
    """Read every mask back and compare it with the source's; returns what mask.json says of it."""
    written = MaskFolder(folder)
    for name in tqdm(source.prunable, unit=" masks checked", disable=None):
        if not torch.equal(written.read(name), source.read_mask(name)):
            raise ValueError(f"{folder}: the proof failed: the mask of {name} does not unpack to the source's")
    return {"masks": "equal to the source's"}
