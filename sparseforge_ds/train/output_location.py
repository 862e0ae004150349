"""Where a run may write: in a folder of its own, not among what it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sparseforge_ds.checkpoint.folder import OWN_FOLDERS
from sparseforge_ds.config.arguments import EMBEDDED_MODEL, EMBEDDED_TEXT, HELD_OUT_TEXT, RunArguments
from sparseforge_ds.data.mixture import STREAM


def check_output_location(arguments: RunArguments) -> None:
    """Refuse an `--output_dir` that is no folder, or that cannot be told from what the run reads; writes nothing.

    Raises:
        ValueError: it is a file or below one, or lies in a folder with the model, the teacher or text, or one of those
            lies where the run writes.
    """
    name = arguments.output_dir
    output = Path(name).absolute()
    in_the_way = next((path for path in (output, *output.parents) if path.exists() and not path.is_dir()), None)
    if in_the_way is not None:
        where = "it" if in_the_way == output else str(in_the_way)
        raise ValueError(f"--output_dir {name}: {where} is a file, not a folder; give a folder for the run")
    output = output.resolve()
    for flag, given, read in _read(arguments):
        if read.is_dir() and read in (output, *output.parents):
            raise ValueError(
                f"--output_dir {name}: lies in the folder of {flag} {given}, and the run would write among what it "
                "reads; give a folder outside it"
            )
        for own in (output / part for part in OWN_FOLDERS):
            if own in (read, *read.parents):
                raise ValueError(
                    f"--output_dir {name}: {flag} {given} lies in its folder {own.name}, which the run replaces; give "
                    "another folder"
                )


def _read(arguments: RunArguments) -> Iterator[tuple[str, str, Path]]:
    """(flag, value, path) of everything on this machine's disk that the run reads."""
    models = (("--model", arguments.model), ("--teacher", arguments.teacher))
    given = [(flag, name, name) for flag, name in models if name is not None and name != EMBEDDED_MODEL]
    for value in arguments.dataset:
        for name in (value, value.rpartition("=")[0]):  # with a weight behind it, or without
            given.append(("--dataset", value, name.removeprefix(STREAM) if name != EMBEDDED_TEXT else ""))
    if (held_out := arguments.eval_dataset) is not None and held_out not in (EMBEDDED_TEXT, HELD_OUT_TEXT):
        given.append(("--eval_dataset", held_out, held_out.removeprefix(STREAM)))
    for flag, value, name in given:
        if name and Path(name).exists():
            yield flag, value, Path(name).resolve()
