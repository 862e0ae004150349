"""Columns of a comparison from tasks of lm-evaluation-harness: accuracy, length of answers, and items that are lost."""

from __future__ import annotations

import copy
import threading
from itertools import islice
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.evaluate.harness import LoadedTasks, load_tasks
from sparseforge_ds.evaluate.paper_accuracies import CUT, LOST, TOKENS, is_accuracy, with_ending
from sparseforge_ds.evaluate.perplexity import max_positions
from sparseforge_ds.evaluate.task_scores import (
    TaskScores,
    TaskSettings,
    check_task_settings,
    compare_answers,
    measure,
    parse_arguments,
    require_generation,
    wrap_model,
)
from sparseforge_ds.extras.studies.settings import MeasuredTasks
from sparseforge_ds.extras.studies.texts import content_hash
from sparseforge_ds.model.registration import load_config

_FIGURES = {"accuracy": "", "lost": "lost", TOKENS: "tokens", CUT: "cut"}
"""Figures of a task, and what stands behind its name in the head of their column."""


def task_columns(tasks: MeasuredTasks | None) -> dict[str, str]:
    """Return the names of all figures of the tasks, with the heads of their columns."""
    names = () if tasks is None else tasks.names
    return {f"task_{name}_{figure}": f"{name} {head}".strip() for name in names for figure, head in _FIGURES.items()}


class TaskColumns:
    """Measurements of models on the tasks of a comparison. Several threads may use it, one after the other.

    Args:
        tasks: the tasks.
        batch_size: rows of one forward pass.
        model: name of the dense model.
        tokenizer: its tokenizer.

    Raises:
        ValueError: a task cannot be loaded, or the model cannot answer it as the settings ask.
    """

    def __init__(self, tasks: MeasuredTasks, batch_size: int, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._batch_size = batch_size
        self._tokenizer = copy.deepcopy(tokenizer)  # the harness changes its padding, while other threads read texts
        self._settings = TaskSettings(
            limit=tasks.limit,
            gen_kwargs=parse_arguments(tasks.gen_kwargs),
            apply_chat_template=tasks.apply_chat_template,
            confirm_run_unsafe_code=tasks.confirm_run_unsafe_code,
        )
        self._tasks = load_tasks(
            tasks.names, tasks.include_path, tasks.limit, tasks.num_fewshot, tasks.confirm_run_unsafe_code
        )
        # What a measurement would refuse shows now, and not after hours of runs. Keys are called as the flags are.
        try:
            for name, task in self._tasks.by_name.items():
                if task.OUTPUT_TYPE == "loglikelihood_rolling":
                    raise ValueError(f"{name} measures perplexity, and has no right answers; name a text instead")
            require_generation(self._tasks, num_fewshot=tasks.num_fewshot, gen_kwargs=tasks.gen_kwargs)
            positions = max_positions(load_config(model, model))
            check_task_settings(self._tasks, self._settings, model, tokenizer, positions)
        except ValueError as error:
            raise ValueError(f'"tasks" of the comparison: {error}') from None
        self.identity = _hash_of_rows(self._tasks, tasks.limit)
        """Hash of what is asked and how: settings of the tasks, and their rows."""
        self._dense_scores: TaskScores | None = None
        self._one_at_a_time = threading.Lock()  # the tasks of the harness keep the requests of a measurement

    def measure(self, model: PreTrainedModel, dense: PreTrainedModel) -> dict[str, Any]:
        """Return the figures of a model by the names of `task_columns`; the dense model itself has none lost."""
        with self._one_at_a_time:
            if self._dense_scores is None:
                self._dense_scores = self._run(dense)
            scores = self._dense_scores if model is dense else self._run(model)
        compare_answers(scores, self._dense_scores)
        figures: dict[str, Any] = {}
        for task, metrics in scores.metrics.items():
            accuracy = next(filter(is_accuracy, metrics))
            keys = {"accuracy": accuracy, "lost": with_ending(accuracy, LOST), TOKENS: TOKENS, CUT: CUT}
            figures |= {f"task_{task}_{name}": metrics[key] for name, key in keys.items() if key in metrics}
        return figures

    def _run(self, model: PreTrainedModel) -> TaskScores:
        return measure(wrap_model(model, self._tokenizer, self._batch_size), self._tasks, self._settings)


def _hash_of_rows(tasks: LoadedTasks, limit: int | None) -> str:
    """Return a hash of each task's settings, functions among them by their source, and of its first `limit` rows."""
    asked = [
        (name, repr(sorted(task.config.to_dict().items())), [repr(row) for row in islice(task.eval_docs, limit)])
        for name, task in tasks.by_name.items()
    ]
    return content_hash(asked)
