"""`checkpoint.json`: what a checkpoint folder holds, byte for byte, so that damage is named before anything is loaded.

The fingerprint of a `.pt` file covers the names, sizes and checksums of its records, which is a few kB to read; the
records themselves are compared with those checksums. The fingerprint of any other file covers its bytes.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.folder import MANIFEST, read_json
from sparseforge_ds.checkpoint.pt_file import PtFile
from sparseforge_ds.checkpoint.tensors import hash_file

FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """A checkpoint folder as it was when its save was done."""

    folder: Path
    step: int
    world_size: int
    stage: int
    files: dict[str, int]
    fingerprints: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint."""
        try:
            record = read_json(folder / MANIFEST)
        except ValueError as error:
            raise ValueError(f"{folder} was not written by this trainer, or is damaged: {error}") from None
        if (version := record.get("format")) != FORMAT:
            raise ValueError(
                f"{folder} has format {version!r:.100}, this version of sparseforge_ds reads {FORMAT}; "
                "resume with the version that wrote it"
            )
        kinds = {"step": int, "world_size": int, "zero_stage": int, "files": dict, "fingerprints": dict}
        odd = [
            f"{key}: {record.get(key)!r:.100} is no {kind.__name__}"
            for key, kind in kinds.items()
            if type(record.get(key)) is not kind
        ]
        if not odd:
            files, prints = record["files"], record["fingerprints"]
            odd += [name for name, size in files.items() if Path(name).name != name or type(size) is not int]
            odd += [name for name, print in prints.items() if type(print) is not str]
            odd += ["files and fingerprints"] if files.keys() != prints.keys() else []
        if odd:
            raise ValueError(
                f"{folder} was not written by this trainer, or is damaged: {MANIFEST} cannot be read ({odd[0]:.200})"
            )
        return cls(folder, record["step"], record["world_size"], record["zero_stage"], files, prints)

    def record(self) -> dict[str, Any]:
        """The content of `checkpoint.json`."""
        return {
            "format": FORMAT,
            "step": self.step,
            "world_size": self.world_size,
            "zero_stage": self.stage,
            "files": self.files,
            "fingerprints": self.fingerprints,
        }

    def check_sizes(self) -> None:
        """Every file is there in its full length, and no other; reads nothing."""
        paths = [path for path in self.folder.iterdir() if path.name != MANIFEST]
        present = {path.name: path.stat().st_size if path.is_file() else 0 for path in paths}
        for name, size in self.files.items():
            if present.get(name) != size:
                state = "is missing" if name not in present else f"has {present[name]} bytes instead of {size}"
                raise ValueError(f"{self.folder} is incomplete: {name} {state}")
        for name in sorted(present.keys() - self.files.keys()):
            raise ValueError(f"{self.folder / name}: does not belong to this checkpoint; remove it")

    def check_shards(self) -> None:
        """The `.pt` files are those that were saved. It reads their directories only, so not every damaged byte
        shows."""
        for name in (name for name in self.files if name.endswith(".pt")):
            if fingerprint(self.folder / name) != self.fingerprints[name]:
                raise ValueError(
                    f"{self.folder / name}: damaged, or of another step or run: not the file in {MANIFEST}"
                )

    def check_file(self, name: str) -> None:
        """Read a file whole: it is the one that was saved, and holds nothing but plain tensors and values."""
        path = self.folder / name
        if name not in self.fingerprints:
            raise ValueError(f"{path}: does not belong to this checkpoint; remove it")
        if fingerprint(path) != self.fingerprints[name]:
            raise ValueError(f"{path}: damaged, or of another step or run: its checksums are not those in {MANIFEST}")
        check_content(path)


def check_content(path: Path) -> None:
    """Compare every checksum in a file, and load it as plain tensors and values."""
    if path.suffix == ".pt":
        archive = PtFile(path)
        archive.check_bytes()
        _ = archive.content


def fingerprint(path: Path) -> str:
    """Tells a file from every other one, as far as checksums do; of a `.pt` file it reads the directory only."""
    if not path.is_file():  # a pipe or a device might never end
        raise ValueError(f"{path}: no such file; the checkpoint is incomplete, use another one")
    if path.suffix != ".pt":
        return hash_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            records = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, IndexError) as error:
        raise ValueError(f"{path}: not a readable checkpoint file, truncated or damaged ({error})") from None
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()
