"""The one way in which exports are written: into a folder without its final name, by several threads, then renamed.

`write_tensors` knows at which byte of which file every tensor is going to be before there is any data. So memory does
not depend on the size of a file, as with `safetensors.torch.save_file`, which wants all its tensors at once.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.disk import atomic_folder, write_json
from sparseforge_ds.checkpoint.folder import check_outside_checkpoints
from sparseforge_ds.checkpoint.tensors import DTYPE_NAMES, TensorSpec, tensor_bytes
from sparseforge_ds.export.workers import each

NO_LIMIT = 1 << 62
"""Bytes of a file that is never divided."""


@contextmanager
def unfinished_folder(out: str | Path) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` at the end of the block, or is gone after an error.

    A process that is killed leaves it behind; the next one that writes `out` on this machine removes it. Raises
    ValueError where `out` is in use, or cannot be written.
    """
    require_free(out)
    out = Path(out).absolute()
    name = f".{out.name}.{socket.gethostname()}."
    try:
        for left in out.parent.glob(f"{glob.escape(name)}*.tmp"):
            process = left.name.removeprefix(name).removesuffix(".tmp")
            if process.isdecimal() and not psutil.pid_exists(int(process)):
                shutil.rmtree(left)
        with atomic_folder(out, out.parent / f"{name}{os.getpid()}.tmp") as folder:
            yield folder
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error}); nothing was left behind") from None


def require_free(out: str | Path) -> None:
    """Raise ValueError unless `out` is a name that a finished folder can be given."""
    out = Path(out).absolute()
    check_outside_checkpoints(out)
    if out.is_symlink():
        raise ValueError(f"{out}: is a symbolic link; give the name of a new folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder; give another name")
    if out.exists() and out.samefile(Path.cwd()):
        raise ValueError(
            f"{out}: is the folder that this command runs in, which none can replace; give a name inside it"
        )
    if out.is_mount():
        raise ValueError(f"{out}: a file system is mounted there, which a folder cannot replace; give a name inside it")


def write_tensors(
    folder: Path,
    stem: str,
    specs: Mapping[str, TensorSpec],
    make: Callable[[str], Mapping[str, Tensor]],
    items: Sequence[str] | None = None,
    max_shard_bytes: int = NO_LIMIT,
    workers: int | None = None,
) -> None:
    """Write `stem.safetensors`, or numbered files and their index when there is more than `max_shard_bytes`.

    `make` gives the tensors of each of `items`, by default the names of `specs`, which are in the order of the files;
    several threads may call it.
    """
    split = split_state_dict_into_shards_factory(
        dict(specs),
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    place: dict[str, tuple[Path, int]] = {}
    for file_name, names in split.filename_to_tensors.items():
        header, at = _header({name: specs[name] for name in names})
        with open(folder / file_name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + at[-1])
        place |= {name: (folder / file_name, len(header) + start) for name, start in zip(names, at, strict=False)}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    left = set(specs)
    bar = tqdm(total=split.metadata["total_size"], unit="B", unit_scale=True, disable=None)

    def write(item: str) -> None:
        for name, tensor in make(item).items():
            assert TensorSpec(tuple(tensor.shape), tensor.dtype) == specs[name], name
            _write_at(*place[name], tensor_bytes(tensor))
            left.discard(name)
            bar.update(specs[name].nbytes)

    with bar:
        each(write, list(specs) if items is None else items, workers)
    assert not left, left


def parse_size(text: str) -> int:
    """'5GB', '200MB', '1000' -> bytes (powers of ten)."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    unit = next((unit for unit in units if text.upper().endswith(unit)), "")
    number = text[: len(text) - len(unit)]
    if not number.strip().isdigit() or int(number) == 0:
        raise ValueError(
            f"--max_shard_size {text}: write a number of bytes, or a number with KB, MB, GB or TB, like 5GB"
        )
    return int(number) * units.get(unit, 1)


def _header(specs: Mapping[str, TensorSpec]) -> tuple[bytes, list[int]]:
    """The first bytes of a safetensors file, and where behind them its tensors begin, and the last one ends."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = [0]
    for name, spec in specs.items():
        at.append(at[-1] + spec.nbytes)
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": at[-2:]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


def _write_at(path: Path, start: int, data: memoryview) -> None:
    done = 0
    with open(path, "r+b", buffering=0) as file:
        file.seek(start)
        while done < len(data):
            done += file.write(data[done:])
