"""Tasks of lm-evaluation-harness, on rows of this machine if need be, each held against what the task reads.

The harness scores rows that lack a task's column: a name that is no column becomes a text, no choice equals it, and the
task is 0.00. Here such rows are refused before a model is loaded, and so are rows whose answer is not among the
choices, as in test sets with secret labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetsError

from sparseforge_ds.evaluate.task_data import Rows

_FOLDERS = {"boolq": "super_glue/boolq", "rte": "glue/rte", "winogrande": "winogrande"}
"""Where the harness keeps tasks that have no file of their own name."""


@dataclass(frozen=True)
class Form:
    """Rows that a task can be asked on."""

    columns: tuple[str, ...]
    """What the rows must have; they may have more."""
    override: Mapping[str, Any] = field(default_factory=dict)
    """What the task reads otherwise than its own definition says."""
    note: str = ""
    """What a user should know of numbers from such rows."""


_ARC = Form(("question", "choices", "answerKey"))
_YES = {"doc_to_target": "{{[false, true].index(answer)}}"}
FORMS: Mapping[str, tuple[Form, ...]] = {
    "arc_challenge": (_ARC,),
    "arc_easy": (_ARC,),
    "boolq": (
        Form(("question", "passage", "label")),
        Form(
            ("question", "title", "passage", "answer"),
            {**_YES, "doc_to_text": "{{title}} -- {{passage}}\nQuestion: {{question}}?\nAnswer:"},
        ),
        Form(
            ("question", "passage", "answer"),
            _YES,
            "its rows are those of google/boolq, whose passages lack the titles that those of SuperGLUE begin with; "
            "published numbers are on the latter",
        ),
    ),
    "hellaswag": (
        Form(("activity_label", "ctx_a", "ctx_b", "endings", "label")),
        Form(("query", "choices", "gold"), {"process_docs": None, "doc_to_target": "gold"}),
    ),
    "openbookqa": (Form(("question_stem", "choices", "answerKey")),),
    "piqa": (Form(("goal", "sol1", "sol2", "label")),),
    "race": (Form(("article", "problems")),),
    "rte": (Form(("sentence1", "sentence2", "label")),),
    "winogrande": (Form(("sentence", "option1", "option2", "answer")),),
}
"""Of the tasks of the suites: the harness' own form first, then others that are known."""


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their rows."""

    manager: Any
    """The harness' index of tasks."""
    by_name: Mapping[str, Any]
    """The harness' task objects."""
    notes: Sequence[str]
    """What a user should know of their data."""


def load_tasks(names: Sequence[str], data: Mapping[str, Rows], limit: int | None = None) -> LoadedTasks:
    """The tasks, with rows that fit.

    Args:
        names: tasks that the harness knows.
        data: local rows by task, from `find_data`; what is absent is downloaded by the harness.
        limit: how many rows of each task are checked and asked, from the first one on.

    Raises:
        ValueError: lm-eval is not installed, a task is unknown or a group, its rows lack a column that the task reads,
            or have an answer that is not among the choices.
    """
    try:
        import lm_eval.tasks  # noqa: F401
        from jinja2 import TemplateError
    except ImportError as error:
        raise ValueError(f"lm-eval cannot be imported ({error}); pip install 'sparseforge_ds[zero_shot]'") from None
    manager = _task_manager(names)
    # What prompts, templates and readers of the harness raise on rows of another form.
    misfit = (KeyError, IndexError, TypeError, ValueError, AttributeError, SyntaxError, TemplateError, DatasetsError)
    by_name, notes = {}, []
    for name in names:
        local = data.get(name)
        form = None if local is None else _form(name, local)
        # The harness merges overrides into a registered task only inside an inline group.
        spec = name if local is None else {"group": "sparseforge", "task": [_override(name, local, form)]}
        try:
            loaded = manager.load([spec])["tasks"]
            if name in loaded and local is not None:
                _check_answers(loaded[name], limit)
        except (OSError, *misfit) as error:
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            where = f"--tasks {name}" if local is None else f"--data {local.place}"
            raise ValueError(f"{where}: the data does not fit {name} ({said})") from error
        if name not in loaded:
            raise ValueError(f"--tasks {name}: a group; name tasks of it, like {', '.join(list(loaded)[:3])}")
        by_name[name] = loaded[name]
        if form is not None and form.note:
            notes.append(f"{name}: {form.note}")
    return LoadedTasks(manager, by_name, notes)


def _form(task: str, local: Rows) -> Form | None:
    """The form of local rows; None for a task that is not in `FORMS`.

    Raises:
        ValueError: the rows have no known form of the task.
    """
    if task not in FORMS:
        return None
    found = local.rows.column_names
    for form in FORMS[task]:
        if set(found) >= set(form.columns):
            return form
    own = FORMS[task][0].columns
    lacking = ", ".join(column for column in own if column not in found)
    others = "".join(f", or {', '.join(form.columns)}" for form in FORMS[task][1:])
    raise ValueError(
        f"--data {local.place}: its rows lack {lacking}, which {task} reads (they have {', '.join(found)}); "
        f"give rows with {', '.join(own)}{others}"
    )


def _override(task: str, local: Rows, form: Form | None) -> dict[str, Any]:
    return {
        "task": task,
        "custom_dataset": lambda **_: {"test": local.rows},
        "dataset_kwargs": None,
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        **({} if form is None else form.override),
    }


def _check_answers(task: Any, limit: int | None) -> None:
    """Refuse rows that the harness would count as wrong whatever a model says.

    Raises:
        ValueError: a row without an answer among its choices; what the task itself raises on a row is left as it is.
    """
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


def _task_manager(tasks: Iterable[str]) -> Any:
    """The harness' index of tasks. To read all its thousands of files takes many seconds; those of a task, none."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.__file__).parent / "tasks"
    folders = {root / _FOLDERS[task] if task in _FOLDERS else _folder_of(root, task) for task in tasks}
    present = [str(folder) for folder in folders if folder is not None and folder.is_dir()]
    manager = TaskManager(include_defaults=False, include_path=present)
    if not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager()
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"--tasks {task}: lm-eval knows no such task; `lm-eval ls tasks` lists them")
    return manager


def _folder_of(root: Path, task: str) -> Path | None:
    named = next(iter(root.glob(f"*/{task}.yaml")), None)
    return None if named is None else named.parent
