"""The tensors of a Hugging Face folder of safetensors, read one at a time: a file is mapped only while it is read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparseforge_ds.checkpoint.model_files import check_links, read_weight_map

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
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SAMPLES = 8
"""Number of samples of a large tensor that are hashed."""
_SAMPLE_BYTES = 2**10
"""Size of a sample."""
_OTHER_WEIGHTS = re.compile(
    r"pytorch_model.*\.bin|.+\.(?:pt|pth|ckpt|gguf|h5|msgpack)|(?:consolidated|adapter_model).*\.safetensors"
)
"""Names of files with weights that are not read here."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as in a file, without a copy if it is contiguous."""
    view: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def hash_tensor(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def hash_file(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(1 << 24):
                digest.update(block)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    return digest.hexdigest()


class TensorFolder:
    """The tensors of a Hugging Face folder (`model.safetensors`, or files with an index). Several threads may read.

    A file of an index may hold tensors that the index does not list; they belong to the model, as for transformers.
    """

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self.folder = Path(folder)
        index = self.folder / f"{stem}.safetensors.index.json"
        single = self.folder / f"{stem}.safetensors"
        specs_of_file: dict[str, dict[str, TensorSpec]] = {}
        if index.is_file() and single.is_file():
            raise ValueError(
                f"{self.folder}: has both {single.name} and {index.name}, of which one is left from an earlier save: "
                "transformers loads the first, other tools the files of the second; remove what is old"
            )
        check_links(self.folder)
        # An index names the file of every tensor; without one there is one file.
        if index.is_file():
            files = read_weight_map(index)
            for file in sorted(set(files.values())):
                specs_of_file[file] = _read_specs(self.folder / file)
        elif single.is_file():
            specs_of_file[single.name] = _read_specs(single)
            files = dict.fromkeys(specs_of_file[single.name], single.name)
        else:
            raise ValueError(f"{self.folder}: no {single.name} and no {index.name} in it{_cure(self.folder, stem)}")
        self.files: dict[str, str] = files
        """Name of the file of every tensor."""
        self.specs: dict[str, TensorSpec] = {}
        """Shape and dtype of every tensor, in the order of the files."""
        for name, file in files.items():
            if name not in specs_of_file[file]:
                raise ValueError(
                    f"{self.folder / file}: does not hold {name}, which {index.name} promises; copy or download "
                    "both again"
                )
            self.specs[name] = specs_of_file[file][name]
        # transformers loads every tensor of every file, listed or not.
        for file, specs in specs_of_file.items():
            for name, spec in specs.items():
                if self.files.setdefault(name, file) != file:
                    raise ValueError(
                        f"{self.folder}: {name} is in two files, {self.files[name]} and {file}, of which transformers "
                        "loads the last; save the model again, into a new folder"
                    )
                self.specs[name] = spec

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: spec.shape for name, spec in self.specs.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor into memory of its own."""
        return self._mapped(name).clone()

    def stream(self, name: str, elements: int) -> Iterator[Tensor]:
        """Yield one tensor in flat chunks of `elements`, as views of the mapped file. Do not write to them."""
        yield from self._mapped(name).reshape(-1).split(elements)

    def _mapped(self, name: str) -> Tensor:
        """Return a tensor in the mapped file, which stays mapped as long as the tensor lives."""
        if name not in self.specs:
            raise ValueError(f"{self.folder}: holds no tensor {name!r}")
        with _opened(self.folder / self.files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def fingerprint_weights(folder: Path) -> str:
    """Return a hash of names, dtypes, shapes and samples of all tensors of a folder, however they lie in files.

    Small tensors are hashed in full, large ones in samples from beginning to end: training changes all of a weight.

    Raises:
        ValueError: a file cannot be read.
    """
    tensors = TensorFolder(folder)
    digests: dict[str, str] = {}
    for file in sorted(set(tensors.files.values())):
        with _opened(folder / file) as content:
            for name in (name for name, file_of_name in tensors.files.items() if file_of_name == file):
                spec = tensors.specs[name]
                # Samples are spread evenly; those of a small tensor overlap and cover it.
                spread = max(0, spec.nbytes - _SAMPLE_BYTES)
                positions = {spread * number // (_SAMPLES - 1) for number in range(_SAMPLES)}
                stored = tensor_bytes(content.get_tensor(name))
                digest = hashlib.sha256(f"{name} {DTYPE_NAMES[spec.dtype]} {list(spec.shape)}".encode())
                for position in sorted(positions):
                    digest.update(stored[position : position + _SAMPLE_BYTES])
                digests[name] = digest.hexdigest()
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def unread_weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's files with weights in a form that is not read here, pickles above all."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file.name for file in files if _OTHER_WEIGHTS.fullmatch(file.name) and file.is_file())


def _cure(folder: Path, stem: str) -> str:
    """Return what to do about a folder without readable tensors, as the end of a message."""
    if shard := min(folder.glob(f"{stem}-*-of-*.safetensors"), default=None):
        return f"; it has {shard.name}, which needs {stem}.safetensors.index.json: copy that file there too"
    unread = unread_weight_files(folder) if stem == "model" else []
    if not unread:
        return "; give an exported model"
    more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
    return (
        f", but {unread[0]}{more}, which is not read here: weights are read from safetensors files alone, which cannot "
        "run code; load it with transformers and write a new folder with save_pretrained"
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Yield an open safetensors file. Raises ValueError for any other file."""
    try:
        # Reading a pipe or a device might never end.
        if path.exists() and not path.is_file():
            raise OSError("it is not a file")
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: not a readable safetensors file ({str(error)[:200]}); copy or download it again"
        ) from None


def _read_specs(path: Path) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor in a file, in the order of its bytes."""
    specs = {}
    with _opened(path) as file:
        for name in file.offset_keys():
            entry = file.get_slice(name)
            if (stored := entry.get_dtype()) not in _DTYPES:
                raise ValueError(
                    f"{path}: {name} is stored as {stored}, which is not known here; known are {', '.join(_DTYPES)}"
                )
            specs[name] = TensorSpec(tuple(entry.get_shape()), _DTYPES[stored])
    return specs
