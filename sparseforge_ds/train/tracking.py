"""Where metrics go beside the screen: the trackers of accelerate, among them TensorBoard, on rank 0.

What is said is the same for all. TensorBoard also gets histograms, and the settings as text; images go to those that
take them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker, get_available_trackers
from torch.utils.tensorboard.summary import hparams

from sparseforge_ds.model.loading_error import reason

NONE = "none"
_PACKAGES = {"comet_ml": "comet-ml"}
"""What to install for a tracker, where it is not its name."""
_ERRORS = {"wandb": "wandb.errors:Error", "mlflow": "mlflow.exceptions:MlflowException"}
"""Where a tracker's own errors derive from, where these are none of Python's."""


def check_trackers(names: Sequence[str]) -> None:
    """Whether there are such trackers, and they are installed.

    Raises:
        ValueError: one is not.
    """
    if NONE in names and len(set(names)) > 1:
        raise ValueError(f"--report_to {' '.join(names)}: none stands alone")
    for name in names:
        if name == NONE:
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join([*sorted(LOGGER_TYPE_TO_CLASS), NONE])
            raise ValueError(f"--report_to {name}: no such tracker; use {known}")
        theirs = LOGGER_TYPE_TO_CLASS[name].__module__ == GeneralTracker.__module__
        if theirs and name not in map(str, get_available_trackers()):
            raise ValueError(
                f"--report_to {name}: it is not installed; pip install {_PACKAGES.get(name, name)}, or leave it out"
            )


class Trackers:
    """The trackers of a run, started.

    Args:
        names: of `--report_to`.
        folder: the run folder.
        project: under which they file the run, where they have projects.
        start: steps already done: TensorBoard hides what an earlier start logged of later ones.

    Raises:
        ValueError: one cannot be started, above all because nobody is logged in.
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
            except _failures(name) as error:
                raise ValueError(
                    f"--report_to {name}: it cannot be started ({reason(error)}); log in, or give the key or "
                    "the address that its environment variables take, or leave it out"
                ) from None
            self._trackers.append(tracker)

    def settings(self, values: Mapping[str, Any], text: str, step: int) -> None:
        """The settings of the run: by name for tables of runs, and as text for people."""
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in values.items()
        }
        for tracker in self._trackers:
            if not isinstance(tracker, TensorBoardTracker):
                tracker.store_init_configuration(plain)
                continue
            lines = "\n".join(f"    {line}" for line in text.splitlines())
            table = "\n".join(f"| {name} | {value} |" for name, value in plain.items()).replace("||", "| |")
            tracker.tracker.add_text("run", f"{lines}\n\n| setting | value |\n|---|---|\n{table}", step)
            # In the run's own log: accelerate and SummaryWriter would make another one for every start.
            for summary in hparams(plain, {"loss/total": 0.0, "eval/perplexity": 0.0}):
                tracker.tracker.file_writer.add_summary(summary)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars that belong to one step."""
        for tracker in self._trackers:
            tracker.log(dict(scalars), step=step)

    def image(self, step: int, tag: str, image_HWC: np.ndarray) -> None:
        """A picture, of bytes; trackers that take no images do without."""
        for tracker in self._trackers:
            if isinstance(tracker, TensorBoardTracker):
                tracker.tracker.add_image(tag, image_HWC, step, dataformats="HWC")
            elif hasattr(tracker, "log_images"):
                tracker.log_images({tag: [image_HWC]}, step=step)

    def histogram(self, step: int, tag: str, counts: Sequence[int], edges: Sequence[float]) -> None:
        """Counts between edges."""
        centre = (np.asarray(edges[:-1]) + np.asarray(edges[1:])) / 2
        count = np.asarray(counts, dtype=np.float64)
        for tracker in self._trackers:
            if isinstance(tracker, TensorBoardTracker):
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

    def close(self) -> None:
        """Write everything out."""
        for tracker in self._trackers:
            tracker.finish()


def _failures(name: str) -> tuple[type[Exception], ...]:
    """What a tracker raises where it cannot be started: Python's own errors, or its package's."""
    module, _, error = _ERRORS.get(name, "builtins:OSError").partition(":")
    return (OSError, ValueError, RuntimeError, getattr(importlib.import_module(module), error))


def _make(name: str, folder: Path, project: str, start: int) -> Any:
    kind, run = LOGGER_TYPE_TO_CLASS[name], folder.resolve().name
    if kind is TensorBoardTracker:
        return kind("tensorboard", folder, purge_step=start + 1)
    named: dict[str, dict[str, Any]] = {
        "wandb": {"name": run, "dir": str(folder)},
        "trackio": {"name": run},
        "mlflow": {"run_name": run},
        "swanlab": {"experiment_name": run, "logdir": str(folder / "swanlab")},
        "clearml": {"task_name": run},
        "dvclive": {"dir": str(folder / "dvclive")},
    }
    where = [folder] if kind.requires_logging_directory else []
    return kind(project, *where, **named.get(name, {}))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by names with dots."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found
