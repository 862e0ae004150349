"""Tasks of lm-evaluation-harness, by its own task files, and by those of a user beside them.

The harness counts a row as wrong if its answer is not among its choices, as in test sets with secret labels. It takes a
name that is no column for a text. In a user's own tasks such rows are refused before a model is loaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from datasets.exceptions import DatasetsError

from sparseforge_ds.evaluate.benchmark_files import has_data, write_task_file

_FOLDERS = {"boolq": "super_glue/boolq", "rte": "glue/rte", "winogrande": "winogrande"}
"""Folders of the harness with tasks that have no file of their own name, but `default.yaml`."""
_UNSAFE = re.compile(r"^unsafe_code: *true", re.MULTILINE)


class LoadedTasks(NamedTuple):
    """Tasks of the harness, with their rows."""

    manager: Any
    by_name: Mapping[str, Any]


def load_tasks(
    names: Sequence[str],
    include_path: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    confirm_run_unsafe_code: bool = False,
) -> LoadedTasks:
    """Load tasks; the harness downloads their data unless their files say otherwise.

    Tasks whose answers are chosen have no examples in the prompt, as in the papers on pruning.

    Args:
        names: names of tasks.
        include_path: a folder of task files in the harness' format, of benchmark data in its subfolders, or of both.
            They take precedence over the harness' own.
        limit: number of rows of each task that are checked; None for all.
        num_fewshot: examples in the prompt of tasks whose answers are generated; None for the task's own number.
        confirm_run_unsafe_code: allow tasks that run the code that a model writes.

    Raises:
        ValueError: lm-eval or a package of a task is not installed, a task is unknown, a group, or not allowed, its
            file lies in a subfolder of `include_path`, its data cannot be read or scored, or a row of a user's own task
            has no answer among its choices.
    """
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ValueError(f"lm-eval cannot be imported ({error}); in the checkout pip install '.[zero_shot]'") from None
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(
            f"--include_path {include_path}: no such folder; give one with the YAML files of tasks or with their data"
        )
    # The harness' own tasks of this kind run code as soon as they are loaded.
    if confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    for name in names:
        file = _harness_file(name)
        if file is not None and runs_code(file):
            _require_confirmed(name, confirm_run_unsafe_code)
    with TemporaryDirectory() as folder:
        task_files = Path(folder)
        # Later folders take precedence: what is written here beats what lies in downloaded data.
        own_folders = [] if include_path is None else [include_path, folder]
        if include_path is not None:
            _write_task_files(names, Path(include_path), task_files, num_fewshot != 0)
        return _load(names, own_folders, limit, num_fewshot, confirm_run_unsafe_code)


def runs_code(file: Path) -> bool:
    """Return True if a task file, or one that it includes, is marked as running code."""
    text = file.read_text()
    include = re.search(r"^include: *(\S+)", text, re.MULTILINE)
    included = None if include is None else file.parent / include[1]
    return bool(_UNSAFE.search(text)) or (included is not None and included.is_file() and runs_code(included))


def _require_confirmed(task: str, is_confirmed: bool) -> None:
    if not is_confirmed:
        raise ValueError(
            f"--tasks {task}: runs the code that the model writes, on this machine; allow it by "
            "--confirm_run_unsafe_code, best in a container, or leave the task out"
        )


def _load(
    names: Sequence[str],
    own_folders: Sequence[str],
    limit: int | None,
    num_fewshot: int | None,
    confirm_run_unsafe_code: bool,
) -> LoadedTasks:
    """Load the tasks from the harness' files and those in `own_folders`, and check their rows."""
    manager = _task_manager(names, own_folders)
    by_name = {}
    for name in names:
        with _task_errors(name):
            loaded = manager.load([name])["tasks"]
        # The check of the scoring runs code already.
        if getattr(loaded[name], "UNSAFE_CODE", False):
            _require_confirmed(name, confirm_run_unsafe_code)
        with _task_errors(name):
            if loaded[name].OUTPUT_TYPE == "generate_until":
                if num_fewshot is not None:
                    loaded[name].set_config("num_fewshot", num_fewshot)
                _check_scoring(loaded[name], limit)
            else:
                if own_number := loaded[name].config.num_fewshot:
                    note = f"{name}: measured without examples; the task's own number is {own_number}"
                    print(note, file=sys.stderr)
                loaded[name].set_config("num_fewshot", 0)
                if own_folders:
                    _check_answers(loaded[name], limit)
        by_name[name] = loaded[name]
    return LoadedTasks(manager, by_name)


@contextlib.contextmanager
def _task_errors(name: str) -> Iterator[None]:
    """Turn the harness's errors about rows that do not fit a task into a ValueError that names the task."""
    from jinja2 import TemplateError

    misfit = (LookupError, TypeError, ValueError, AttributeError, SyntaxError, TemplateError, DatasetsError)
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"--tasks {name}: {error}; install it (pip install 'lm-eval[{name}]' where lm-eval has such an extra)"
        ) from error
    except (OSError, *misfit) as error:
        lines = filter(re.compile(r"[^\s*#]").search, str(error).splitlines())
        cause = f"{type(error).__name__}: {next(lines, '').strip()}"[:300]
        problem = "its data cannot be read" if isinstance(error, OSError) else f"the data does not fit {name}"
        raise ValueError(f"--tasks {name}: {problem} ({cause})") from error


def _check_answers(task: Any, limit: int | None) -> None:
    """Reject rows that the harness would count as wrong whatever a model answers."""
    # Columns that the task names must be there.
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        column = getattr(task.config, key)
        if isinstance(column, str) and column.isidentifier() and column not in task.features:
            raise ValueError(f"its rows lack {column}; they have {', '.join(task.features)}")
    # Answers must be among the choices, as a text or by their index.
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    for number, row in enumerate(islice(task.eval_docs, limit), start=1):
        choices = task.doc_to_choice(row)
        target = task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row)
        for answer in target if isinstance(target, list) else [target]:
            is_index = isinstance(answer, int) and 0 <= answer < len(choices)
            if not (answer in choices if isinstance(answer, str) else is_index):
                raise ValueError(f"row {number}: its answer {answer!r} is none of its {len(choices)} choices")


def _check_scoring(task: Any, limit: int | None) -> None:
    """Score trivial answers, so that what a task lacks shows now and not after hours of generation.

    A task that runs answers as code, in a process for each, scores one.
    """
    task.build_all_requests(limit=1 if getattr(task, "UNSAFE_CODE", False) else limit)
    for instance in task.instances:
        instance.resps.append("a")
    task.apply_filters()
    for instance in task.instances:
        for response in instance.filtered_resps.values():
            task.process_results(instance.doc, [response])


def _write_task_files(tasks: Sequence[str], data: Path, out: Path, with_examples: bool) -> None:
    """Write a task file for each task whose data is in the folder `data` without a task file."""
    for task in tasks:
        file = _harness_file(task)
        if file is not None and has_data(data, task) and not (data / f"{task}.yaml").is_file():
            write_task_file(data, task, file, out, with_examples)


def _harness_folder() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


def _harness_file(task: str) -> Path | None:
    """Return the harness' file of a task, unless it is deeper in its folders."""
    root = _harness_folder()
    if task in _FOLDERS:
        return root / _FOLDERS[task] / "default.yaml"
    return next(iter(root.glob(f"*/{task}.yaml")), None)


def _task_manager(tasks: Sequence[str], own_folders: Sequence[str]) -> Any:
    """Return the harness' index of tasks.

    The harness takes many seconds to read all its thousands of files, so only the folders of these tasks are read. The
    rest follows where a task is not among them.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import TaskIndex

    folders = {str(file.parent) for file in map(_harness_file, tasks) if file is not None}
    manager = TaskManager(include_defaults=False, include_path=[*folders, *own_folders])
    if not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=list(own_folders))
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"--tasks {task}: lm-eval knows no such task; `lm-eval ls tasks` lists them")
    # Of two files for a task, the user's own is the one that is not in a subfolder, where downloaded data lies.
    for task in tasks:
        for folder in map(Path, own_folders):
            if (folder / f"{task}.yaml").is_file() and (entry := TaskIndex.entry_from_path(folder / f"{task}.yaml")):
                manager.task_index[task] = entry
        _require_task(task, manager.task_index[task], own_folders)
    return manager


def _require_task(name: str, entry: Any, own_folders: Sequence[str]) -> None:
    """Refuse groups, and task files in subfolders of the user's: what is downloaded must not run its code here."""
    if entry.kind.name not in ("TASK", "PY_TASK"):
        members = entry.tags if entry.kind.name == "TAG" else (entry.cfg or {}).get("task")
        listed = [members] if isinstance(members, str) else sorted(filter(lambda m: isinstance(m, str), members or ()))
        like = f", like {', '.join(listed[:3])}" if listed else ""
        raise ValueError(f"--tasks {name}: a group; name tasks of it{like}")
    file = Path(entry.yaml_path).absolute()
    folders = [Path(folder).absolute() for folder in own_folders]
    if file.parent not in folders and _harness_folder() not in file.parents and set(folders) & set(file.parents):
        raise ValueError(
            f"--tasks {name}: its task file {file} is in a subfolder of --include_path, where benchmark data lies, and "
            f"task files can run code; if you trust it, give --include_path {file.parent}"
        )
