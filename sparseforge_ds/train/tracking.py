"""Receivers of metrics beside the screen: the trackers of accelerate, among them TensorBoard, on rank 0.

All get the same metrics. TensorBoard also gets histograms, and the settings as text.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker, get_available_trackers
from torch.utils.tensorboard.summary import hparams

from sparseforge_ds.model.loading_error import reason

_LOG = logging.getLogger(__name__)
NONE = "none"
OWN_ERRORS = {"wandb": "wandb.Error", "mlflow": "mlflow.exceptions.MlflowException"}
"""Base classes of trackers' errors that are none of `OSError`, `ValueError` and `RuntimeError`."""


def check_trackers(names: Sequence[str]) -> None:
    """Reject names of trackers that do not exist or are not installed.

    Raises:
        ValueError: a name is unknown, its package is missing, or none stands beside others.
    """
    if NONE in names and len(set(names)) > 1:
        raise ValueError(f"--report_to {' '.join(names)}: none stands alone")
    for name in names:
        if name == NONE:
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join([*sorted(LOGGER_TYPE_TO_CLASS), NONE])
            raise ValueError(f"--report_to {name}: no such tracker; use {known}")
        # Others may have added trackers of their own to the table, of which accelerate knows no package.
        is_of_accelerate = LOGGER_TYPE_TO_CLASS[name].__module__ == GeneralTracker.__module__
        if is_of_accelerate and name not in map(str, get_available_trackers()):
            raise ValueError(f"--report_to {name}: it is not installed; install it, or leave it out")


class Trackers:
    """The trackers of a run, started.

    Args:
        names: values of `--report_to`.
        folder: the run folder.
        project: name of the project that the run belongs to, for trackers that have projects.
        start: steps already done; TensorBoard hides later steps that an earlier launch has logged.

    Raises:
        ValueError: a tracker cannot be started, above all because nobody is logged in.
    """

    def __init__(self, names: Sequence[str], folder: Path, project: str, start: int) -> None:
        self._trackers: list[Any] = []
        for name in dict.fromkeys(name for name in names if name != NONE):
            threads = torch.get_num_threads()
            PartialState()  # accelerate's loggers want it
            torch.set_num_threads(threads)
            try:
                tracker = _make(name, folder, project, start)
                tracker.main_process_only = False  # this is rank 0; accelerate would ask its own state
                tracker.start()
            except _errors(name) as error:
                raise ValueError(
                    f"--report_to {name}: it cannot be started ({reason(error)}); log in, or give the key or "
                    "the address that its environment variables take, or leave it out"
                ) from None
            self._trackers.append(tracker)

    def settings(self, values: Mapping[str, Any], text: str, step: int) -> None:
        """Log the settings of the run: by name for tables of runs, and as text for people."""
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in values.items()
        }

        def write(tracker: Any) -> None:
            """Give the settings to one tracker."""
            if not isinstance(tracker, TensorBoardTracker):
                tracker.store_init_configuration(plain)
                return
            lines = "\n".join(f"    {line}" for line in text.splitlines())
            table = "\n".join(f"| {name} | {value} |" for name, value in plain.items()).replace("||", "| |")
            tracker.tracker.add_text("run", f"{lines}\n\n| setting | value |\n|---|---|\n{table}", step)
            # In the run's own log: accelerate and SummaryWriter would make another one for every launch.
            for summary in hparams(plain, {"loss/total": 0.0, "eval/perplexity": 0.0}):
                tracker.tracker.file_writer.add_summary(summary)

        self._for_each("with the settings", write)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log scalars of one step."""
        self._for_each(f"at step {step}", lambda tracker: tracker.log(dict(scalars), step=step))

    def histogram(self, step: int, tag: str, counts: Sequence[int], edges: Sequence[float]) -> None:
        """Log a histogram, as counts between edges, to TensorBoard."""
        centre = (np.asarray(edges[:-1]) + np.asarray(edges[1:])) / 2
        count = np.asarray(counts, dtype=np.float64)

        def write(tracker: Any) -> None:
            """Give the histogram to one tracker, if it takes any."""
            if not isinstance(tracker, TensorBoardTracker):
                return
            tracker.tracker.add_histogram_raw(
                tag,
                min=float(edges[0]),
                max=float(edges[-1]),
                num=int(count.sum()),
                sum=float((count * centre).sum()),
                sum_squares=float((count * centre**2).sum()),
                bucket_limits=[float(edge) for edge in edges[1:]],
                bucket_counts=count.tolist(),
                global_step=step,
            )

        self._for_each(f"at step {step}", write)

    def close(self) -> None:
        """Write everything out."""
        self._for_each("at the end", lambda tracker: tracker.finish())

    def _for_each(self, moment: str, call: Callable[[Any], object]) -> None:
        """Call a function with each tracker; one that fails is named, and left out from then on: training goes on."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except _errors(tracker.name) as error:
                _LOG.warning(
                    f"--report_to {tracker.name}: failed {moment} ({reason(error)}); it gets no more of this run"
                )
                self._trackers.remove(tracker)


def _errors(name: str) -> tuple[type[Exception], ...]:
    """Return the classes of errors that a tracker raises, with those of its own package."""
    module, _, class_name = OWN_ERRORS.get(name, "").rpartition(".")
    classes = (OSError, ValueError, RuntimeError)
    return (*classes, getattr(sys.modules[module], class_name)) if module in sys.modules else classes


def _make(name: str, folder: Path, project: str, start: int) -> Any:
    """Make a tracker, which takes the run's name and the rest from its own environment variables."""
    kind = LOGGER_TYPE_TO_CLASS[name]
    if kind is TensorBoardTracker:
        return kind("tensorboard", folder, purge_step=start + 1)
    return kind(project, *([folder] if kind.requires_logging_directory else []))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one table, with dots in the names."""
    table: dict[str, Any] = {}
    for name, value in settings.items():
        is_nested = isinstance(value, Mapping) and value
        table |= flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return table
