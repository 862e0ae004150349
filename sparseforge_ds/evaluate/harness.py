"""Tasks of lm-evaluation-harness, by its own task files, and by those of a user beside them.

The harness counts a row as wrong whose answer is not among its choices, as in test sets with secret labels, and takes a
name that is no column for a text. In a user's own tasks such rows are refused before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from datasets.exceptions import DatasetsError

_FOLDERS = {"boolq": "super_glue/boolq", "rte": "glue/rte", "winogrande": "winogrande"}
"""Where the harness keeps tasks that have no file of their own name."""


class LoadedTasks(NamedTuple):
    """Tasks with their rows."""

    manager: Any
    by_name: Mapping[str, Any]


def load_tasks(names: Sequence[str], include_path: str | None = None, limit: int | None = None) -> LoadedTasks:
    """The tasks, whose data the harness downloads unless their files say otherwise.

    Raises ValueError where lm-eval is not installed, a task is unknown or a group, its data cannot be had, or a row of
    a user's own task has no answer among its choices.

    `include_path` is a folder of task files in the harness' format, which win over its own; the first `limit` rows of
    each are checked.
    """
    try:
        import lm_eval.tasks  # noqa: F401
        from jinja2 import TemplateError
    except ImportError as error:
        raise ValueError(f"lm-eval cannot be imported ({error}); pip install 'sparseforge_ds[zero_shot]'") from None
    manager = _task_manager(names, include_path)
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


def _task_manager(tasks: Sequence[str], include_path: str | None) -> Any:
    """The harness' index of tasks. To read all its thousands of files takes many seconds; those of a task, none."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    own = [] if include_path is None else [include_path]
    if not all(Path(folder).is_dir() for folder in own):
        raise ValueError(f"--include_path {include_path}: no such folder; give one with the YAML files of tasks")
    root = Path(lm_eval.__file__).parent / "tasks"
    named = {task: next(iter(root.glob(f"*/{task}.yaml")), None) for task in tasks if task not in _FOLDERS}
    folders = {root / _FOLDERS[task] for task in tasks if task in _FOLDERS}
    folders |= {file.parent for file in named.values() if file is not None}
    manager = TaskManager(include_defaults=False, include_path=[*map(str, folders), *own])
    if not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=own)
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"--tasks {task}: lm-eval knows no such task; `lm-eval ls tasks` lists them")
    return manager
