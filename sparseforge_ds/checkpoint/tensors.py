"""A Hugging Face folder of safetensors, written and read one tensor at a time.

The writer puts the header of a file down first and then streams tensors behind it, so that memory does not depend on
the size of a file. (`safetensors.torch.save_file` wants all tensors of a file at once.)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparseforge_ds.checkpoint.folder import read_json

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor will be, before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def write_tensors(
    folder: Path,
    stem: str,
    specs: Mapping[str, TensorSpec],
    tensors: Iterator[tuple[str, Tensor]],
    max_shard_bytes: int,
) -> dict[str, str]:
    """Write `stem.safetensors`, or numbered files with an index when there is more than `max_shard_bytes`.

    Args:
        specs: every tensor by name, in the order in which `tensors` yields them.
        tensors: name and value; values are checked against `specs`.

    Returns:
        sha256 of the bytes of each tensor, by name.
    """
    shards = _split(specs, max_shard_bytes)
    count = len(shards)
    files = [
        f"{stem}.safetensors" if count == 1 else f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
    ]
    hashes: dict[str, str] = {}
    for file, names in zip(files, shards, strict=True):
        with open(folder / file, "wb") as out:
            _write_header(out, {name: specs[name] for name in names})
            for expected in names:
                name, tensor = next(tensors)
                assert (
                    name == expected and tuple(tensor.shape) == specs[name].shape and tensor.dtype == specs[name].dtype
                )
                data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
                hashes[name] = hashlib.sha256(data).hexdigest()
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
    if count > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return hashes


class TensorFolder:
    """The tensors of a Hugging Face folder (`model.safetensors`, or files with an index).

    Raises:
        ValueError: there are none, a file is missing or damaged, or a tensor is not where the index says.
    """

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self.folder = Path(folder)
        index = self.folder / f"{stem}.safetensors.index.json"
        single = self.folder / f"{stem}.safetensors"
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ValueError(f"{index}: has no weight_map")
        elif single.is_file():
            files = dict.fromkeys(self._names(single), single.name)
        else:
            raise ValueError(f"{self.folder}: no {single.name} and no {index.name} in it; give an exported model")
        self._files: dict[str, str] = files
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise ValueError(f"{index}: refers to {file!r}, outside of its folder")
            held = set(self._names(self.folder / file))
            for name in (name for name, where in files.items() if where == file):
                if name not in held:
                    raise ValueError(f"{self.folder / file}: does not hold {name}, which {index.name} promises")
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of every tensor, in the order of the files."""
        for name in files:
            with self._open(self.folder / files[name]) as handle:
                self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """One tensor."""
        if name not in self._files:
            raise ValueError(f"{self.folder}: holds no tensor {name!r}")
        with self._open(self.folder / self._files[name]) as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def _names(self, path: Path) -> list[str]:
        with self._open(path) as handle:
            return list(handle.keys())

    def _open(self, path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: not a readable safetensors file ({error})") from None


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


def _write_header(out: BinaryIO, specs: Mapping[str, TensorSpec]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        where = [offset, offset + spec.nbytes]
        header[name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": where}
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
