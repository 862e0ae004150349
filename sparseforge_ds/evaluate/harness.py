"""Tasks of lm-evaluation-harness, by its own task files, and by those of a user beside them.

The harness counts a row as wrong whose answer is not among its choices, as in test sets with secret labels, and takes a
name that is no column for a text. In a user's own tasks such rows are refused before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from datasets.exceptions import DatasetsError

from sparseforge_ds.evaluate.benchmark_files import has_data, write_task_file

_FOLDERS = {"boolq": "super_glue/boolq", "rte": "glue/rte", "winogrande": "winogrande"}
"""Folders of the harness with tasks that have no file of their own name, but `default.yaml`."""


class LoadedTasks(NamedTuple):
    """Tasks with their rows."""

    manager: Any
    by_name: Mapping[str, Any]


def load_tasks(names: Sequence[str], include_path: str | None = None, limit: int | None = None) -> LoadedTasks:
    """The tasks, whose data the harness downloads unless their files say otherwise.

    Raises ValueError where lm-eval is not installed, a task is unknown or a group, its data cannot be had, or a row of
    a user's own task has no answer among its choices.

    `include_path` is a folder of task files in the harness' format, of benchmark data, or of both, which win over the
    harness' own; the first `limit` rows of each are checked.
    """
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ValueError(f"lm-eval cannot be imported ({error}); pip install 'sparseforge_ds[zero_shot]'") from None
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(
            f"--include_path {include_path}: no such folder; give one with the YAML files of tasks or with their data"
        )
    with TemporaryDirectory() as made:
        return _load(names, include_path, limit, Path(made))


def _load(names: Sequence[str], include_path: str | None, limit: int | None, made: Path) -> LoadedTasks:
    """Load the tasks, with task files for benchmark data in the folder `made`."""
    from jinja2 import TemplateError

    own = [] if include_path is None else [str(made), include_path]
    if include_path is not None:
        _write_task_files(names, Path(include_path), made)
    manager = _task_manager(names, own)
    # What prompts, templates and readers of the harness raise on rows of another form.
    misfit = (KeyError, IndexError, TypeError, ValueError, AttributeError, SyntaxError, TemplateError, DatasetsError)
    by_name = {}
    for name in names:
        try:
            loaded = manager.load([name])["tasks"]
            if name in loaded and include_path is not None:
                _check_answers(loaded[name], limit)
        except (OSError, *misfit) as error:
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            what = "its data cannot be read" if isinstance(error, OSError) else f"the data does not fit {name}"
            raise ValueError(f"--tasks {name}: {what} ({said})") from error
        if name not in loaded:
            raise ValueError(f"--tasks {name}: a group; name tasks of it, like {', '.join(list(loaded)[:3])}")
        by_name[name] = loaded[name]
    return LoadedTasks(manager, by_name)


def _check_answers(task: Any, limit: int | None) -> None:
    """Refuse rows that the harness would count as wrong whatever a model says."""
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        read = getattr(task.config, key)
        if isinstance(read, str) and read.isidentifier() and read not in task.features:
            raise ValueError(f"its rows lack {read}; they have {', '.join(task.features)}")
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    for number, row in enumerate(islice(task.eval_docs, limit), start=1):
        choices = task.doc_to_choice(row)
        answer = task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row)
        for one in answer if isinstance(answer, list) else [answer]:
            if not (one in choices if isinstance(one, str) else isinstance(one, int) and 0 <= one < len(choices)):
                raise ValueError(f"row {number}: its answer {one!r} is none of its {len(choices)} choices")


def _write_task_files(tasks: Sequence[str], data: Path, made: Path) -> None:
    """Write a task file for each task whose data the folder has, and for which it has no file."""
    for task in tasks:
        file = _own_file(task)
        if file is not None and has_data(data, task) and not (data / f"{task}.yaml").is_file():
            write_task_file(data, task, file, made)


def _harness_folder() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


def _own_file(task: str) -> Path | None:
    """Return the harness' file of a task, unless it is deeper in its folders."""
    root = _harness_folder()
    if task in _FOLDERS:
        return root / _FOLDERS[task] / "default.yaml"
    return next(iter(root.glob(f"*/{task}.yaml")), None)


def _task_manager(tasks: Sequence[str], own: Sequence[str]) -> Any:
    """The harness' index of tasks. To read all its thousands of files takes many seconds; those of a task, none."""
    from lm_eval.tasks import TaskManager

    folders = {str(file.parent) for file in map(_own_file, tasks) if file is not None}
    manager = TaskManager(include_defaults=False, include_path=[*folders, *own])
    if not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=list(own))
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"--tasks {task}: lm-eval knows no such task; `lm-eval ls tasks` lists them")
    return manager
