"""The way from a run's folder, its `checkpoints` folder or one checkpoint to the `.pt` files of a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"
"""Name of the file, in a checkpoint that the launcher saved, that lists its files and their checksums."""
OWN_FOLDERS = ("model", "data", "checkpoints", "tensorboard")
"""Names of the folders of a run folder that a run replaces or clears."""
_MOST_DEPTH = 40
"""Levels to which lists and dicts of a JSON file may be nested."""
STEP_FOLDER = re.compile(r"step_(\d{6,18})")
"""Name of a checkpoint that the launcher saved."""
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OF_TRAINER = re.compile(r"checkpoint-(\d{1,18})")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True)
class CheckpointFiles:
    """The `.pt` files of one checkpoint, in rank order."""

    folder: Path
    model: list[Path]
    """Model files: one, or one per rank at ZeRO-3."""
    optimizer: list[Path]
    """Optimizer files: one per rank; none at stage 0."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the `step_*` folders of a run's `checkpoints` folder, the newest last.

    A checkpoint gets such a name once all of it is on the disk.
    """
    children = folder.iterdir() if folder.is_dir() else ()
    steps = {
        child: int(match[1]) for child in children if (match := STEP_FOLDER.fullmatch(child.name)) and child.is_dir()
    }
    return sorted(steps, key=lambda child: (steps[child], child.name))


def checkpoint_name(step: int) -> str:
    """Return the name of the folder that the launcher gives a checkpoint."""
    return f"step_{step:06d}"


def random_file(rank: int) -> str:
    """Return the name of the file with a rank's random number generators."""
    return f"random_{rank:05d}.json"


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step in the name of a folder that `list_checkpoints` returned."""
    return int(checkpoint.name.removeprefix("step_"))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, if there is one.

    It is the newest `step_*` that the launcher wrote, or, if DeepSpeed alone saved, the one that `latest` names.
    """
    steps = list_checkpoints(folder)
    latest = folder / "latest"
    if latest.is_file() and not any((step / MANIFEST).is_file() for step in steps):
        return read_pointer(latest)
    return steps[-1] if steps else None


def newest_trainer_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete `checkpoint-N` in the output folder of transformers' Trainer, if there is one."""
    children = folder.iterdir() if folder.is_dir() else ()
    steps = {child: int(match[1]) for child in children if (match := _OF_TRAINER.fullmatch(child.name))}
    return max(filter(is_complete_trainer_checkpoint, steps), key=lambda child: steps[child], default=None)


def is_complete_trainer_checkpoint(folder: Path) -> bool:
    """Return whether a `checkpoint-N` is complete: the trainer writes its own record after DeepSpeed has saved."""
    return all((folder / name).is_file() for name in ("latest", "trainer_state.json"))


def read_pointer(file: Path) -> Path:
    """Return the checkpoint that a file beside it names, such as `latest` or `best`."""
    with file.open(errors="replace") as text:
        tag = text.read(300).strip()
    plain = tag not in ("", "..") and Path(tag).name == tag and len(tag) < 256
    if not plain or not (file.parent / tag).is_dir():
        raise ValueError(f"{file}: names {tag[:100]!r}, which is no folder beside it")
    return file.parent / tag


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint at `path`.

    Args:
        path: one checkpoint, a folder with checkpoints or with a `checkpoints` folder (the newest is returned), a file
            `checkpoints/best`, or the output folder of transformers' Trainer.

    Raises:
        ValueError: there is no checkpoint, or `latest` or `best` names none.
    """
    path = Path(path)
    # A file that names the best checkpoint.
    if path.name == "best" and path.is_file():
        return read_pointer(path)
    if not path.is_dir():
        kind = "is a file" if path.is_file() else "no such folder"
        raise ValueError(f"{path}: {kind}; give a run's output folder or one checkpoint in it")
    # A folder of checkpoints, one checkpoint, or the output of a Trainer.
    for parent in (path, path / "checkpoints"):
        if (newest := newest_checkpoint(parent)) is not None:
            return newest
    if any(path.glob("*_model_states.pt")):
        return path
    if (of_trainer := newest_trainer_checkpoint(path)) is not None:
        return read_pointer(of_trainer / "latest")
    # Nothing was found: say whether a run began here.
    require_saved(path)
    raise ValueError(
        f"{path}: holds no checkpoint (no step_* folder, no latest file, no *_model_states.pt, no checkpoint-N of a "
        "Trainer that is complete)"
    )


def require_saved(path: Path) -> None:
    """Raise ValueError for the folder of a run, known by what its launch leaves, which has no checkpoint yet."""
    if any((path / name).is_file() for name in (".lock", "sparseforge.json")):
        raise ValueError(
            f"{path}: a run began here and has no checkpoint yet; wait for its first one, or, if it has ended, start "
            "it again"
        )


def check_outside_checkpoints(out: Path) -> None:
    """Raise ValueError for a new folder that a run would take for a checkpoint of its own, or would replace."""
    # `out` may reach a run's folder through a link, and .. behind a link leads elsewhere than its text says.
    real = Path(os.path.realpath(out.absolute().parent), out.name)
    out = Path(os.path.normpath(out.absolute()))
    for path in (out, real):
        for run in path.parents:
            own = path.relative_to(run).parts[0]
            if own in OWN_FOLDERS and (run / "sparseforge.json").is_file():
                raise ValueError(f"{out}: lies in the folder {own} of the run {run}; give a name outside it")
    named = STEP_FOLDER.fullmatch(out.name) or _OF_TRAINER.fullmatch(out.name)
    beside = list_checkpoints(out.parent) or newest_trainer_checkpoint(out.parent) or (out.parent / "latest").is_file()
    if named and beside:
        raise ValueError(f"{out}: would be taken for a checkpoint of those beside it; give another name")


def find_run(path: str | Path) -> Path | None:
    """Return the run folder, with `sparseforge.json`, that `path` is or lies in; None if there is none."""
    paths = (Path(path).absolute(), Path(os.path.realpath(path)))
    folders = (folder for path in paths for folder in (path, *path.parents[:2]))
    return next((folder for folder in folders if (folder / "sparseforge.json").is_file()), None)


def list_files(folder: Path) -> CheckpointFiles:
    """List the files of a checkpoint folder in rank order.

    Raises:
        ValueError: the file of a rank is missing, or tensor or expert parallelism made the checkpoint.
    """
    model: dict[int, Path] = {}
    optimizer: dict[int, Path] = {}
    # Every .pt file is the model or the optimizer file of one rank.
    for file in sorted(folder.glob("*.pt")):
        for pattern, files_by_rank in ((_MODEL, model), (_OPTIMIZER, optimizer)):
            if match := pattern.fullmatch(file.name):
                if int(match[2]) != 0:
                    raise ValueError(f"{file}: a shard of tensor or pipeline parallelism, which is not supported")
                rank = int(match[1] or 0)
                if rank in files_by_rank:
                    other = files_by_rank[rank].name
                    raise ValueError(f"{file}: rank {rank} has two files, the other is {other}; remove one")
                files_by_rank[rank] = file
                break
        else:
            raise ValueError(f"{file}: not a file of plain data parallelism; expert parallelism is not supported")
    if not model:
        raise ValueError(f"{folder}: no *_model_states.pt in it, so it is no DeepSpeed checkpoint")
    # Ranks are numbered without gaps.
    for kind, files in (("model", model), ("optimizer", optimizer)):
        for rank in range(max(files, default=-1)):
            if rank not in files:
                raise ValueError(f"{folder}: the {kind} file of rank {rank} is missing; use another checkpoint")
    return CheckpointFiles(folder, [model[r] for r in sorted(model)], [optimizer[r] for r in sorted(optimizer)])


def check_depth(content: Any) -> None:
    """Raise ValueError for lists and dicts nested many levels deep, which Python handles by recursion."""
    values = [content]
    for _ in range(_MOST_DEPTH + 1):
        containers = [
            value.values() if isinstance(value, dict) else value for value in values if isinstance(value, (dict, list))
        ]
        if not containers:
            return
        values = list(itertools.chain.from_iterable(containers))
    raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        # Reading a pipe or a device might never end.
        if path.exists() and not path.is_file():
            raise OSError("it is not a file")
        content = json.loads(path.read_text())
        check_depth(content)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    # ValueError is also bytes that are not UTF-8, and a number of thousands of digits.
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({str(error)[:200]})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected a JSON object")
    return content
