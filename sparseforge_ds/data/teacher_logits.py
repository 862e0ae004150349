"""A teacher's largest logits of every token of a text, written once and read by the number of a window.

A window is the run of `seq_length` tokens at a multiple of that length, whatever the order in which a run reads it: so
ranks, batches, epochs and a resumed run get the logits of their tokens. Four files belong to a text:

    <key>.json      its `LogitsRecord`
    <key>.entries   (windows, seq_length, K) entries of the vocabulary, uint16 or uint32
    <key>.shares    (windows, seq_length, K + 1) log-probabilities in fp16, see `model.top_logits`
    <key>.crc       (windows, 2) CRCs of both, uint32, against which every window is read

fp16 has eight times the precision of bf16, and its range covers logarithms of probabilities.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sparseforge_ds.checkpoint.disk import reserve, write_json
from sparseforge_ds.config.run_state import differences, shorten
from sparseforge_ds.config.strict import build
from sparseforge_ds.model.top_logits import TopLogits

_LOG = logging.getLogger(__name__)
TOKENS = "tokens"
"""Name of the folder of token caches, beside the logits."""


@dataclass(frozen=True)
class LogitsRecord:
    """Settings of stored logits, and how many windows are written."""

    key: str
    """`TokenCache.name` of the text."""
    facts: dict[str, Any]
    """Settings that the key was hashed from."""
    seq_length: int
    windows: int
    vocabulary: int
    """Entries of the teacher's head."""
    temperature: float
    top_k: int
    teacher: str
    """Folder or hub id."""
    teacher_hash: str
    """Hash of the teacher's weights, whatever its folder is called."""
    dtype: str
    """Dtype that the teacher ran in."""
    written: int = 0
    """Windows whose logits are on the disk."""

    @property
    def entry_dtype(self) -> str:
        """Numpy dtype of an entry of the vocabulary."""
        return "uint16" if self.vocabulary <= 2**16 else "uint32"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's logits."""
        return self.top_k * np.dtype(self.entry_dtype).itemsize + (self.top_k + 1) * 2

    @property
    def origin(self) -> dict[str, Any]:
        """Facts that a resumed run compares: weights and dtype of the teacher, and how many of its logits are kept."""
        return {"teacher_hash": self.teacher_hash, "dtype": self.dtype, "top_k": self.top_k}


class TeacherLogits:
    """Stored logits of one text, mapped into memory."""

    def __init__(self, folder: Path, record: LogitsRecord, mode: Literal["r", "r+"] = "r") -> None:
        self.folder = folder
        self.record = record
        shape = (record.windows, record.seq_length, record.top_k)
        self._entries = np.memmap(folder / f"{record.key}.entries", record.entry_dtype, mode, shape=shape)
        shape = (*shape[:2], record.top_k + 1)
        self._shares = np.memmap(folder / f"{record.key}.shares", "<f2", mode, shape=shape)
        self._crc = np.memmap(folder / f"{record.key}.crc", "<u4", mode, shape=(record.windows, 2))

    @classmethod
    def create(cls, folder: Path, record: LogitsRecord) -> TeacherLogits:
        """Open files for writing. Continue those of a killed process, and begin damaged ones anew.

        Raises:
            ValueError: the folder has logits of this text with other settings.
            OSError: the disk is too full.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{record.key}.json"
        if path.exists():
            before = _read_record(path)
            # The same text and the same teacher, whatever their files are called now.
            comparable = replace(before, written=0, teacher=record.teacher, facts=record.facts)
            if changes := differences(asdict(comparable), asdict(record), "logits"):
                raise ValueError(f"{path}: is of other settings ({shorten(changes)}); give another --output")
            record = before
        tokens = record.windows * record.seq_length
        sizes = {"entries": record.top_k * np.dtype(record.entry_dtype).itemsize, "shares": (record.top_k + 1) * 2}
        files = {folder / f"{record.key}.{name}": tokens * size for name, size in sizes.items()}
        files[folder / f"{record.key}.crc"] = record.windows * 8
        # What a file has lost would be zeros in the room that is taken below.
        damaged_files = [file for file, size in files.items() if not file.exists() or file.stat().st_size != size]
        if damaged_files and record.written:
            _LOG.warning("%s is not as it was written: the logits are made again", damaged_files[0])
            record = replace(record, written=0)
            write_json(path, asdict(record))
        # Files may be there, of more entries.
        for file, size in files.items():
            reserve(file, size)
        return cls(folder, record, "r+")

    @classmethod
    def open(
        cls,
        folder: Path,
        key: str,
        facts: Mapping[str, Any],
        seq_length: int,
        vocabulary: int,
        temperature: float,
    ) -> TeacherLogits:
        """Open the logits of a text that a run is about to read.

        Args:
            folder: value of `--teacher_logits`.
            key: `TokenCache.name` of the text.
            facts: settings that the key was hashed from.
            seq_length: tokens of a window.
            vocabulary: entries of the model's head.
            temperature: `distillation.temperature`.

        Raises:
            ValueError: there are none of this text, they are of another length, vocabulary or temperature, or they are
                incomplete.
        """
        # Logits of this text and tokenizer, or a message that says what differs.
        path = folder / f"{key}.json"
        if not path.is_file():
            all_changes = [differences(dict(stored.facts), dict(facts), "data") for stored in _stored(folder)]
            changes = min(all_changes, key=len, default=[])  # those of the text that is most like it
            raise ValueError(
                f"--teacher_logits {folder}: has no logits of this text and tokenizer"
                f"{f' ({shorten(changes)})' if changes else ''}; make them by sparseforge teach"
            )
        # The run's settings must be those that they were made with, and all of them must be there.
        record = _read_record(path)
        _require_same(folder, record, seq_length, temperature)
        if record.vocabulary != vocabulary:
            raise _differs(folder, "vocabulary", record.vocabulary, vocabulary)
        if record.written < record.windows:
            raise _incomplete(folder, record)
        try:
            return cls(folder, record)
        except (OSError, ValueError) as error:
            raise ValueError(f"--teacher_logits {folder}: cannot be opened ({error}); make it again") from None

    def write(self, entry_BSK: np.ndarray, share_BSL: np.ndarray) -> None:
        """Write the logits of the next windows; `save` notes that they are there."""
        rows = slice(self.record.written, self.record.written + len(entry_BSK))
        self._entries[rows] = entry_BSK
        self._shares[rows] = share_BSL
        for window in range(rows.start, rows.stop):
            self._crc[window] = self._crc_of(window)
        self.record = replace(self.record, written=rows.stop)

    def save(self) -> None:
        """Wait until everything is on the disk, and note how much it is."""
        self._entries.flush()
        self._shares.flush()
        self._crc.flush()
        write_json(self.folder / f"{self.record.key}.json", asdict(self.record))

    def read(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return entries (S, K) and log-probabilities (S, K + 1) of a window.

        Raises:
            ValueError: they are not as they were written.
        """
        if self._crc_of(window) != tuple(self._crc[window].tolist()):
            raise ValueError(
                f"--teacher_logits {self.folder}: window {window} of {self.record.key} has other bytes than were "
                "written; remove the files of that name, and make them again by sparseforge teach"
            )
        return self._entries[window], self._shares[window]

    def _crc_of(self, window: int) -> tuple[int, int]:
        return zlib.crc32(self._entries[window].data), zlib.crc32(self._shares[window].data)


def require_matching_settings(folder: Path, seq_length: int, temperature: float) -> None:
    """Raise ValueError where a folder has logits, and none of them are of this length and temperature."""
    records = _stored(folder)
    if records and not matching_records(folder, seq_length, temperature):
        _require_same(folder, records[0], seq_length, temperature)


def matching_records(folder: Path, seq_length: int, temperature: float) -> list[LogitsRecord]:
    """Return the records of all texts whose logits are of this length and temperature."""
    return [
        record for record in _stored(folder) if (record.seq_length, record.temperature) == (seq_length, temperature)
    ]


def require_finished(folder: Path, records: Sequence[LogitsRecord]) -> None:
    """Raise ValueError unless the logits of some text are all there."""
    if not records:
        raise ValueError(f"--teacher_logits {folder}: has no logits; make them by sparseforge teach")
    if not any(record.written == record.windows for record in records):
        raise _incomplete(folder, records[0])


def _require_same(folder: Path, record: LogitsRecord, seq_length: int, temperature: float) -> None:
    for name, stored, current in (
        ("--seq_length", record.seq_length, seq_length),
        ("distillation.temperature", record.temperature, temperature),
    ):
        if stored != current:
            raise _differs(folder, name, stored, current)


def _incomplete(folder: Path, record: LogitsRecord) -> ValueError:
    return ValueError(
        f"--teacher_logits {folder}: is incomplete ({record.written:,} of {record.windows:,} windows); repeat the "
        "command sparseforge teach, which goes on"
    )


def _differs(folder: Path, name: str, stored: float, current: float) -> ValueError:
    return ValueError(
        f"--teacher_logits {folder}: its {name} is {stored:g}, and this run's {current:g}; use the same, or make "
        "others by sparseforge teach"
    )


def _stored(folder: Path) -> list[LogitsRecord]:
    """Return the records of all texts that a folder has logits of."""
    records = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError):  # JSON of something else
            records.append(_read_record(path))
    return records


def remove_unsaved(folder: Path, key: str) -> None:
    """Remove files of a text's logits that have no record, and folders that are then empty. Its tokens stay.

    Args:
        folder: of the logits.
        key: `tokenization.cache_key` of the text, with which the names of its files begin.
    """
    for path in folder.glob(f"{key}*"):
        if not path.with_suffix(".json").exists():
            path.unlink()
    remove_empty(folder)


def remove_empty(folder: Path) -> None:
    """Remove a folder of logits, and that of the tokens in it, as far as they are empty."""
    for emptied in (folder / TOKENS, folder):
        with contextlib.suppress(OSError):  # it has other files, or is a mounted disk
            emptied.rmdir()


def stack_logits(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> TopLogits:
    """Return the logits of a batch from those of its sequences."""
    entries = np.stack([entry for entry, _ in rows]).astype(np.int64)
    return TopLogits(torch.from_numpy(entries), torch.from_numpy(np.stack([share for _, share in rows])))


def _read_record(path: Path) -> LogitsRecord:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        record: LogitsRecord = build(LogitsRecord, content, "record")
        # Paths of other files are made of the key.
        if record.key != path.stem:
            raise ValueError(f"its key is {record.key[:100]!r}")
        return record
    except ValueError as error:
        raise ValueError(
            f"{path}: is no record of a teacher's logits ({str(error)[:100]}); if sparseforge teach wrote it, remove "
            "it and repeat the command"
        ) from None
