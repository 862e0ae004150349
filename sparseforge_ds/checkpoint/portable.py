"""A checkpoint that fits every layout: whole tensors in safetensors, and everything else in one JSON file.

    step_000400/
      portable.json            shapes, dtypes, steps, param groups, client state, loss scale, sha256 of every tensor
      weight.safetensors       masters, frozen weights and buffers (numbered files with an index when they are large)
      mask.safetensors         one such set for every optimizer state: dense, mask, curvature, exp_avg, ...
      random_00003.json        generators of the ranks, for the case that it is continued on as many
      checkpoint.json

Nothing in it can execute code. DeepSpeed's universal checkpoint is not used: its files are pickles, it keeps three
hard-coded states and drops ours, and its ZeRO-3 loader gives all param groups the settings of the first one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.checkpoint.contents import Contents, Entry, Group
from sparseforge_ds.checkpoint.folder import PORTABLE, read_json
from sparseforge_ds.checkpoint.tensors import TensorFolder, TensorSpec, hash_tensor

FORMAT = 1
WEIGHT = "weight"
"""Stem of the files of masters, frozen weights and buffers; other stems are names of states."""
_STEM = re.compile(r"\w{1,64}", re.ASCII)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint8, torch.bool),
    )
}


def to_json(contents: Contents, sha256: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The content of `portable.json`.

    Args:
        sha256: by stem, of every tensor.
    """
    return {
        "format": FORMAT,
        "origin": {"zero_stage": contents.stage, "world_size": contents.world_size},
        "global_steps": contents.step,
        "global_samples": contents.samples,
        "skipped_steps": contents.skipped,
        "weights": {
            name: {
                "shape": list(entry.shape),
                "dtype": _name(entry.dtype),
                "trained_dtype": _name(entry.trained_dtype),
                "states": {key: _name(dtype) for key, dtype in entry.states.items()},
                "scalars": entry.scalars,
            }
            for name, entry in contents.entries.items()
        },
        "buffers": sorted(contents.buffers),
        "aliases": contents.aliases,
        "groups": [{"names": list(group.names), "settings": group.settings} for group in contents.groups],
        "loss_scale": contents.loss_scale,
        "lr_scheduler": contents.lr_scheduler,
        "client_state": contents.client_state,
        "sha256": sha256,
    }


class PortableFiles:
    """The files of a portable checkpoint; reads take the bytes that they need and keep nothing mapped.

    Raises:
        ValueError: (constructor, methods) a file is missing, damaged or does not belong to the others; the message
            names it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / PORTABLE
        content = read_json(self._path)
        if content.get("format") != FORMAT:
            raise ValueError(
                f"{self._path}: has format {content.get('format')!r}, this version of sparseforge_ds reads {FORMAT}"
            )
        try:
            self.contents, self._sha256 = _parse(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{self._path}: damaged ({error!r:.200})") from None
        self._tensors = {stem: TensorFolder(folder, stem) for stem in self._sha256}
        for stem, specs in self._expected().items():
            held = self._tensors[stem].specs if stem in self._tensors else {}
            for name, spec in specs.items():
                if held.get(name) != spec or name not in self._sha256[stem]:
                    raise ValueError(f"{self._where(stem, name)}: {name} is {held.get(name)}, {PORTABLE} says {spec}")

    def read(self, name: str, key: str | None, start: int, stop: int) -> Tensor:
        """(stop - start,) elements of a weight (`key` None) or of one of its states, in memory of their own.

        A whole tensor is compared with its checksum.
        """
        stem = WEIGHT if key is None else key
        taken = self._tensors[stem].read_run(name, start, stop)
        if stop - start == self.contents.entries[name].numel:
            self._compare(stem, name, taken)
        return taken

    def check_bytes(self, part: int, parts: int) -> None:
        """Compare the checksums of every `parts`-th tensor."""
        names = [(stem, name) for stem, specs in self._expected().items() for name in specs]
        for stem, name in names[part::parts]:
            self._compare(stem, name, self._tensors[stem].read(name))

    def _expected(self) -> dict[str, dict[str, TensorSpec]]:
        return tensor_specs(self.contents)

    def _compare(self, stem: str, name: str, tensor: Tensor) -> None:
        if hash_tensor(tensor) != self._sha256[stem][name]:
            raise ValueError(
                f"{self._where(stem, name)}: the bytes of {name} are not those that were written; "
                "use another checkpoint"
            )

    def _where(self, stem: str, name: str) -> Path:
        tensors = self._tensors.get(stem)
        return self.folder / (f"{stem}.safetensors" if tensors is None else tensors.files.get(name, f"{stem}.*"))


def tensor_specs(contents: Contents) -> dict[str, dict[str, TensorSpec]]:
    """Every tensor of a portable checkpoint, by the stem of its files."""
    specs = {WEIGHT: {name: TensorSpec(entry.shape, entry.dtype) for name, entry in contents.entries.items()}}
    for name, entry in contents.entries.items():
        for key, dtype in entry.states.items():
            specs.setdefault(key, {})[name] = TensorSpec(entry.shape, dtype)
    return specs


def unportable(entry: Entry) -> str | None:
    """Why an entry cannot be in a portable checkpoint, or None if it can."""
    if entry.others:
        return f"its optimizer state {entry.others[0]!r} is neither per element nor a number"
    for key in entry.states:
        if not _is_stem(key):
            return f"its optimizer state {key!r} cannot be the name of a file"
    for dtype in (entry.dtype, entry.trained_dtype, *entry.states.values()):
        if _name(dtype) not in _DTYPES:
            return f"{dtype} is not known"
    return None


def _is_stem(key: str) -> bool:
    return _STEM.fullmatch(key) is not None and key != WEIGHT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parse(content: dict[str, Any]) -> tuple[Contents, dict[str, dict[str, str]]]:
    """Raises KeyError, TypeError, ValueError or AttributeError where something is missing or of a wrong type."""
    entries = {}
    for name, weight in content["weights"].items():
        states = {key: _DTYPES[dtype] for key, dtype in weight["states"].items()}
        if bad := [key for key in states if not _is_stem(key)]:
            raise ValueError(f"{name} has a state {bad[0]!r}")
        entries[name] = Entry(
            shape=tuple(_typed(int, size) for size in weight["shape"]),
            dtype=_DTYPES[weight["dtype"]],
            trained_dtype=_DTYPES[weight["trained_dtype"]],
            states=states,
            scalars={key: _number(value) for key, value in weight["scalars"].items()},
        )
    scale, scheduler = content["loss_scale"], content["lr_scheduler"]
    groups = [
        Group(tuple(_typed(str, name) for name in group["names"]), _typed(dict, group["settings"]))
        for group in _typed(list, content["groups"])
    ]
    contents = Contents(
        stage=_typed(int, content["origin"]["zero_stage"]),
        world_size=_typed(int, content["origin"]["world_size"]),
        step=_typed(int, content["global_steps"]),
        samples=_typed(int, content["global_samples"]),
        skipped=_typed(int, content["skipped_steps"]),
        entries=entries,
        buffers=frozenset(_typed(str, name) for name in content["buffers"]),
        aliases={alias: _typed(str, name) for alias, name in content["aliases"].items()},
        groups=groups,
        client_state={key: _typed(dict, value) for key, value in content["client_state"].items()},
        loss_scale=None if scale is None else {key: _number(value) for key, value in scale.items()},
        lr_scheduler=None if scheduler is None else _typed(dict, scheduler),
    )
    sha256 = {stem: {name: _typed(str, value) for name, value in of.items()} for stem, of in content["sha256"].items()}
    known = [*contents.buffers, *contents.aliases.values(), *(name for group in groups for name in group.names)]
    if unknown := set(known) - set(entries):
        raise ValueError(f"it refers to {sorted(unknown)[0]!r}, of which it does not say the shape")
    if set(sha256) != set(tensor_specs(contents)):
        raise ValueError(f"sha256 is of {sorted(sha256)}")
    return contents, sha256


def _typed(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is no {kind.__name__}")
    return value


def _number(value: Any) -> int | float:
    return value if type(value) is float else int(_typed(int, value))
