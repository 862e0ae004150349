"""The work folder of a consolidation, `.OUT.partial` beside OUT, which a killed one can go on from.

    .OUT.partial/
      journal.jsonl    what it is made from, then a line for every tensor that is in place, with its hash
      model/           what is going to be OUT

The journal is locked while a process works on it. It is not believed: a tensor is done if the bytes in its place have
the hash of its line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.disk import sync, sync_tree


class Partial:
    """An unfinished folder.

    Args:
        out: the folder that it is going to be.
        identity: what it is made from and how, plain JSON; a journal of anything else is discarded.

    Raises:
        ValueError: another process is working on it.
        OSError: it cannot be written.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.out = out
        self.folder = out.parent / f".{out.name}.partial"
        self.model = self.folder / "model"
        self._lock = threading.Lock()
        self._journal = self._open()
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        head, self.done = self._read()
        """Name of a tensor -> its line, for those that are in place according to the journal."""
        self.discarded = head not in (None, digest)
        """Whether the work of another source was thrown away."""
        if head != digest:
            self.done = {}
            shutil.rmtree(self.model, ignore_errors=True)
            os.ftruncate(self._journal, 0)
            self._write({"identity": digest})
        self.model.mkdir(exist_ok=True)

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """A tensor is in its place."""
        self._write({"name": name, "entry": entry})
        self.done[name] = entry

    def publish(self) -> None:
        """Make it OUT."""
        sync_tree(self.model)
        self.model.replace(self.out)
        sync(self.out.absolute().parent)
        self.remove()

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Let another process work on it."""
        os.close(self._journal)

    def _open(self) -> int:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "journal.jsonl"
            try:
                journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            except FileNotFoundError:
                continue  # the process that worked here has just removed the folder
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(journal)
                raise ValueError(
                    f"{self.out}: another process is writing it (in {self.folder}); wait for it, or give another name"
                ) from None
            if path.exists() and os.fstat(journal).st_ino == path.stat().st_ino:
                return journal
            os.close(journal)  # it was removed between our opening and our locking it

    def _read(self) -> tuple[str | None, dict[str, dict[str, Any]]]:
        """The identity in the journal and its entries; a line that was cut off by a kill is taken out."""
        with open(self._journal, "rb", closefd=False) as file:
            file.seek(0)
            lines = file.read().split(b"\n")
        whole = sum(len(line) + 1 for line in lines[:-1])
        os.ftruncate(self._journal, whole)
        try:
            records = [json.loads(line) for line in lines[:-1]]
            head: str = records[0]["identity"]
            return head, {record["name"]: dict(record["entry"]) for record in records[1:]}
        except IndexError:
            return None, {}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            return "", {}

    def _write(self, record: dict[str, Any]) -> None:
        with self._lock:
            os.write(self._journal, json.dumps(record).encode() + b"\n")
