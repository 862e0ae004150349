"""Checkpoints of a run: DeepSpeed's own files, complete or absent.

A checkpoint is written as `step_000400.tmp`. When every rank's files are there, they are forced to disk and read back,
and `checkpoint.json` lists them. Then the folder gets its final name, and from this moment on the checkpoint counts: a
run goes on from the newest. Old checkpoints are removed when the loss of the next step is finite. So a kill at any
moment leaves the newest complete checkpoint in place, and every folder with a final name is complete. Weights that are
infinite or NaN are not saved at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseforge_ds.checkpoint.disk import atomic_file, sync, write_json
from sparseforge_ds.checkpoint.folder import (
    MANIFEST,
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    list_files,
    random_file,
    read_pointer,
)
from sparseforge_ds.checkpoint.manifest import Manifest, check_pt_file, fingerprint
from sparseforge_ds.ranks import AgreedError, Ranks
from sparseforge_ds.train.random_state import random_state
from sparseforge_ds.zero.forge_error import ForgeError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A finished save: its folder, size and duration."""

    path: Path
    bytes: int
    seconds: float
    seconds_checking: float
    """Part of `seconds` that was spent on forcing the files to disk and reading them back."""


class Checkpoints:
    """The `checkpoints` folder of a run.

    Args:
        folder: OUTPUT_DIR/checkpoints.
        ranks: the processes of the run.
        stage: the ZeRO stage of this launch.
        keep: number of newest checkpoints that stay; 0 keeps all.
    """

    def __init__(self, folder: Path, ranks: Ranks, stage: int, keep: int) -> None:
        self.folder = folder
        self.ranks = ranks
        self.stage = stage
        self.keep = keep
        self._told: set[Path] = set()
        """Damaged checkpoints that a warning has named."""
        self._losses_to_tidy: Mapping[int, float] | None = None
        """Losses as of the newest save, until older checkpoints have been removed; None after that."""

    def recover(self) -> None:
        """Remove unfinished folders that a kill has left. Rank 0 only."""
        for leftover in self.folder.glob("*.tmp"):
            _sweep(leftover)

    def save(
        self, engine: Any, step: int, client_state: dict[str, Any], losses: Mapping[int, float] | None = None
    ) -> Saved:
        """Save on all ranks.

        Args:
            engine: the DeepSpeed engine.
            step: optimizer steps so far.
            client_state: further state that belongs to this step.
            losses: losses on held-out text, by step; the checkpoint with the lowest one stays too. None to keep the
                newest only.

        Raises:
            DivergedError: weights are infinite or NaN; nothing was written.
            OSError: DeepSpeed cannot write the files on this rank; the unfinished folder was removed.
            AgreedError: a file is not on disk as it was written, or the folder cannot be committed; it was removed.
        """
        start_time = time.perf_counter()
        tag = checkpoint_name(step)
        temporary = self.folder / f"{tag}.tmp"
        generators = random_state()
        try:
            # Have DeepSpeed write its files under a temporary name.
            try:
                engine.save_checkpoint(str(self.folder), temporary.name, client_state, save_latest=False)
            except (ForgeError, torch.OutOfMemoryError):  # no fault of the disk
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            except RuntimeError as error:  # torch's writer of files; anywhere else it would be a rank that is gone
                raise OSError(str(error)) from error
            self.ranks.all_or_raise(
                lambda: write_json(temporary / random_file(self.ranks.rank), generators, indent=None)
            )
            # Read every file back, and commit the folder with a list of them.
            check_time = time.perf_counter()
            written = self._check_written(temporary)
            seconds_checking = time.perf_counter() - check_time
            manifest = Manifest(
                folder=temporary,
                step=step,
                world_size=self.ranks.world_size,
                stage=self.stage,
                files={name: size for name, (size, _) in written.items()},
                fingerprints={name: digest for name, (_, digest) in written.items()},
            )
            self.ranks.on_first(lambda: self._commit(tag, manifest))
        except (AgreedError, OSError) as error:
            # After an error inside DeepSpeed the other ranks wait there and end with this process: no agreement then.
            is_agreed = isinstance(error, AgreedError)
            if self.ranks.first or not is_agreed:
                shutil.rmtree(temporary, ignore_errors=True)
            free = shutil.disk_usage(self.folder.parent).free / 2**30
            raise (AgreedError if is_agreed else OSError)(
                f"checkpoint {self.folder / tag} cannot be written ({error}); {free:.1f} GiB are free there. The "
                "unfinished folder was removed; make room and continue from the checkpoint before with --resume"
            ) from error
        # Tell DeepSpeed's own tools the newest checkpoint, and everybody the best.
        self.ranks.on_first(lambda: self._announce(tag, losses))
        self._losses_to_tidy = losses or {}
        size = sum(manifest.files.values())
        return Saved(self.folder / tag, size, time.perf_counter() - start_time, seconds_checking)

    def remove_old(self) -> None:
        """Remove all but the newest `keep` intact checkpoints and the best, once after each save. Collective.

        Call it when the saved weights have shown a finite loss, or training is over: only then is the newest checkpoint
        known to be as good as those that go.
        """
        losses = self._losses_to_tidy
        if losses is not None:
            self._losses_to_tidy = None
            self.ranks.on_first(lambda: self._tidy(losses))

    def name_best(self, losses: Mapping[int, float] | None) -> Path | None:
        """Write the name of the checkpoint with the lowest of `losses` into `best`, see `save`. Rank 0 only.

        Returns:
            That checkpoint. If none has a loss, it is the one that `best` names already; None if that is gone.
        """
        saved = [folder for folder in list_checkpoints(self.folder) if self._is_intact(folder)]
        scored = {folder: losses[step] for folder in saved if losses and (step := checkpoint_step(folder)) in losses}
        if not scored:
            # A resumed run may score another text, or none: what was the best stays until there is another.
            best_file = self.folder / "best"
            with contextlib.suppress(ValueError):  # the checkpoint that it names was moved away, or removed as damaged
                if best_file.is_file() and (named_before := read_pointer(best_file)) in saved:
                    return named_before
            return None
        best = min(scored, key=lambda folder: scored[folder])  # the earliest of equal ones
        self._write_name("best", best.name)
        return best

    def newest_before(self, step: int) -> tuple[Path | None, list[Path]]:
        """Return the newest intact checkpoint of a step below this one, if any, and those that are newer than it."""
        saved = list_checkpoints(self.folder)
        good = next(
            (folder for folder in reversed(saved) if checkpoint_step(folder) < step and self._is_intact(folder)), None
        )
        return good, [folder for folder in saved if good is None or checkpoint_step(folder) > checkpoint_step(good)]

    def newest(self) -> Manifest:
        """Return the manifest of the newest checkpoint, to go on from. Does not communicate.

        It checks names and sizes of files only; `check` reads them.

        Raises:
            ValueError: there is none, or it is incomplete or foreign.
        """
        saved = list_checkpoints(self.folder)
        if not saved:
            raise ValueError(f"--resume: no checkpoint in {self.folder}; start the run without --resume")
        with self._naming_alternatives(saved[-1]):
            manifest = Manifest.read(saved[-1])
            manifest.check_sizes()
        return manifest

    def check(self, manifest: Manifest) -> None:
        """Read this rank's share of a checkpoint's files; together the ranks read all. Does not communicate.

        Raises:
            ValueError: a file is damaged, of another step, or holds objects that no checkpoint has; nothing was
                executed.
        """
        with self._naming_alternatives(manifest.folder):
            for name in _by_size(manifest.files)[self.ranks.rank :: self.ranks.world_size]:
                manifest.check_file(name)

    @contextlib.contextmanager
    def _naming_alternatives(self, folder: Path) -> Iterator[None]:
        """Append the other intact checkpoints to the message of a ValueError about one."""
        try:
            yield
        except ValueError as error:
            saved = list_checkpoints(self.folder)
            intact = [other.name for other in saved if other != folder and self._is_intact(other)]
            alternatives = f"complete: {', '.join(intact)}" if intact else "no other one is complete"
            raise ValueError(f"--resume: {error}. To go back, move {folder} elsewhere ({alternatives})") from None

    def _check_written(self, temporary: Path) -> dict[str, tuple[int, str]]:
        """Return size and fingerprint of every file by name; one rank each forces it to disk and reads it back."""
        names = self.ranks.on_first(lambda: self._require_all_files(temporary))

        def check_share() -> dict[str, tuple[int, str]]:
            written = {}
            for name in names[self.ranks.rank :: self.ranks.world_size]:
                path = temporary / name
                sync(path)
                check_pt_file(path)
                written[name] = (path.stat().st_size, fingerprint(path))
            return written

        shares = self.ranks.gather(self.ranks.all_or_raise(check_share))
        return dict(sorted(item for share in shares for item in share.items()))

    def _require_all_files(self, temporary: Path) -> list[str]:
        """Return the names of the files, the largest first; ValueError where a rank's file is missing."""
        files = list_files(temporary)
        world_size = self.ranks.world_size
        names = {path.name: path.stat().st_size for path in temporary.iterdir()}
        for kind, count, expected in (
            ("model", len(files.model), world_size if self.stage == 3 else 1),
            ("optimizer", len(files.optimizer), world_size if self.stage else 0),
            ("random", sum(random_file(rank) in names for rank in range(world_size)), world_size),
        ):
            if count != expected:
                raise ValueError(f"{temporary.name} has {count} {kind} files of {expected}")
        return _by_size(names)

    def _commit(self, tag: str, manifest: Manifest) -> None:
        """Write the manifest, which also syncs the folder's names to disk, and give the folder its final name."""
        write_json(manifest.folder / MANIFEST, manifest.record())
        os.replace(manifest.folder, self.folder / tag)
        sync(self.folder)
        sync(self.folder.parent)  # the first save has made the folder

    def _announce(self, tag: str, losses: Mapping[int, float] | None) -> None:
        """Write the names of the newest checkpoint, which DeepSpeed's tools read, and of the best."""
        self._write_name("latest", tag)
        self.name_best(losses)

    def _tidy(self, losses: Mapping[int, float]) -> None:
        """Remove all intact checkpoints but the newest `keep` and the best.

        One that is not intact may have a file too many, or have been unreadable for a moment: it stays.
        """
        best = self.name_best(losses)
        if not self.keep:
            return
        intact = []
        for folder in list_checkpoints(self.folder):
            if (damage := self._damage_of(folder)) is None:
                intact.append(folder)
            elif folder not in self._told:
                _LOG.warning("%s; it is not removed with old checkpoints", damage)
                self._told.add(folder)
        for folder in intact[: -self.keep]:
            if folder != best:
                self._remove(folder)

    def _write_name(self, name: str, tag: str) -> None:
        with atomic_file(self.folder / name) as file:
            file.write(tag.encode())

    def _is_intact(self, folder: Path) -> bool:
        return self._damage_of(folder) is None

    def _damage_of(self, folder: Path) -> str | None:
        """Return the reason why a checkpoint does not look as it was written, or None if it does."""
        try:
            Manifest.read(folder).check_sizes()
        except ValueError as error:
            return str(error)
        return None

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint. It loses its final name first, so that a half-removed one does not count."""
        grave = folder.with_name(f"{folder.name}.old.tmp")
        if grave.is_dir():
            shutil.rmtree(grave)
        os.replace(folder, grave)
        _sweep(grave)


def _by_size(files: dict[str, int]) -> list[str]:
    """Return the names of files, the largest first, so that every n-th name is a fair share."""
    return sorted(files, key=lambda name: (-files[name], name))


def _sweep(leftover: Path) -> None:
    """Remove an unfinished file or folder.

    On a network file system somebody may still read a file in it; then the next launch tries again.
    """
    try:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    except OSError as error:
        _LOG.warning("%s cannot be removed now (%s); the next launch tries again", leftover, error)
