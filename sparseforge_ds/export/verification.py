"""Check that every group of every prunable weight of a model folder is in the pattern: the last step of every recipe.

Prunable weights are those that `sparsity.json` lists and those that the family table names, without
the ones that the run excluded. In a family without rows they are all matrices of numbered layers, along their last
axis. A group is in the pattern if at most N of its members are not zero. Every weight is read once, for its hash and
its counts.

A folder without `sparsity.json` has no hashes. So all its other tensors are checked to be finite, and transformers
builds the model of its config.json, without weights, to see that none is missing and that shapes fit. For a family of
the table, a config.json that makes no model is a fault. For other families, nothing is compared then.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.tensors import TensorSpec, hash_file, tensor_bytes
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.export.adapter import ADAPTER_CONFIG, ADAPTER_TENSORS, reject_foreign_adapter, require_adapter
from sparseforge_ds.export.counting import WeightReport, chunk_size, count_not_finite
from sparseforge_ds.export.source import config_as_loaded
from sparseforge_ds.export.stored import Size, StoredWeights, listed_weights, reads_as
from sparseforge_ds.export.workers import each
from sparseforge_ds.mask.pattern import Pattern, parse_pattern
from sparseforge_ds.model.families import FAMILIES, prunable_names
from sparseforge_ds.model.family_table import BRANCH, LOW_RANK
from sparseforge_ds.model.loading_error import describe_lost_parts
from sparseforge_ds.model.registration import build_model, load_config
from sparseforge_ds.model.rules import check_globs, matches
from sparseforge_ds.model.saved_names import Placement, saved_tensors
from sparseforge_ds.model.stored_config import config_sha256, configured_dtype, is_only_pruned, is_packed_config
from sparseforge_ds.packed_format.packed_values import Grid

_LAYER = re.compile(r"\.\d+\.")
"""Part of the name of a weight in a numbered layer."""


@dataclass(frozen=True)
class FolderReport:
    """Result of `check_folder`."""

    pattern: str
    rows: list[WeightReport]
    """Counts of each prunable weight."""
    missing: list[str]
    """Prunable weights that are missing, do not fit the pattern, or are stored in a dtype that no weight has."""
    changed: list[str]
    """Weights and files whose hash is not the one in `sparsity.json`."""
    notes: list[str] = field(default_factory=list)
    """Anything else that is wrong with the folder."""
    size: Size = Size(0, 0, 0)
    quantized: int = 0
    """Number of weights that were stored quantized, and dequantized by the compressed-tensors library."""
    unused: Sequence[str] = ()
    """Tensors that were left out, since transformers does not load them."""
    values: Grid | None = None
    """Grid of the rounded values of a packed folder; None for others."""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative rounding error of each rounded weight, measured on export; hashes show that the weight is the same."""
    exclude: Sequence[str] = ()
    """Globs of weights that were not checked, since the caller says that they are dense."""

    @property
    def violations(self) -> int:
        """Number of groups out of pattern."""
        return sum(row.violations for row in self.rows)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong with the folder."""
        faults = sum(row.violations + row.nonfinite for row in self.rows)
        return bool(self.rows) and not (faults or self.missing or self.changed or self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return totals and rows as plain JSON types."""
        totals = ("groups", "nonzeros", "violations", "negative_zeros", "nonfinite")
        result: dict[str, Any] = {"ok": self.ok, "pattern": self.pattern, "weights": len(self.rows)}
        result |= {key: sum(getattr(row, key) for row in self.rows) for key in totals}
        result["elements"] = sum(torch.Size(row.shape).numel() for row in self.rows)
        result["bytes"] = asdict(self.size)
        result |= {"quantized": self.quantized, "missing": self.missing, "changed": self.changed, "notes": self.notes}
        result |= {"unused": list(self.unused), "exclude": list(self.exclude)}
        if self.values is not None:
            result |= {"values": self.values.name, "group_size": self.values.group_size, "errors": self.errors}
        return result | {"rows": [asdict(row) for row in self.rows]}


def check_folder(
    folder: str | Path, pattern: Pattern | None = None, workers: int | None = None, exclude: Sequence[str] = ()
) -> FolderReport:
    """Check a Hugging Face folder, one weight at a time in each worker.

    Args:
        folder: of the model.
        pattern: None for that of its sparsity.json, or 2:4 if it has none.
        workers: threads.
        exclude: globs of weights that are dense, in a folder without a sparsity.json, which names them itself.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a model")
    config = read_json_object(folder / "config.json")
    with contextlib.suppress(ValueError):  # of a family that transformers does not know, names alone are checked
        config = config_as_loaded(folder, config)
    sparsity = read_json_object(folder / "sparsity.json") if (folder / "sparsity.json").is_file() else {}
    if sparsity and exclude:
        raise ValueError(
            f"--exclude {exclude[0]}: {folder} has a sparsity.json, which says what is dense; leave it out"
        )
    tensors = StoredWeights(folder, config)
    if pattern is None:
        if sparsity and not isinstance(sparsity.get("pattern"), str):
            raise ValueError(f"{folder / 'sparsity.json'}: has no pattern; give one, like --pattern 2:4")
        pattern = parse_pattern(sparsity.get("pattern", "2:4"))
    # Weights to check, and those that cannot be checked.
    shapes = {name: spec.shape for name, spec in tensors.specs.items()}
    sparse, dense, branches = listed_weights(folder, sparsity)
    listed = sparse | dense | branches
    axes, misfits = _prunable(folder, config, sparsity, shapes, pattern, exclude)
    for name in [name for name in axes if not tensors.specs[name].dtype.is_floating_point]:
        del axes[name]  # loaders cast it in silence
        misfits.append(f"{name} (stored as {tensors.specs[name].dtype}, and weights are floating point)")
    # Each of them, and each listed one, is read once.
    is_float = {name: spec.dtype.is_floating_point for name, spec in tensors.specs.items()}
    names = [name for name in tensors.specs if name in axes or name in listed or (is_float[name] and not sparsity)]
    total = sum(tensors.specs[name].nbytes for name in names)
    bar = tqdm(total=total, unit="B", unit_scale=True, disable=None)

    unsound = set[str]()

    def check(name: str) -> tuple[WeightReport | None, bool]:
        """Return the counts of a prunable weight, and True if its bytes, shape and dtype are the listed ones."""
        shape = shapes[name]
        digest = hashlib.sha256()
        entry = listed.get(name, {})
        report = WeightReport(name, shape, axes[name]) if name in axes else None
        for chunk in tensors.stream(name, chunk_size(pattern.period(shape, axes[name]) if report else 1)):
            if name in listed:
                digest.update(tensor_bytes(chunk))
            if report is not None:
                report.add(chunk, pattern)
            elif not sparsity and count_not_finite(chunk):
                unsound.add(name)
        bar.update(tensors.specs[name].nbytes)
        as_listed = name not in listed or digest.hexdigest() == entry.get("sha256")
        as_listed = as_listed and ("error" not in entry or tensors.scale_sha256(name) == entry.get("scale_sha256"))
        return report, as_listed and reads_as(tensors.specs[name], entry)

    with bar:
        results = dict(zip(names, each(check, names, workers), strict=True))
    rows = [report for name in axes if (report := results[name][0]) is not None]
    needed = dict.fromkeys([*listed, *_branches_of_config(folder, config)])
    missing = [name for name in needed if name not in tensors.specs]
    changed = [name for name, (_, as_listed) in results.items() if not as_listed]
    if sparsity:
        changed += [f"{name}, which sparsity.json does not list" for name in tensors.specs if name not in listed]
    # The weights as a whole, and the files beside them.
    notes = [] if rows else ["there is no weight to check"]
    if sparsity and any(row.negative_zeros for row in rows):
        notes.append("weights hold -0.0, which an export writes as +0.0")  # in folders of other tools -0.0 is a zero
    if unsound:
        notes.append(f"{_subject(name for name in names if name in unsound)} not finite; give a sound model")
    notes += (
        _compare_with_model(folder, config, tensors) if not sparsity else _compare_records(config, sparsity, tensors)
    )
    if "quantization_config" in config and not (tensors.packed or tensors.quantized or is_only_pruned(config)):
        notes.append("config.json has a quantization_config: other tools will misread the weights")
    try:
        reject_foreign_adapter(folder, sparsity)
    except ValueError as error:
        notes.append(str(error))
    if sparsity.get("adapter"):
        try:
            require_adapter(folder)
        except ValueError as error:
            missing.append(str(error))
        else:
            changed += _changed_files_of_adapter(folder, sparsity)
    errors = {name: entry["error"] for name, entry in sparse.items() if isinstance(entry.get("error"), float)}
    return FolderReport(
        str(pattern),
        rows,
        missing + misfits,
        changed,
        notes,
        tensors.size,
        tensors.quantized,
        tensors.unused,
        tensors.grid,
        errors,
        tuple(exclude),
    )


def _branches_of_config(folder: Path, config: dict[str, Any]) -> list[str]:
    """Return the names of the branch tensors that the config.json of a packed folder makes transformers load."""
    if not is_packed_config(config):
        return []
    settings = config["quantization_config"]
    low_rank = settings.get("low_rank") or {}
    if not isinstance(low_rank, dict):
        raise ValueError(f"{folder / 'config.json'}: low_rank {low_rank!r} is damaged; export again")
    stored = BRANCH if settings.get("low_rank_learned") else (LOW_RANK,)
    return [f"{module}.{part}" for module in low_rank for part in stored]


def _compare_with_model(folder: Path, config: dict[str, Any], tensors: StoredWeights) -> list[str]:
    """Return notes on what a folder without a sparsity.json lacks of the model of its config.json."""
    ordinary = not tensors.packed and not tensors.quantized
    lost = describe_lost_parts(tensors.specs, folder) if ordinary else None
    return [*([] if lost is None else [lost]), *_missing_of_model(folder, config, tensors.specs)]


def _compare_records(config: dict[str, Any], sparsity: dict[str, Any], tensors: StoredWeights) -> list[str]:
    """Return notes on where a config.json is not the one that `sparsity.json` was written with."""
    notes = []
    if "dtype" in sparsity and configured_dtype(config) != sparsity["dtype"]:
        notes.append("config.json gives another dtype than the weights have")
    if sparsity.get("config_sha256", config_sha256(config)) != config_sha256(config):
        notes.append("config.json is not the exported one: the weights may be those of another model")
    recorded = tuple(sparsity.get(key) for key in ("values", "group_size"))
    stored = (None, None) if tensors.grid is None else tuple(tensors.grid)
    if recorded != stored:
        notes.append(f"config.json says values and group_size {stored}, and sparsity.json {recorded}")
    return notes


def _changed_files_of_adapter(folder: Path, sparsity: dict[str, Any]) -> list[str]:
    """Return the paths of the adapter's files whose hash is not the recorded one."""
    files = (("adapter_sha256", ADAPTER_TENSORS), ("adapter_config_sha256", ADAPTER_CONFIG))
    return [str(folder / file) for key, file in files if key in sparsity and sparsity[key] != hash_file(folder / file)]


def _subject(names: Iterable[str]) -> str:
    """Return the subject of a sentence about one or several tensors, with its verb."""
    first, *others = names
    return f"{first} and {len(others)} more are" if others else f"{first} is"


def _missing_of_model(folder: Path, config: dict[str, Any], specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return notes on tensors that the model of config.json has and the files lack.

    One of several tied weights is enough. Where transformers merges stored tensors by its own conversions, one of those
    is enough, too.
    """
    from sparseforge_ds.model.loading_targets import Targets
    from sparseforge_ds.transformers_internals import get_model_conversion_mapping

    try:
        model_config = load_config(folder, str(folder))
        with torch.device("meta"):
            model = build_model(model_config)
    except ValueError as error:
        model_type = config.get("model_type")
        is_known = isinstance(model_type, str) and model_type in FAMILIES
        return [f"the model of config.json cannot be built to see what is missing: {error}"] if is_known else []
    placement = Placement(model, config.get("model_type"), {name: spec.shape for name, spec in specs.items()})
    if placement.misfit is not None:
        return [placement.misfit]
    targets = Targets(model, get_model_conversion_mapping(model))
    converted = {targets.find(name)[0] for name in specs.keys() - placement.places.keys()}
    # The files of a bare model have no head, and some classes make buffers by themselves.
    is_bare = type(model).__name__ not in (model_config.architectures or [type(model).__name__])
    inner = f"{model.base_model_prefix}."
    required = inner if is_bare else ""
    optional = model._keys_to_ignore_on_load_missing or ()
    missing = [
        name
        for name in placement.missing(converted)
        if name.startswith(required) and not any(re.search(pattern, name) for pattern in optional)
    ]
    if not missing:
        return []
    # Of a tensor that several of the files make up, name the first that is not there.
    saved = saved_tensors(config.get("model_type"), placement.shapes)
    parts = [name for name, part in saved.items() if part.memory_name in missing]
    absent = [name for name in parts if name not in specs and name.removeprefix(inner) not in specs]
    return [f"{_subject(absent or missing)} missing, which the model of config.json needs; download or save it again"]


def _prunable(
    folder: Path,
    config: dict[str, Any],
    sparsity: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    pattern: Pattern,
    exclude: Sequence[str],
) -> tuple[dict[str, int], list[str]]:
    """Return the weights to check, with the axis of their groups, and those that the pattern does not fit."""
    sparse, dense, _ = listed_weights(folder, sparsity)
    axes: dict[str, int] = {}
    candidates = {name: entry["input_axis"] for name, entry in sparse.items()}
    # The family table decides, with the globs of the run.
    if isinstance(model_type := config.get("model_type"), str) and model_type in FAMILIES:
        block = sparsity.get("config", {})
        if not isinstance(block, dict):
            raise ValueError(f"{folder / 'sparsity.json'}: config is damaged; export again")
        block = {key: block.get(key, []) for key in ("include", "exclude", "allow_dense")}
        if exclude:
            block["exclude"] = list(exclude)
        fused_name = {name: str(row["fused_name"]) for name, row in (sparse | dense).items() if "fused_name" in row}
        try:
            run_config = SparseForgeConfig.from_dict({**block, "pattern": str(pattern)})
            weights = prunable_names(model_type, shapes, run_config, fused_name)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        axes = {weight.name: weight.input_axis for weight in weights}
    elif not sparsity:
        matrices = [name for name, shape in shapes.items() if len(shape) in (2, 3) and _LAYER.search(name)]
        check_globs("exclude", exclude, matrices, shapes, lambda name: "which is no matrix of a numbered layer")
        candidates = {name: -1 for name in matrices if not matches(name, exclude)}
    # Listed weights are checked too, unless the pattern does not fit them.
    misfits = []
    for name, axis in candidates.items():
        if name in shapes and name not in axes:
            if (cause := pattern.misfit(shapes[name], axis)) is not None:
                misfits.append(f"{name} ({cause})")
            else:
                axes[name] = axis
    return axes, misfits
