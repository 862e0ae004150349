"""Checkpoints of a run: DeepSpeed's own files, complete or absent.

A checkpoint is saved as `step_000400.tmp`, gets `checkpoint.json` with the size of every file when all ranks are done,
and is then renamed; `latest` is replaced last. So whatever is found under a final name is whole, and what a crash left
is swept up by the next start.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from sparseforge_ds.train.ranks import Ranks
from sparseforge_ds.train.run_folder import write_json

_FORMAT = 1
_TAG = re.compile(r"step_\d{6,}")


class Checkpoints:
    """The `checkpoints` folder of a run.

    Args:
        folder: OUTPUT_DIR/checkpoints.
        ranks: the processes of the run.
        stage: the ZeRO stage; DeepSpeed's files fit one stage and one number of ranks.
        keep: newest checkpoints that stay; 0 keeps all.
    """

    def __init__(self, folder: Path, ranks: Ranks, stage: int, keep: int) -> None:
        self.folder = folder
        self.ranks = ranks
        self.stage = stage
        self.keep = keep

    def sweep(self) -> None:
        """Remove what an interrupted save left behind. Rank 0 only."""
        for leftover in self.folder.glob("*.tmp"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def save(self, engine: Any, step: int, client_state: dict[str, Any]) -> Path:
        """Save on all ranks.

        Raises:
            OSError: the files cannot be written; the unfinished folder was removed.
        """
        tag = f"step_{step:06d}"
        temporary = self.folder / f"{tag}.tmp"
        client_state["train"]["rng"] = self.ranks.gather(random_state())
        try:
            engine.save_checkpoint(str(self.folder), tag=temporary.name, client_state=client_state, save_latest=False)
        except (OSError, RuntimeError) as error:
            # The other ranks wait inside DeepSpeed and end with this process: nothing can be agreed with them.
            shutil.rmtree(temporary, ignore_errors=True)
            free = shutil.disk_usage(self.folder).free / 2**30
            raise OSError(
                f"checkpoint {self.folder / tag} cannot be written ({error}); {free:.1f} GiB are free there. The "
                "unfinished folder was removed; make room and continue from the checkpoint before with --resume"
            ) from error
        self.ranks.barrier()
        self.ranks.on_first(lambda: self._publish(temporary, tag, step))
        return self.folder / tag

    def find(self) -> tuple[Path, int]:
        """The newest checkpoint and its step. Does not communicate.

        Raises:
            ValueError: there is none, it is half-written or foreign, or it belongs to another layout of ranks.
        """
        latest = self.folder / "latest"
        if not latest.is_file():
            raise ValueError(f"--resume: no checkpoint in {self.folder}; start the run without --resume")
        tag = latest.read_text(errors="replace").strip()
        path = self.folder / tag
        if not _TAG.fullmatch(tag) or not path.is_dir():
            raise ValueError(
                f"--resume: {latest} names {tag[:80]!r}, which is no checkpoint there; write the name of one into it "
                f"({', '.join(self._tags()) or 'there is none'})"
            )
        try:
            record = json.loads((path / "checkpoint.json").read_text())
            version, step, world_size, stage = (record[key] for key in ("format", "step", "world_size", "zero_stage"))
            files = dict(record["files"])
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--resume: {path} was not written by this trainer: checkpoint.json cannot be read ({error!r})"
            ) from None
        if version != _FORMAT:
            raise ValueError(
                f"--resume: {path} has format {version}, this version of sparseforge_ds reads {_FORMAT}; "
                "resume with the version that wrote it"
            )
        if (world_size, stage) != (self.ranks.world_size, self.stage):
            raise ValueError(
                f"--resume: {path} was saved by {world_size} ranks at ZeRO stage {stage}, this run has "
                f"{self.ranks.world_size} at stage {self.stage}; resume with the same"
            )
        for name, size in files.items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise ValueError(
                    f"--resume: {path} is incomplete: {name} {state}; write the name of another checkpoint into "
                    f"{latest} ({', '.join(other for other in self._tags() if other != tag) or 'there is none'})"
                )
        return path, int(step)

    def load(self, engine: Any, path: Path) -> dict[str, Any]:
        """Load engine and random state on all ranks; returns the client state."""
        loaded, client_state = engine.load_checkpoint(str(self.folder), tag=path.name)
        assert loaded is not None and isinstance(client_state, dict)
        return client_state

    def restore_random_state(self, client_state: dict[str, Any]) -> None:
        """Set this rank's random number generators; the last thing before training continues."""
        set_random_state(client_state["train"]["rng"][self.ranks.rank])

    def _publish(self, temporary: Path, tag: str, step: int) -> None:
        files = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        record = {"format": _FORMAT, "step": step, "world_size": self.ranks.world_size, "zero_stage": self.stage}
        write_json(temporary / "checkpoint.json", {**record, "files": files})
        final = self.folder / tag
        if final.exists():  # the run was resumed from an older checkpoint and has come here again
            shutil.rmtree(final)
        os.replace(temporary, final)
        latest = self.folder / "latest.tmp"
        latest.write_text(tag)
        os.replace(latest, self.folder / "latest")
        if self.keep:
            for old in [other for other in self._tags() if _step(other) <= step][: -self.keep]:
                shutil.rmtree(self.folder / old)

    def _tags(self) -> list[str]:
        tags = [path.name for path in self.folder.iterdir() if _TAG.fullmatch(path.name) and path.is_dir()]
        return sorted(tags, key=_step)


def _step(tag: str) -> int:
    return int(tag.removeprefix("step_"))


def random_state() -> dict[str, Any]:
    """Every random number generator of this process, in types that any reader of the file can load."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    accelerator = get_accelerator()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "accelerator": None if accelerator.device_name() == "cpu" else accelerator.get_rng_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["accelerator"] is not None:
        get_accelerator().set_rng_state(state["accelerator"].cpu())
