"""Files of the blocks that a prune has done, from which the same command goes on."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.disk import atomic_file, require_unlocked, take_lock, write_json
from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.tensors import hash_tensor
from sparseforge_ds.config.run_state import differences, shorten
from sparseforge_ds.prune.dense_model import DenseModel
from sparseforge_ds.start.solve import SolvedBlock

_SETTINGS = "settings.json"
"""File of the settings that decide the result."""
_AT_WORK = "another process is at work in it"
_WAIT = "wait for it, or give another OUT"


class BlockFiles:
    """Folder beside `out` with a file for each block that is done, and the settings of all of them."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """Begin, or go on.

        Args:
            folder: is made if it does not exist.
            identity: settings that decide the result.

        Raises:
            ValueError: the folder was begun with other settings, has other files, or another process is at work in it.
        """
        self.folder = folder
        _refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # The lock ends with the process.
        self._lock = os.fdopen(take_lock(folder / "lock", f"{folder}: {_AT_WORK}", _WAIT))
        path = folder / _SETTINGS
        if path.is_file():
            _refuse_other_settings(folder, identity)
        else:
            write_json(path, identity)
        for stale in (*folder.glob("block_?????.safetensors.*.tmp"), *folder.glob("*.stream")):
            stale.unlink()
        self.done = _finished(folder)

    def require_room(self, blocks: int, model: int) -> None:
        """Raise ValueError unless the disk has room for the bytes of further blocks and of the finished model."""
        if blocks + model > (free := shutil.disk_usage(self.folder).free):
            raise ValueError(
                f"{self.folder}: its disk has {free / 1e9:.1f} GB free, and the finished model and its unfinished "
                f"blocks will take {(blocks + model) / 1e9:.1f} GB; make room, or give another OUT"
            )

    @contextmanager
    def kept_on_error(self, blocks: int) -> Iterator[None]:
        """After an error, say that the finished ones of `blocks` are kept, or remove the folder if there are none."""
        finished = False
        try:
            yield
            finished = True
        finally:
            if not self.done:
                self.remove()
            elif not finished:
                done = f"{len(self.done)} of {blocks} blocks are done"
                tqdm.write(f"{self.folder}: {done}; the same command goes on from there")

    def remove(self) -> None:
        """Remove what a prune has written, and the folder if it has nothing else."""
        # Settings go last: without them blocks would pass for those of the next prune.
        for pattern in ("block_?????.safetensors*", "*.stream", "lock", "settings.json*"):
            for path in self.folder.glob(pattern):
                path.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def save(self, number: int, tensors: dict[str, Tensor], result: SolvedBlock) -> None:
        """Write a block, which is done when its file has its final name."""
        path = self.folder / f"block_{number:05}.safetensors"
        facts = {
            "error_before": None if math.isnan(result.error_before) else result.error_before,
            "error": None if math.isnan(result.error) else result.error,
            "few_tokens": result.few_tokens,
        }
        hashes = {name: hash_tensor(tensor) for name, tensor in tensors.items()}
        with atomic_file(path) as file:
            file.write(save(tensors, {"facts": json.dumps(facts), "sha256": json.dumps(hashes)}))
        self.done[number] = path

    def results(self) -> dict[str, Path]:
        """Return the file of every saved tensor by its name."""
        return {name: path for path in self.done.values() for name in _contents(path)[0]}

    def errors(self) -> list[dict[str, Any]]:
        """Return the errors of every block, in order."""
        return [json.loads(_contents(self.done[number])[1]["facts"]) for number in sorted(self.done)]

    def reader(self, number: int, dense: DenseModel) -> Any:
        """Return a function that reads the tensors of a finished block; its buffers are those of the dense files."""
        path = self.done[number]
        names, _ = _contents(path)
        return lambda name: read_result(path, name) if name in names else dense.tensors.read(name)


def finished_before(folder: Path, identity: Callable[[], dict[str, Any]]) -> set[int]:
    """Return the numbers of the blocks that `BlockFiles` would find done. Nothing is written.

    Args:
        folder: of the blocks; need not exist.
        identity: gives the settings that decide the result; is called if the folder was begun.

    Raises:
        ValueError: as `BlockFiles`; or the file of a block is damaged.
    """
    _refuse_foreign(folder)
    require_unlocked(folder / "lock", f"{folder}: {_AT_WORK}", _WAIT)
    if not (folder / _SETTINGS).is_file():
        return set()
    _refuse_other_settings(folder, identity())
    finished = _finished(folder)
    for path in finished.values():
        _contents(path)
    return set(finished)


def _refuse_foreign(folder: Path) -> None:
    """Raise ValueError for a place where somebody else has something."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder}: is a link or a file, and unfinished blocks go there; move it")
    # A prune that has not written its settings yet has written nothing else but its lock.
    known = {folder / "lock", *folder.glob(f"{_SETTINGS}*")}
    if not (folder / _SETTINGS).is_file() and (others := sorted(set(folder.glob("*")) - known)):
        raise ValueError(
            f"{folder}: has files that no prune has written ({others[0].name}), and would take unfinished results; "
            "move it, or give another OUT"
        )


def _refuse_other_settings(folder: Path, identity: dict[str, Any]) -> None:
    """Raise ValueError if a folder was begun with other settings: results are not mixed with those of another run."""
    if changed := differences(read_json_object(folder / _SETTINGS), identity, "prune"):
        raise ValueError(
            f"{folder}: was begun with other settings ({shorten(changed)}); give the same, or remove the folder"
        )


def _finished(folder: Path) -> dict[int, Path]:
    """Return the file of every block that is done, by its number."""
    return {int(file.stem.removeprefix("block_")): file for file in folder.glob("block_?????.safetensors")}


def _contents(path: Path) -> tuple[set[str], dict[str, str]]:
    """Return the names of the tensors in a file of results, and its metadata."""
    with opened_result(path) as file:
        return set(file.keys()), file.metadata()


def read_result(path: Path, name: str) -> Tensor:
    """Read a tensor from a file of results into memory of its own."""
    with opened_result(path) as file:
        value: Tensor = file.get_tensor(name).clone()
        hashes = json.loads(file.metadata().get("sha256", "{}"))
    if hash_tensor(value) != hashes.get(name):  # a prune that goes on may read blocks that lay on the disk for days
        raise _damage(path, f"other bytes of {name} than were written")
    return value


@contextmanager
def opened_result(path: Path) -> Iterator[Any]:
    """Open a file of results; ValueError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _damage(path, str(error)[:200]) from None


def _damage(path: Path, why: str) -> ValueError:
    return ValueError(f"{path}: is damaged ({why}); remove it and all blocks after it, and they are pruned again")
