"""A Hugging Face folder of safetensors, laid out before there is any data, and read one tensor at a time.

`lay_out` says at which byte of which file every tensor is going to be. So tensors can be written in any order and by
several threads, and memory does not depend on the size of a file. (`safetensors.torch.save_file` wants all tensors of a
file at once.) Reading takes the bytes of one tensor into memory of its own; nothing stays mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparseforge_ds.checkpoint.folder import read_json

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor will be, before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """One safetensors file: its first bytes, and where its tensors begin."""

    name: str
    header: bytes
    offsets: dict[str, int]
    """Byte in the file at which each tensor begins."""
    size: int
    """Bytes of the whole file."""


def lay_out(stem: str, specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[FileLayout]:
    """`stem.safetensors`, or numbered files when there is more than `max_shard_bytes`; tensors in the given order."""
    shards = _split(specs, max_shard_bytes)
    count = len(shards)
    files = []
    for number, names in enumerate(shards, 1):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for name in names:
            spec = specs[name]
            offsets[name], end = end, end + spec.nbytes
            where = [offsets[name], end]
            header[name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": where}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        name = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors"
        files.append(FileLayout(name, head, {key: len(head) + at for key, at in offsets.items()}, len(head) + end))
    return files


def write_index(folder: Path, stem: str, specs: Mapping[str, TensorSpec], files: list[FileLayout]) -> None:
    """The index of several files; a single file has none."""
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
        "weight_map": {name: file.name for file in files for name in file.offsets},
    }
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_tensors(
    folder: Path,
    stem: str,
    specs: Mapping[str, TensorSpec],
    tensors: Iterator[tuple[str, Tensor]],
    max_shard_bytes: int,
) -> dict[str, str]:
    """Write the files of `lay_out` and their index, one tensor after the other.

    Args:
        specs: every tensor by name, in the order in which `tensors` yields them.
        tensors: name and value; values are checked against `specs`.

    Returns:
        sha256 of the bytes of each tensor, by name.
    """
    files = lay_out(stem, specs, max_shard_bytes)
    hashes: dict[str, str] = {}
    for file in files:
        with open(folder / file.name, "wb") as out:
            out.write(file.header)
            for expected in file.offsets:
                name, tensor = next(tensors)
                assert name == expected and TensorSpec(tuple(tensor.shape), tensor.dtype) == specs[name]
                data = tensor_bytes(tensor)
                hashes[name] = hashlib.sha256(data).hexdigest()
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
    write_index(folder, stem, specs, files)
    return hashes


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they are in a file; no copy where it is contiguous."""
    view: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def hash_tensor(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def hash_file(path: Path, start: int = 0, stop: int | None = None) -> str:
    """sha256 of the bytes start..stop of a file, by default of all.

    Raises:
        ValueError: the file cannot be read, or ends before.
    """
    digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with _opened(path) as file:
        stop = os.fstat(file.fileno()).st_size if stop is None else stop
        file.seek(start)
        for at in range(start, stop, len(block)):
            part = block[: stop - at]
            _fill(file, part)
            digest.update(part)
    return digest.hexdigest()


def read_at(path: Path, start: int, data: memoryview) -> None:
    """Fill `data` from byte `start` of a file on.

    Raises:
        ValueError: the file cannot be read, or ends before.
    """
    with _opened(path) as file:
        file.seek(start)
        _fill(file, data)


@contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    try:
        with FileIO(path) as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _fill(file: FileIO, data: memoryview) -> None:
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            raise ValueError(f"{file.name}: became shorter while it was read")
        done += count


def write_at(path: Path, start: int, data: memoryview) -> None:
    """Write `data` into an existing file, from byte `start` on."""
    done = 0
    with open(path, "r+b", buffering=0) as file:
        file.seek(start)
        while done < len(data):
            done += file.write(data[done:])


class TensorFolder:
    """The tensors of a Hugging Face folder (`model.safetensors`, or files with an index). Several threads may read.

    Raises:
        ValueError: there are none, a file is missing or damaged, or a tensor is not where the index says.
    """

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self.folder = Path(folder)
        index = self.folder / f"{stem}.safetensors.index.json"
        single = self.folder / f"{stem}.safetensors"
        held: dict[str, dict[str, tuple[TensorSpec, int]]] = {}
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ValueError(f"{index}: has no weight_map")
            for file in sorted(set(files.values())):
                if Path(file).name != file:
                    raise ValueError(f"{index}: refers to {file!r}, outside of its folder")
                held[file] = self._header(self.folder / file)
        elif single.is_file():
            held[single.name] = self._header(single)
            files = dict.fromkeys(held[single.name], single.name)
        else:
            raise ValueError(f"{self.folder}: no {single.name} and no {index.name} in it; give an exported model")
        self.files: dict[str, str] = files
        """File of every tensor."""
        self.specs: dict[str, TensorSpec] = {}
        """Shape and dtype of every tensor, in the order of the files."""
        self._start: dict[str, int] = {}
        for name, file in files.items():
            if name not in held[file]:
                raise ValueError(f"{self.folder / file}: does not hold {name}, which {index.name} promises")
            self.specs[name], self._start[name] = held[file][name]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: spec.shape for name, spec in self.specs.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        spec = self._spec(name)
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        read_at(self.folder / self.files[name], self._start[name], tensor_bytes(tensor))
        return tensor

    def read_run(self, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,) elements of a flat tensor, in memory of their own; no other bytes are read."""
        dtype = self._spec(name).dtype
        run = torch.empty(stop - start, dtype=dtype)
        read_at(self.folder / self.files[name], self._start[name] + start * dtype.itemsize, tensor_bytes(run))
        return run

    def stream(self, name: str, elements: int) -> Iterator[Tensor]:
        """One tensor as runs of `elements`, (n,) each, all in the same memory: one is used up when the next comes."""
        spec = self._spec(name)
        numel = torch.Size(spec.shape).numel()
        run = torch.empty(min(elements, numel), dtype=spec.dtype)
        with _opened(self.folder / self.files[name]) as file:
            file.seek(self._start[name])
            for start in range(0, numel, elements):
                part = run[: numel - start]
                _fill(file, tensor_bytes(part))
                yield part

    def _spec(self, name: str) -> TensorSpec:
        if name not in self.specs:
            raise ValueError(f"{self.folder}: holds no tensor {name!r}")
        return self.specs[name]

    def _header(self, path: Path) -> dict[str, tuple[TensorSpec, int]]:
        """Spec and first byte of every tensor of a file. The safetensors library judges whether it is one."""
        try:
            if path.exists() and not path.is_file():
                raise OSError("it is not a file")  # a pipe or a device might never end
            with safe_open(path, framework="pt"), open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: not a readable safetensors file ({str(error)[:200]})") from None
        header.pop("__metadata__", None)
        held = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            if entry["dtype"] not in _DTYPES:
                raise ValueError(
                    f"{path}: {name} is stored as {entry['dtype']}, which is not known here; known are "
                    f"{', '.join(_DTYPES)}"
                )
            spec = TensorSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            held[name] = (spec, 8 + length + entry["data_offsets"][0])
        return held


def parse_size(text: str) -> int:
    """'5GB', '200MB', '1000' -> bytes (powers of ten).

    Raises:
        ValueError: something else.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    unit = next((unit for unit in units if text.upper().endswith(unit)), "")
    number = text[: len(text) - len(unit)]
    if not number.strip().isdigit() or int(number) == 0:
        raise ValueError(f"size {text!r}: write a number of bytes, or a number with KB, MB, GB or TB, like 5GB")
    return int(number) * units.get(unit, 1)


def _split(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    return shards
