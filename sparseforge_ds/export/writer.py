"""Writing of exports: into a folder with a temporary name, by several threads, and then renamed.

`write_tensors` knows the place of every tensor in the files before there is any data. So its memory does not depend on
the size of a file, unlike that of `safetensors.torch.save_file`, which takes all tensors at once.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.disk import atomic_folder, require_writable, write_json
from sparseforge_ds.checkpoint.folder import check_outside_checkpoints
from sparseforge_ds.checkpoint.tensors import DTYPE_NAMES, TensorSpec, tensor_bytes
from sparseforge_ds.export.workers import each

NO_LIMIT = 1 << 62
"""Bytes of a file that is never divided."""
_CLOCK_SKEW = 3600.0
"""Seconds by which the clocks of a file server and of this machine may differ."""


@contextmanager
def unfinished_folder(out: str | Path) -> Iterator[Path]:
    """Make a folder beside `out` that becomes `out` at the end of the block, or is removed after an error.

    A killed process leaves its folder behind; the next one that writes `out` on this machine removes it. An error that
    mentions the temporary folder is raised with the path of `out` instead.

    Raises:
        ValueError: `out` is in use or cannot be written, or the block cannot read a file.
    """
    require_free(out)
    out = Path(out).absolute()
    temporary = out.parent / f"{_prefix(out)}{os.getpid()}.tmp"
    try:
        for leftover, process in _temporary_folders(out).items():
            if not _is_written_by(process, leftover):
                shutil.rmtree(leftover)
        with atomic_folder(out, temporary) as folder:
            yield folder
    except ValueError as error:
        if str(temporary) not in str(error):
            raise
        raise ValueError(str(error).replace(str(temporary), str(out))) from None
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST) and out.exists():
            raise ValueError(f"{out}: another process has written it meanwhile; give another name") from None
        # An error of a copy names its source first, and its target too.
        paths = (getattr(error, "filename", None), getattr(error, "filename2", None))
        files = [Path(os.fsdecode(path)) for path in paths if path is not None]
        if files and not any(_is_written(file, out, temporary) for file in files):
            raise ValueError(f"{files[0]}: {getattr(error, 'strerror', error)}; nothing was written") from None
        cause = str(error).replace(str(temporary), str(out))
        raise ValueError(f"{out}: cannot be written ({cause}); nothing was left behind") from None


def _prefix(out: Path) -> str:
    """Return the beginning of the names that folders of this machine have until they are called `out`."""
    return f".{out.name}.{socket.gethostname()}."


def _temporary_folders(out: Path) -> dict[Path, int]:
    """Return the unfinished folders of this machine that are going to be called `out`, with the id of their process."""
    prefix = _prefix(out)
    folders = {
        folder: folder.name[len(prefix) : -len(".tmp")] for folder in out.parent.glob(f"{glob.escape(prefix)}*.tmp")
    }
    return {folder: int(process) for folder, process in folders.items() if process.isdecimal()}


def _is_written_by(process: int, temporary: Path) -> bool:
    """Return True if the process that began this folder may still write it.

    A process that started after the folder's last change has a reused id.
    """
    if not psutil.pid_exists(process):
        return False
    try:
        return psutil.Process(process).create_time() < temporary.stat().st_mtime + _CLOCK_SKEW
    except psutil.NoSuchProcess:  # it has just ended, or is hidden from other users
        return True
    except FileNotFoundError:
        return False


def _is_written(file: Path, out: Path, temporary: Path) -> bool:
    """Return True for a file of the folder that gets the name `out`, and for the folders that hold it."""
    return file.is_relative_to(temporary) or file == out or file in out.parents


def require_free(out: str | Path) -> None:
    """Raise ValueError unless a finished folder can get the name `out`."""
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
    require_writable(out.parent, str(out))
    for temporary, process in _temporary_folders(out).items():
        if process != os.getpid() and _is_written_by(process, temporary):
            raise ValueError(
                f"{out}: process {process} writes it at the moment; give another name, or remove {temporary} if that "
                "process is another program"
            )


def write_tensors(
    folder: Path,
    stem: str,
    specs: Mapping[str, TensorSpec],
    make: Callable[[str], Mapping[str, Tensor]],
    items: Sequence[str] | None = None,
    max_shard_bytes: int = NO_LIMIT,
    workers: int | None = None,
) -> None:
    """Write `stem.safetensors`, or numbered files and their index if there are more than `max_shard_bytes`.

    Args:
        folder: to write to.
        stem: of the files' names.
        specs: shape and dtype of every tensor, by name, in the order of the files.
        make: returns the tensors of an item by name; several threads may call it.
        items: in the order in which they are begun; by default the names of `specs`.
        max_shard_bytes: most bytes of a file.
        workers: threads.
    """
    # Every file has its header and its length before the first tensor comes.
    split = split_state_dict_into_shards_factory(
        dict(specs),
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    target: dict[str, tuple[Path, int]] = {}
    for file_name, names in split.filename_to_tensors.items():
        header, offsets = _header({name: specs[name] for name in names})
        with open(folder / file_name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + offsets[-1])
        for name, offset in zip(names, offsets[:-1], strict=True):
            target[name] = (folder / file_name, len(header) + offset)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    # Then threads write the tensors to their places.
    unwritten = set(specs)
    bar = tqdm(total=split.metadata["total_size"], unit="B", unit_scale=True, disable=None)

    def write(item: str) -> None:
        for name, tensor in make(item).items():
            assert TensorSpec(tuple(tensor.shape), tensor.dtype) == specs[name], name
            path, offset = target[name]
            _write_at(path, offset, tensor_bytes(tensor))
            unwritten.discard(name)
            bar.update(specs[name].nbytes)

    with bar:
        each(write, list(specs) if items is None else items, workers)
    assert not unwritten, unwritten


def parse_size(text: str) -> int:
    """Return the bytes in a text like '5GB', '200MB' or '1000', in powers of ten."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    unit = next((unit for unit in units if text.upper().endswith(unit)), "")
    number = text[: len(text) - len(unit)]
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*", number) or int(number) == 0:
        raise ValueError(
            f"--max_shard_size {text:.100}: write a number of bytes, or a number with KB, MB, GB or TB, like 5GB"
        )
    return int(number) * units.get(unit, 1)


def _header(specs: Mapping[str, TensorSpec]) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file, the offset behind it of each tensor, and that of their end."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets = [0]
    for name, spec in specs.items():
        offsets.append(offsets[-1] + spec.nbytes)
        entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets[-2:]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _write_at(path: Path, start: int, data: memoryview) -> None:
    written = 0
    with open(path, "r+b", buffering=0) as file:
        file.seek(start)
        while written < len(data):
            written += file.write(data[written:])
