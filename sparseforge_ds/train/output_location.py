"""Location of a run's output: a folder of its own, apart from the files that the run reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sparseforge_ds.checkpoint.folder import OWN_FOLDERS
from sparseforge_ds.config.arguments import EMBEDDED_MODEL, EMBEDDED_TEXT, HELD_OUT_TEXT, RunArguments
from sparseforge_ds.config.given_path import path_exists
from sparseforge_ds.data.mixture import STREAM


def check_output_location(arguments: RunArguments) -> None:
    """Reject an `--output_dir` that is no folder, or that overlaps with files that the run reads; writes nothing.

    Raises:
        ValueError: it is a file or below one, it and the model, the teacher or text lie in one another, or one of them
            cannot be looked at.
    """
    # Nothing on the path may be a file.
    name = arguments.output_dir
    who = f"--output_dir {name}"
    output = Path(name).absolute()
    file = next((path for path in (output, *output.parents) if path_exists(path, who) and not path.is_dir()), None)
    if file is not None:
        subject = "it" if file == output else str(file)
        raise ValueError(f"--output_dir {name}: {subject} is a file, not a folder; give a folder for the run")

    # The output may not lie in an input, nor an input where the run writes.
    output = output.resolve()
    for flag, value, source in _inputs(arguments):
        if source.is_dir() and source in (output, *output.parents):
            raise ValueError(
                f"--output_dir {name}: lies in the folder of {flag} {value}, and the run would write among what it "
                "reads; give a folder outside it"
            )
        for own in (output / part for part in OWN_FOLDERS):
            if own in (source, *source.parents):
                raise ValueError(
                    f"--output_dir {name}: {flag} {value} lies in its folder {own.name}, which the run replaces; give "
                    "another folder"
                )


def _inputs(arguments: RunArguments) -> Iterator[tuple[str, str, Path]]:
    """Yield (flag, value, path) of every model and text on this machine's disk that the run reads."""
    models = (
        *(("--model", arguments.model), ("--teacher", arguments.teacher)),
        ("--teacher_logits", arguments.teacher_logits),
    )
    inputs = [(flag, name, name) for flag, name in models if name is not None and name != EMBEDDED_MODEL]
    for value in arguments.dataset:
        for name in (value, value.rpartition("=")[0]):  # with a weight behind it, or without
            inputs.append(("--dataset", value, name.removeprefix(STREAM) if name != EMBEDDED_TEXT else ""))
    if (held_out := arguments.eval_dataset) is not None and held_out not in (EMBEDDED_TEXT, HELD_OUT_TEXT):
        inputs.append(("--eval_dataset", held_out, held_out.removeprefix(STREAM)))
    for flag, value, name in inputs:
        if name and path_exists(name, f"{flag} {value}"):
            yield flag, value, Path(name).resolve()
