"""`checkpoint.json`: sizes and fingerprints of a checkpoint's files, so that damage is named before a load.

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

from sparseforge_ds.checkpoint.folder import MANIFEST, STEP_FOLDER, checkpoint_name, random_file, read_json_object
from sparseforge_ds.checkpoint.pt_file import PtFile
from sparseforge_ds.checkpoint.tensors import hash_file

FORMAT = 4


class FormatVersionError(ValueError):
    """Error about a manifest that another version of this package wrote, which is no damage."""


@dataclass(frozen=True)
class Manifest:
    """State of a checkpoint folder at the end of its save."""

    folder: Path
    step: int
    world_size: int
    stage: int
    files: dict[str, int]
    """Size of each file in bytes, by name."""
    fingerprints: dict[str, str]
    """`fingerprint` of each file, by name."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            ValueError: it is missing, damaged, or of another version.
        """
        try:
            record = read_json_object(folder / MANIFEST)
        except ValueError as error:
            raise ValueError(f"{folder} was not written by this trainer, or is damaged: {error}") from None
        if (version := record.get("format")) != FORMAT:
            raise FormatVersionError(
                f"{folder} has format {version!r:.100}, this version of sparseforge_ds reads {FORMAT}; "
                "resume with the version that wrote it"
            )
        # Every key has its type.
        kinds = {"step": int, "world_size": int, "zero_stage": int, "files": dict, "fingerprints": dict}
        problems = [
            f"{key}: {record.get(key)!r:.100} is no {kind.__name__}"
            for key, kind in kinds.items()
            if type(record.get(key)) is not kind
        ]
        # Every file lies in the folder itself, and has a size and a fingerprint.
        if not problems:
            files = record["files"]
            fingerprints = record["fingerprints"]
            problems += [name for name, size in files.items() if Path(name).name != name or type(size) is not int]
            problems += [name for name, value in fingerprints.items() if type(value) is not str]
            problems += ["files and fingerprints"] if files.keys() != fingerprints.keys() else []
        if problems:
            raise ValueError(
                f"{folder} was not written by this trainer, or is damaged: {MANIFEST} cannot be read "
                f"({problems[0]:.200})"
            )
        return cls(folder, record["step"], record["world_size"], record["zero_stage"], files, fingerprints)

    def record(self) -> dict[str, Any]:
        """Return the content of `checkpoint.json`."""
        return {
            "format": FORMAT,
            "step": self.step,
            "world_size": self.world_size,
            "zero_stage": self.stage,
            "files": self.files,
            "fingerprints": self.fingerprints,
        }

    def check_sizes(self) -> None:
        """Raise ValueError unless every file is there in its full size, and no other. Reads no file.

        A folder that is named after a step must hold that step, and every rank its random number generators.
        """
        if STEP_FOLDER.fullmatch(self.folder.name) and self.folder.name != checkpoint_name(self.step):
            raise ValueError(f"{self.folder}: holds step {self.step} by its {MANIFEST}, and its name says another")
        paths = [path for path in self.folder.iterdir() if path.name != MANIFEST]
        present = {path.name: path.stat().st_size if path.is_file() else 0 for path in paths}
        for name, size in self.files.items():
            if present.get(name) != size:
                state = "is missing" if name not in present else f"has {present[name]} bytes instead of {size}"
                raise ValueError(f"{self.folder} is incomplete: {name} {state}")
        for name in sorted(present.keys() - self.files.keys()):
            raise ValueError(f"{self.folder / name}: does not belong to this checkpoint; remove it")
        # A damaged number of ranks may be immense, and one name too many is enough to show it.
        listed = {name for name in self.files if name.startswith("random_")}
        names = {random_file(rank) for rank in range(min(self.world_size, len(listed) + 1))}
        if odd := sorted(names ^ listed):
            state = "is missing in" if odd[0] in names else "does not belong in"
            raise ValueError(f"{self.folder} is incomplete: {odd[0]} {state} {MANIFEST}")

    def check_shards(self) -> None:
        """Raise ValueError unless the `.pt` files are those that were saved.

        Reads the directories of these archives only, so some damaged bytes do not show.
        """
        for name in (name for name in self.files if name.endswith(".pt")):
            if fingerprint(self.folder / name) != self.fingerprints[name]:
                raise ValueError(
                    f"{self.folder / name}: damaged, or of another step or run: not the file in {MANIFEST}"
                )

    def check_file(self, name: str) -> None:
        """Read all of a file; raise ValueError unless it is the one that was saved and holds plain content."""
        path = self.folder / name
        if name not in self.fingerprints:
            raise ValueError(f"{path}: does not belong to this checkpoint; remove it")
        if fingerprint(path) != self.fingerprints[name]:
            raise ValueError(f"{path}: damaged, or of another step or run: its checksums are not those in {MANIFEST}")
        check_pt_file(path)


def check_pt_file(path: Path) -> None:
    """Raise ValueError unless a `.pt` file has its checksums and holds plain tensors and values. Other files pass."""
    if path.suffix == ".pt":
        archive = PtFile(path)
        archive.check_bytes()
        _ = archive.content


def fingerprint(path: Path) -> str:
    """Return the sha256 of a file's bytes; of a `.pt` file that of its records' names, sizes and checksums."""
    # Reading a pipe or a device might never end.
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the checkpoint is incomplete, use another one")
    if path.suffix != ".pt":
        return hash_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            records = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, IndexError) as error:
        raise ValueError(f"{path}: not a readable checkpoint file, truncated or damaged ({error})") from None
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()
