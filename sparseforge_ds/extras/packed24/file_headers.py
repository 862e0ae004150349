"""Rules for the headers of a packed model's files, checked before transformers reads a weight.

transformers catches every error of a conversion and ends in a line that names no weight. So headers are checked before
it begins, and damage that only the bytes show is noted on the model and raised when it is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from safetensors import safe_open

from sparseforge_ds.model.family_table import BRANCH
from sparseforge_ds.model.loading_targets import Targets
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, values_per_element
from sparseforge_ds.packed_format.packing import (
    POSITIONS,
    packed24_axis,
    packed24_shapes,
    require_scale_shape,
    require_stored_dtypes,
)

_DAMAGED = "_damaged_packed_weights"


class Header(NamedTuple):
    """A tensor as its file announces it."""

    dtype: str
    """Dtypes by safetensors' names."""
    shape: tuple[int, ...]


def read_headers(files: Iterable[str]) -> dict[str, Header]:
    """Return the header of every tensor in safetensors files."""
    headers = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (it is no dict)
                entry = tensors.get_slice(key)
                headers[key] = Header(entry.get_dtype(), tuple(entry.get_shape()))
    return headers


def check_headers(model: Any, headers: dict[str, Header], targets: Targets, grid: Grid | None = None) -> None:
    """Reject tensors that do not fit the model's parameters.

    Args:
        model: as `from_pretrained` has built it, with dense weights on the meta device.
        headers: headers of the packed folder's files.
        targets: names of these tensors in the model.
        grid: of the model's quantization_config.

    Raises:
        ValueError: a dtype or shape is wrong, or one of values, positions and scales, or of a branch, is missing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # transformers warns of a missing tensor alone, and the branch would be memory that nobody has written.
    in_files = {targets.find(key)[0] for key in headers}
    expected_branches = {name for name in parameters if name.rpartition(".")[2] in BRANCH}
    if missing := sorted(expected_branches - in_files):
        raise ValueError(
            f"{missing[0]} is missing, and config.json names its layer in low_rank; export or download it again"
        )
    packed = {key.removesuffix(POSITIONS) for key in headers if key.endswith(POSITIONS)}
    packed = {weight for weight in packed if targets.find(weight)[0] in parameters}  # others only have such a name
    merges = {target: weight for weight in sorted(packed) if (target := targets.find(weight))[1] is not None}
    scales = {weight + SCALE for weight in packed} if grid else set()
    for key in sorted({*headers, *packed} - {weight + POSITIONS for weight in packed} - scales):
        if key not in headers:
            raise ValueError(f"{key}{POSITIONS} is there without {key}; export or download it again")
        name, pattern = target = targets.find(key)
        if name not in parameters:
            continue  # the loader reports or ignores it
        shape = headers[key].shape
        expected = tuple(parameters[name].shape)
        if grid and key not in packed and key + SCALE in headers:
            raise ValueError(f"{key}{SCALE} is there without {key}{POSITIONS}; export or download it again")

        # A weight with half its inputs, or beside packed ones that it is merged with, is packed.
        if key not in packed:
            require_stored_dtypes(key, headers[key].dtype, None)
            if target in merges or (pattern is None and shape in _packed_shapes(expected, grid)):
                raise ValueError(f"{key} is there without {key}{POSITIONS}; export or download it again")
            continue

        # A packed layer takes its sizes from its tensors: without this check the first forward pass would fail.
        positions = headers[key + POSITIONS]
        scale = headers.get(key + SCALE) if grid else None
        if grid and scale is None:
            raise ValueError(f"{key} is there without {key}{SCALE}; export or download it again")
        require_stored_dtypes(key, headers[key].dtype, positions.dtype, scale and scale.dtype, grid)
        try:
            axis = packed24_axis(shape, positions.shape, None if grid is None else grid.dtype)
            if scale is not None and grid is not None:
                require_scale_shape(shape, scale.shape, axis, grid)
        except ValueError as error:
            raise ValueError(f"{key}: {error}; export or download it again") from None
        dense = list(shape)
        dense[axis] *= 2 * values_per_element(None if grid is None else grid.dtype)
        if pattern is None and tuple(dense) != expected:
            wrong = f"packed from {tuple(dense)}, and config.json makes it {expected}"
        elif pattern is not None and shape != headers[merges[target]].shape:
            wrong = f"{shape}, and {merges[target]}, with which it is merged, {headers[merges[target]].shape}"
        else:
            continue
        raise ValueError(f"{key}: shape {wrong}; config.json and weights do not belong together")


def _packed_shapes(shape: tuple[int, ...], grid: Grid | None) -> list[tuple[int, ...]]:
    """Return the shapes that the values of a weight can have."""
    dtype = None if grid is None else grid.dtype
    return [packed24_shapes(shape, axis, dtype)[0] for axis in (-1, -2)] if len(shape) > 1 else []


def collect_damage(model: Any) -> None:
    """Make `note_damage` collect the damages of a model, until `require_sound`."""
    setattr(model, _DAMAGED, [])


def note_damage(model: Any, name: str, error: ValueError) -> None:
    """Note that a weight is damaged, or raise at once if `collect_damage` was not called for the model."""
    if (noted := getattr(model, _DAMAGED, None)) is None:
        raise ValueError(f"{name}: {error}") from None
    noted.append(f"{name}: {error}")


def require_sound(model: Any) -> None:
    """Reject a model of which damage was noted; the message names the first weight."""
    noted = getattr(model, _DAMAGED)
    delattr(model, _DAMAGED)
    if noted:
        more = f" (and {len(noted) - 1} more)" if len(noted) > 1 else ""
        raise ValueError(f"{noted[0]}{more}; export or download {model.name_or_path} again")
