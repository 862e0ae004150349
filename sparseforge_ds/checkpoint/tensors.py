"""The tensors of a Hugging Face folder of safetensors, read one at a time; no file stays mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparseforge_ds.checkpoint.folder import read_json

DTYPE_NAMES = {
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
"""How safetensors calls the dtypes."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor will be, before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they are in a file; no copy where it is contiguous."""
    view: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def hash_tensor(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file.

    Raises:
        ValueError: it cannot be read.
    """
    digest = hashlib.sha256()
    with _opened(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read_at(path: Path, start: int, data: memoryview) -> None:
    """Fill `data` from byte `start` of a file on."""
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
        _read_at(self.folder / self.files[name], self._start[name], tensor_bytes(tensor))
        return tensor

    def read_slice(self, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,) elements of a flat tensor, in memory of their own; no other bytes are read."""
        dtype = self._spec(name).dtype
        part = torch.empty(stop - start, dtype=dtype)
        _read_at(self.folder / self.files[name], self._start[name] + start * dtype.itemsize, tensor_bytes(part))
        return part

    def stream(self, name: str, elements: int) -> Iterator[Tensor]:
        """One tensor as chunks of `elements`, (n,) each, all in the same memory: one is used up when the next comes."""
        spec = self._spec(name)
        numel = torch.Size(spec.shape).numel()
        buffer = torch.empty(min(elements, numel), dtype=spec.dtype)
        with _opened(self.folder / self.files[name]) as file:
            file.seek(self._start[name])
            for start in range(0, numel, elements):
                part = buffer[: numel - start]
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
