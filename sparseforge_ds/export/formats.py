"""Export of a source in one of the formats: written under a temporary name, proved, and renamed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.export.compressed_tensors import WRITTEN_BITS, require_library
from sparseforge_ds.export.model_card import write_card
from sparseforge_ds.export.model_folder import Format, write_model
from sparseforge_ds.export.proof import prove_folder, require_provable
from sparseforge_ds.export.source import Source, recorded_config
from sparseforge_ds.export.workers import require_workers
from sparseforge_ds.export.writer import parse_size, unfinished_folder
from sparseforge_ds.mask.pattern import NM, parse_pattern, require_removing
from sparseforge_ds.packed_format.packed_values import GRIDS, GROUP_UNIT, Grid


def export(
    source: Source,
    out: str | Path,
    format: Format = "hf",
    max_shard_size: str = "5GB",
    workers: int | None = None,
    skip_proof: bool = False,
    grid: Grid | None = None,
    compare: Callable[[Source, Path], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write `out`, and prove it before it gets its name.

    Args:
        source: of the weights.
        out: folder to write; must not exist or be empty.
        format: of the folder.
        max_shard_size: most bytes of a file, such as "5GB".
        workers: threads.
        skip_proof: True for a machine that has no memory for the model.
        grid: to round the values of `packed24` to; a run that was trained in up to 4 bits has a group size of its
            own. None to keep them.
        compare: measures the folder that was written against the source; its result goes into `sparsity.json`. Where it
            fails, the folder stays, since it is whole, and then the failure is raised.

    Returns:
        The content of `sparsity.json`; its `proof` is None after `skip_proof`.

    Raises:
        ValueError: the source has no such export, `out` is in use, the machine cannot do the proof, or the proof fails.
            Nothing is left behind, except where `compare` alone failed.
    """
    check_flags(format, grid, max_shard_size, workers)
    packed = format == "packed24"
    if packed and source.pattern != NM(2, 4):
        raise ValueError(f"the packed24 format holds 2:4, the pattern here is {source.pattern}; use --format hf")
    grid = None if grid is None else choose_grid(source, format, grid)
    if format == "compressed-tensors":
        require_codes(source)
    if not skip_proof:
        require_provable(source, packed)
    shard_bytes = parse_size(max_shard_size)
    # The folder gets its name at the end of the block.
    with unfinished_folder(out) as folder:
        source.check_bytes(workers)
        record = write_model(source, folder, format, shard_bytes, workers, grid)
        record["proof"] = None if skip_proof else prove_folder(source, folder, plain=not packed, grid=grid)
        failure = None if compare is None else _add_comparison(record, compare, source, folder)
        write_json(folder / "sparsity.json", record)
        write_card(folder)
    if failure is not None:
        raise ValueError(
            f"{out} is written{'' if skip_proof else ' and proved'}, and stays; but what rounding costs could not be "
            f"measured: {failure}; measure it by sparseforge evaluate {shlex.quote(str(out))} --dense DENSE --text TEXT"
        )
    return record


def check_flags(
    format: str,
    grid: Grid | None = None,
    max_shard_size: str = "5GB",
    workers: int | None = None,
    pattern: str | None = None,
) -> None:
    """Reject flags of an export that no source has a use for: all weights of some sources are read to open them.

    Args:
        format: value of `--format`.
        grid: values of `--values` and `--group_size`; None without.
        max_shard_size: value of `--max_shard_size`.
        workers: value of `--workers`; None for the default.
        pattern: value of `--pattern`; None if it is not given.

    Raises:
        ValueError: the message names the flag.
    """
    if format not in get_args(Format):
        raise ValueError(f"--format {format!r}: use one of {', '.join(get_args(Format))}")
    parse_size(max_shard_size)
    require_workers(workers)
    if pattern is not None and require_removing(parse_pattern(pattern)) != NM(2, 4) and format == "packed24":
        raise ValueError(f"--pattern {pattern}: the packed24 format holds 2:4; use --format hf")
    if grid is None:
        return
    values, group_size = grid
    if values not in GRIDS:
        raise ValueError(f"--values {values}: use one of {', '.join(GRIDS)}")
    if format != "packed24":
        raise ValueError(f"--values {values}: the {format} format stores no rounded values; give --format packed24")
    if group_size is None:
        return
    if values != "int4":
        raise ValueError(f"--group_size {group_size}: {values} has one scale a row; leave it out")
    if group_size < 1 or group_size % GROUP_UNIT:
        raise ValueError(
            f"--group_size {group_size}: packed24 stores scales of a multiple of {GROUP_UNIT} kept values, or of a "
            "row; give another, or leave it out"
        )


def _add_comparison(
    record: dict[str, Any], compare: Callable[[Source, Path], dict[str, Any]], source: Source, folder: Path
) -> str | None:
    """Add the result of `compare` to a record, or return what stopped it: two models may not fit where one did."""
    try:
        record["compared"] = compare(source, folder)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:  # a lack of memory is a RuntimeError of torch
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return reason.replace(str(folder), "the folder")[:200]
    return None


def choose_grid(source: Source, format: str, grid: Grid) -> Grid:
    """Return the grid of an export with `--values`; a run that was trained in up to 4 bits has its own.

    Raises:
        ValueError: there is nothing to round, or it was rounded before; the message names the flag.
    """
    check_flags(format, grid)
    values, group_size = grid
    where = f"--values {values}"
    if source.grid is not None:
        raise ValueError(
            f"{where}: the values of {source.folder} are {source.grid.name} already, and would be rounded twice; "
            "export from what it was made of, or copy the folder"
        )
    # A run's codes and scales are stored as they are; those of its dequantized export cannot be found again.
    trained = source.quantize
    recorded = recorded_config(source.folder, source.record.get("config"))
    settings = recorded.quantize if recorded and recorded.is_quantized(source.record["step"], hard=True) else None
    if trained is None and settings is not None:
        raise ValueError(
            f"{where}: the weights of {source.folder} were trained in {settings.bits} bits, and would be "
            "rounded again; give the run that it was exported from"
        )
    if trained is not None and (values != "int4" or trained.bits > 4):
        raise ValueError(
            f"{where}: the weights of {source.folder} were trained in {trained.bits} bits, and would be rounded twice; "
            f"{'give int4' if trained.bits <= 4 else 'leave it out'}"
        )
    if trained is not None and group_size not in (None, trained.group_size):
        own = "one scale a row" if trained.group_size is None else f"groups of {trained.group_size}"
        raise ValueError(f"--group_size {group_size}: the run was trained with {own}; leave it out")
    # Kernels take groups of some sizes alone, and every weight must divide into them.
    grid = Grid(values, trained.group_size if trained is not None else group_size)
    if grid.group_size is not None and grid.group_size % GROUP_UNIT:
        raise ValueError(
            f"{source.folder}: was trained in groups of {grid.group_size}, and packed24 stores scales of a multiple of "
            f"{GROUP_UNIT} kept values, or of a row; give --format compressed-tensors"
        )
    for name, weight in source.prunable.items():
        kept_count = weight.shape[weight.input_axis] // 2
        if grid.group_size is not None and kept_count % grid.group_size:
            raise ValueError(
                f"--group_size {grid.group_size}: does not divide the {kept_count} kept inputs of {name}; give another"
            )
    return grid


def without_codes(source: str) -> ValueError:
    """Return the error about a source, a path, that has no codes for `compressed-tensors`."""
    return ValueError(
        f"{source}: has no quantized weights, and --format compressed-tensors stores no others; train it with "
        '"quantize" in the sparseforge block and give its run, or quantize an hf export by llm-compressor'
    )


def require_codes(source: Source) -> None:
    """Reject a source that has no codes for `compressed-tensors`, or weights that its linear layers cannot hold.

    Raises:
        ValueError: the message names what is in the way.
    """
    # Codes must be those of the run: this format rounds nothing.
    where = str(source.folder)
    if source.quantize is None:
        raise without_codes(where)
    if source.quantize.bits not in WRITTEN_BITS:
        raise ValueError(
            f"{where}: has weights of {source.quantize.bits} bits, and --format compressed-tensors stores 4 or 8; "
            "give --format hf"
        )
    # The format knows weights of linear layers, and nothing beside them.
    for name, weight in source.prunable.items():
        if weight.input_axis != -1 or len(weight.shape) != 2 or not name.endswith(".weight") or source.fused_name:
            raise ValueError(
                f"{where}: {name} is no weight of a linear layer, and --format compressed-tensors quantizes no others; "
                "give --format hf"
            )
    if source.branches:
        raise ValueError(
            f"{where}: has low-rank branches, which --format compressed-tensors cannot store; give --format hf"
        )
    require_library("--format compressed-tensors", "the library that reads it back")
