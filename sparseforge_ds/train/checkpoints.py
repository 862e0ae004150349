"""Checkpoints of a run: DeepSpeed's own files, complete or absent.

A checkpoint is written as `step_000400.tmp`. When every rank's files are there, they are forced to disk and read back,
and `checkpoint.json` says what they are. Then, in this order: `latest.next` names the checkpoint, the folder gets its
final name, `latest.next` becomes `latest`, and old checkpoints are removed. From the first of these moments on the
checkpoint counts: a start that finds `latest.next` takes the steps that a kill left out. So a kill at any moment leaves
the newest complete checkpoint in place, and whatever has a final name is whole.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparseforge_ds.checkpoint.disk import sync
from sparseforge_ds.checkpoint.folder import list_files
from sparseforge_ds.checkpoint.manifest import NAME, Manifest, check_content, fingerprint
from sparseforge_ds.train.random_state import random_file, random_state
from sparseforge_ds.train.ranks import AgreedError, Ranks
from sparseforge_ds.train.run_folder import write_json

T = TypeVar("T")

_TAG = re.compile(r"step_\d{6,}")
_NEXT = "latest.next"


@dataclass(frozen=True)
class Saved:
    """A save that is done."""

    path: Path
    bytes: int
    seconds: float
    seconds_checking: float
    """Of these: forcing the files to disk and reading them back."""


class Checkpoints:
    """The `checkpoints` folder of a run.

    Args:
        folder: OUTPUT_DIR/checkpoints.
        ranks: the processes of the run.
        stage: the ZeRO stage of this start.
        keep: newest checkpoints that stay; 0 keeps all.
    """

    def __init__(self, folder: Path, ranks: Ranks, stage: int, keep: int) -> None:
        self.folder = folder
        self.ranks = ranks
        self.stage = stage
        self.keep = keep
        self.previous: str | None = None
        """The checkpoint that this run saved or went on from last."""

    def recover(self) -> None:
        """Finish what a kill interrupted, and remove what cannot be finished. Rank 0 only."""
        if (self.folder / _NEXT).is_file():
            tag = (self.folder / _NEXT).read_text(errors="replace")
            if _TAG.fullmatch(tag) and any((self.folder / name).is_dir() for name in (tag, f"{tag}.tmp")):
                self._move_latest(tag)
            else:
                (self.folder / _NEXT).unlink()
        for leftover in self.folder.glob("*.tmp"):
            _sweep(leftover)

    def save(self, engine: Any, step: int, client_state: dict[str, Any]) -> Saved:
        """Save on all ranks.

        Raises:
            OSError: DeepSpeed cannot write the files on this rank; the unfinished folder was removed.
            AgreedError: a file is not on disk as it was written, or cannot be published; the folder was removed.
        """
        began = time.perf_counter()
        tag = f"step_{step:06d}"
        temporary = self.folder / f"{tag}.tmp"
        generators = random_state()
        try:
            engine.save_checkpoint(str(self.folder), tag=temporary.name, client_state=client_state, save_latest=False)
        except (OSError, RuntimeError) as error:
            # The other ranks wait inside DeepSpeed and end with this process: nothing can be agreed with them.
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(self._unwritable(tag, error)) from error
        try:
            self.ranks.everywhere(lambda: write_json(temporary / random_file(self.ranks.rank), generators, indent=None))
            written = time.perf_counter()
            found = self._check_written(temporary)
            checking = time.perf_counter() - written
            manifest = Manifest(
                folder=temporary,
                step=step,
                world_size=self.ranks.world_size,
                stage=self.stage,
                previous=self.previous,
                files={name: size for name, (size, _) in found.items()},
                fingerprints={name: print for name, (_, print) in found.items()},
            )
            self.ranks.on_first(lambda: self._publish(tag, manifest))
        except AgreedError as error:
            if self.ranks.first:
                (self.folder / _NEXT).unlink(missing_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
            raise AgreedError(self._unwritable(tag, error)) from error
        self.previous = tag
        self.ranks.on_first(lambda: self._prune(tag))
        size = sum(manifest.files.values())
        return Saved(self.folder / tag, size, time.perf_counter() - began, checking)

    def find(self) -> Manifest:
        """The checkpoint to go on from: the one that `latest` names, or the newest where there is no `latest`.

        Does not communicate, and looks at names and sizes only; `check` reads.

        Raises:
            ValueError: there is none, or it is incomplete or foreign.
        """
        latest = self.folder / "latest"
        if latest.is_file():
            tag = latest.read_text(errors="replace").strip()
        elif tags := self._tags():
            tag = tags[-1]
        else:
            raise ValueError(f"--resume: no checkpoint in {self.folder}; start the run without --resume")
        if not _TAG.fullmatch(tag) or not (self.folder / tag).is_dir():
            raise ValueError(
                f"--resume: {latest} names {tag[:80]!r}, which is no checkpoint there; write the name of one into it "
                f"({self._complete_ones()})"
            )
        self.previous = tag
        return self._blaming(tag, lambda: self._manifest(tag))

    def check(self, manifest: Manifest) -> None:
        """Read this rank's share of the files of a checkpoint; together the ranks read all. Does not communicate.

        Raises:
            ValueError: a file is damaged, of another step, or holds what no checkpoint holds; nothing was executed.
        """
        for name in _by_size(manifest.files)[self.ranks.rank :: self.ranks.world_size]:
            self._blaming(manifest.folder.name, lambda name=name: manifest.check_file(name))  # type: ignore[misc]

    def _manifest(self, tag: str) -> Manifest:
        manifest = Manifest.read(self.folder / tag)
        if manifest.step != _step(tag):
            raise ValueError(f"{self.folder / tag} holds step {manifest.step}")
        manifest.check_sizes()
        names = {random_file(rank) for rank in range(manifest.world_size)}
        listed = {name for name in manifest.files if name.startswith("random_")}
        # A copy by `sparseforge reshard` has as many as what it is a copy of; DeepSpeed alone saves none.
        if odd := sorted(names ^ listed if manifest.stage is not None or listed else ()):
            state = "is missing in" if odd[0] in names else "does not belong in"
            raise ValueError(f"{self.folder / tag} is incomplete: {odd[0]} {state} {NAME}")
        return manifest

    def _blaming(self, tag: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except ValueError as error:
            raise ValueError(
                f"--resume: {error}. To go back, write the name of another checkpoint into {self.folder / 'latest'} "
                f"({self._complete_ones(tag)})"
            ) from None

    def _check_written(self, temporary: Path) -> dict[str, tuple[int, str]]:
        """Size and fingerprint of every file, each forced to disk and read back by one of the ranks."""
        names = self.ranks.on_first(lambda: self._complete(temporary))

        def check_share() -> dict[str, tuple[int, str]]:
            found = {}
            for name in names[self.ranks.rank :: self.ranks.world_size]:
                path = temporary / name
                sync(path)
                check_content(path)
                found[name] = (path.stat().st_size, fingerprint(path))
            return found

        shares = self.ranks.gather(self.ranks.everywhere(check_share))
        return dict(sorted(item for share in shares for item in share.items()))

    def _complete(self, temporary: Path) -> list[str]:
        """Names of the files, the largest first; every rank must have its own among them."""
        files = list_files(temporary)
        world_size = self.ranks.world_size
        names = {path.name: path.stat().st_size for path in temporary.iterdir()}
        for kind, found, expected in (
            ("model", len(files.model), world_size if self.stage == 3 else 1),
            ("optimizer", len(files.optimizer), world_size if self.stage else 0),
            ("random", sum(random_file(rank) in names for rank in range(world_size)), world_size),
        ):
            if found != expected:
                raise ValueError(f"{temporary.name} has {found} {kind} files of {expected}")
        return _by_size(names)

    def _publish(self, tag: str, manifest: Manifest) -> None:
        write_json(manifest.folder / NAME, manifest.record())
        sync(manifest.folder)
        temporary = self.folder / f"{_NEXT}.tmp"
        temporary.write_text(tag)
        sync(temporary)
        os.replace(temporary, self.folder / _NEXT)
        sync(self.folder)
        self._move_latest(tag)

    def _move_latest(self, tag: str) -> None:
        """The steps after `latest.next` was written; taking them again does no harm."""
        temporary, final = self.folder / f"{tag}.tmp", self.folder / tag
        if temporary.is_dir():
            if final.is_dir():  # the run was resumed from an older checkpoint and has come here again
                self._remove(tag)
            os.replace(temporary, final)
            sync(self.folder)
        os.replace(self.folder / _NEXT, self.folder / "latest")
        sync(self.folder)

    def _prune(self, tag: str) -> None:
        """Remove what is older than the newest `keep` whole ones of this run's own past, whose newest is `tag`.

        A checkpoint that the run was taken back from is not of its past: it goes when the run has passed it, and as
        long as it is newer it stays.
        """
        if not self.keep:
            return
        kept: list[str] = []
        tags = self._tags()
        link: str | None = tag
        while link in tags and link not in kept and len(kept) < self.keep and (link == tag or self._whole(link)):
            kept.append(link)
            link = _previous(self.folder / link)
        if len(kept) < self.keep:  # where the chain ends early, a link was removed or is damaged
            older = [other for other in reversed(tags) if other not in kept and _step(other) < _step(kept[-1])]
            kept += [other for other in older if self._whole(other)][: self.keep - len(kept)]
        for other in tags:
            if other not in kept and _step(other) <= _step(tag):
                self._remove(other)

    def _whole(self, tag: str) -> bool:
        try:
            self._manifest(tag)
        except ValueError:
            return False
        return True

    def _remove(self, tag: str) -> None:
        """Take the final name away first: what is half removed must not look like a checkpoint."""
        grave = self.folder / f"{tag}.old.tmp"
        if grave.is_dir():
            shutil.rmtree(grave)
        os.replace(self.folder / tag, grave)
        _sweep(grave)

    def _unwritable(self, tag: str, error: Exception) -> str:
        free = shutil.disk_usage(self.folder).free / 2**30
        return (
            f"checkpoint {self.folder / tag} cannot be written ({error}); {free:.1f} GiB are free there. The "
            "unfinished folder was removed; make room and continue from the checkpoint before with --resume"
        )

    def _complete_ones(self, but: str | None = None) -> str:
        found = [tag for tag in self._tags() if tag != but and self._whole(tag)]
        return f"complete: {', '.join(found)}" if found else "there is no complete one"

    def _tags(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        tags = [path.name for path in self.folder.iterdir() if _TAG.fullmatch(path.name) and path.is_dir()]
        return sorted(tags, key=_step)


def _by_size(files: dict[str, int]) -> list[str]:
    """The largest first, so that every n-th is a fair share."""
    return sorted(files, key=lambda name: (-files[name], name))


def _step(tag: str) -> int:
    return int(tag.removeprefix("step_"))


def _previous(folder: Path) -> str | None:
    try:
        return Manifest.read(folder).previous
    except ValueError:  # damaged since, or of another version: nothing is known of what lies before it
        return None


def _sweep(leftover: Path) -> None:
    """Remove what has no final name. Someone may still read a file of it on a network file system: next start again."""
    try:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    except OSError as error:
        print(f"note: {leftover} cannot be removed now ({error}); the next start tries again", flush=True)
