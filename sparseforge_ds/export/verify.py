"""Is every group of every prunable weight of an exported model in its pattern? The last line of every recipe.

    python -m sparseforge_ds.export.verify OUT

Reads the safetensors of a Hugging Face folder and nothing else: no model is built. Prunable weights are those that
`sparsity.json` lists and those that the family table names (without what the run excluded). A group is in order when
at most N of its members are not zero. Also reported: -0.0, values that are not finite, missing weights, bytes that are
not the exported ones, and a quantization_config, which makes other tools misread the folder.

Exit code 0: all in order; 1: a violation; 2: the folder cannot be read.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.checkpoint.tensors import TensorFolder, hash_tensor
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.pattern import Pattern, parse_pattern
from sparseforge_ds.model.families import FAMILIES, PrunableWeight, prunable_names


@dataclass(frozen=True)
class WeightReport:
    """What was found in one weight."""

    name: str
    shape: tuple[int, ...]
    groups: int
    nonzeros: int
    violations: int
    """Groups with more than N members that are not zero."""
    negative_zeros: int
    nonfinite: int


@dataclass(frozen=True)
class FolderReport:
    """What was found in a folder."""

    pattern: str
    rows: list[WeightReport]
    missing: list[str]
    """Prunable weights that are not there or do not fit the pattern."""
    changed: list[str]
    """Weights whose bytes are not those that `sparsity.json` gives the hash of."""
    notes: list[str] = field(default_factory=list)
    """Anything else that is wrong with the folder."""

    @property
    def violations(self) -> int:
        """Groups out of pattern."""
        return sum(row.violations for row in self.rows)

    @property
    def ok(self) -> bool:
        """Nothing wrong at all."""
        odd = sum(row.violations + row.negative_zeros + row.nonfinite for row in self.rows)
        return bool(self.rows) and not (odd or self.missing or self.changed or self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Totals and rows as plain JSON types."""
        totals = ("groups", "nonzeros", "violations", "negative_zeros", "nonfinite")
        result: dict[str, Any] = {"ok": self.ok, "pattern": self.pattern, "weights": len(self.rows)}
        result |= {key: sum(getattr(row, key) for row in self.rows) for key in totals}
        result["elements"] = sum(torch.Size(row.shape).numel() for row in self.rows)
        result |= {"missing": self.missing, "changed": self.changed, "notes": self.notes}
        return result | {"rows": [asdict(row) for row in self.rows]}


def check_weight(weight: Tensor, name: str, pattern: Pattern, input_axis: int) -> WeightReport:
    """Count groups, non-zeros and what is wrong in one weight of the full shape."""
    shape = tuple(weight.shape)
    group_GM = pattern.to_groups(weight.reshape(-1), shape, input_axis)
    nonzero_G = torch.count_nonzero(group_GM, dim=1)
    finite = bool(torch.isfinite(weight.sum(dtype=torch.float32)))  # a single pass; only if it is not, count
    return WeightReport(
        name=name,
        shape=shape,
        groups=group_GM.shape[0],
        nonzeros=int(nonzero_G.sum()),
        violations=int((nonzero_G > pattern.kept).sum()),
        negative_zeros=int(((weight == 0) & torch.signbit(weight)).sum()),
        nonfinite=0 if finite else int((~torch.isfinite(weight)).sum()),
    )


def check_folder(folder: str | Path, pattern: Pattern | None = None, progress: bool = False) -> FolderReport:
    """Check a Hugging Face folder, one weight at a time.

    Args:
        pattern: by default the one in `sparsity.json`.

    Raises:
        ValueError: the folder cannot be read, or nothing says what its pattern or its prunable weights are.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give an exported model")
    config = read_json(folder / "config.json")
    sparsity = read_json(folder / "sparsity.json") if (folder / "sparsity.json").is_file() else {}
    tensors = TensorFolder(folder)
    if pattern is None:
        if not isinstance(sparsity.get("pattern"), str):
            raise ValueError(f"{folder}: has no sparsity.json with a pattern; give one, like --pattern 2:4")
        pattern = parse_pattern(sparsity["pattern"])
    weights, misfits = _prunable(folder, config, sparsity, tensors.shapes, pattern)
    rows = []
    for weight in tqdm(weights, unit=" weights", disable=not progress, file=sys.stderr):
        rows.append(check_weight(tensors.read(weight.name), weight.name, pattern, weight.input_axis))
    listed = {**_section(folder, sparsity, "weights"), **_section(folder, sparsity, "dense")}
    missing = [name for name in listed if name not in tensors.shapes]
    changed = [
        name
        for name, entry in listed.items()
        if name in tensors.shapes and entry.get("sha256") != hash_tensor(tensors.read(name))
    ]
    notes = []
    if "quantization_config" in config:
        notes.append("config.json has a quantization_config: other tools will misread the weights")
    return FolderReport(str(pattern), rows, missing + misfits, changed, notes)


def _prunable(
    folder: Path,
    config: dict[str, Any],
    sparsity: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    pattern: Pattern,
) -> tuple[list[PrunableWeight], list[str]]:
    """The weights to check, and those that the pattern does not fit."""
    found: dict[str, PrunableWeight] = {}
    if config.get("model_type") in FAMILIES:
        block = sparsity.get("config", {})
        if not isinstance(block, dict):
            raise ValueError(f"{folder / 'sparsity.json'}: config is damaged; export again")
        chosen = SparseForgeConfig(
            pattern=str(pattern), include=tuple(block.get("include", ())), exclude=tuple(block.get("exclude", ()))
        )
        found = {weight.name: weight for weight in prunable_names(config["model_type"], shapes, chosen)}
    elif not sparsity:
        raise ValueError(f"{folder}: family {config.get('model_type')!r} is not known and there is no sparsity.json")
    misfits = []
    for name, entry in _section(folder, sparsity, "weights").items():
        if name not in shapes or name in found:
            continue
        weight = PrunableWeight(name, shapes[name], entry["input_axis"], name.rpartition(".")[0])
        if (why := pattern.misfit(weight.shape, weight.input_axis)) is not None:
            misfits.append(f"{name} ({why})")
        else:
            found[name] = weight
    return list(found.values()), misfits


def _section(folder: Path, sparsity: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    section: dict[str, dict[str, Any]] = sparsity.get(key, {})
    whole = isinstance(section, dict) and all(isinstance(entry, dict) for entry in section.values())
    if not whole or (key == "weights" and any(entry.get("input_axis") not in (-1, -2) for entry in section.values())):
        raise ValueError(f"{folder / 'sparsity.json'}: {key} is damaged; export again")
    return section
