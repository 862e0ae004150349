"""Runs of a comparison: their list, their names and their commands."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sparseforge_ds.config.arguments import EMBEDDED_TEXT
from sparseforge_ds.extras.studies.settings import CompareConfig, Method, OneShot


@dataclass(frozen=True)
class Run:
    """One training of a method. Its name is unique within a comparison."""

    method: Method
    learning_rate: float
    seed: int
    steps: int
    decay: float | None = None
    """Value of `method.decay` in place of the block's; None: the block's."""

    @property
    def name(self) -> str:
        """File stem of this run."""
        rates = f"-lr{self.learning_rate:g}"
        rates += "" if self.decay is None else f"-decay{self.decay:g}"
        return f"{self.method.name}{rates}-seed{self.seed}-steps{self.steps}"

    def deepspeed(self, config: CompareConfig) -> dict[str, Any]:
        """Return the content of the run's DeepSpeed JSON."""
        content = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", **config.base}
        return {
            **content,
            "train_batch_size": config.batch,
            "sparseforge": config.block(self.method, self.steps, self.decay),
        }

    def flags(self, config: CompareConfig) -> dict[str, Any]:
        """Return the run flags that decide the result."""
        return {
            "model": config.model,
            "dataset": config.train_text,
            "text_field": config.text_field,
            "seq_length": config.seq_length,
            "learning_rate": repr(self.learning_rate),
            "seed": self.seed,
            **(config.flags or {}),
            **self.method.flags,
        }

    def arguments(self, config: CompareConfig, folder: Path) -> list[str]:
        """Return the arguments of `launch/train.py` for a run folder."""
        paths = {"deepspeed": folder.with_name(f"{folder.name}.json"), "output_dir": folder}
        saves = {"save_every": config.save_every, "keep_checkpoints": 1}
        flags: dict[str, Any] = {**paths, **self.flags(config), **saves}
        words = []
        for flag, value in flags.items():
            if value is not None and value is not False:  # None: the flag's own default
                values = value if isinstance(value, list) else [] if value is True else [value]
                words += [f"--{flag}", *map(str, values)]
        return words

    def command(self, config: CompareConfig, folder: Path) -> str:
        """Return the shell command that repeats the run."""
        words = ["deepspeed", "--num_gpus", str(config.ranks), "launch/train.py", *self.arguments(config, folder)]
        return shlex.join(words)


@dataclass(frozen=True)
class Pruning:
    """One model of `sparseforge prune`. Its name is unique within a comparison."""

    method: OneShot
    seed: int

    @property
    def name(self) -> str:
        """File stem of this model."""
        return f"{self.method.name}-seed{self.seed}-steps0"

    def text(self, config: CompareConfig) -> str:
        """Return the training text by the name that `sparseforge prune` has for it."""
        return "stdlib:train" if config.train_text == EMBEDDED_TEXT else config.train_text.removeprefix("stream:")

    def settings(self, config: CompareConfig) -> dict[str, Any]:
        """Return everything that decides the result, as plain JSON types."""
        return {
            "model": config.model,
            "text": self.text(config),
            "text_field": config.text_field,
            "seq_length": config.seq_length,
            "block": config.one_shot_block(self.method) | {"seed": self.seed},
            "start": asdict(self.method.start),
            "any_family": self.method.any_family,
        }

    def command(self, config: CompareConfig, out: Path) -> str:
        """Return the shell command that repeats it."""
        settings = self.settings(config)
        block_start = settings["start"]
        flags = {key: settings[key] for key in ("text", "seq_length")}
        flags["text_field"] = None if config.text_field == "text" else config.text_field
        flags |= {key: settings["block"].get(key) for key in ("pattern", "exclude")}
        if block_start["epochs"]:
            flags["seed"] = settings["block"]["seed"]
        of_training = ("soft", "rate", "batch") if block_start["epochs"] else ()
        flags |= {key: block_start[key] for key in ("mask", "tokens", "epochs", *of_training)}
        words = ["sparseforge", "prune", config.model, str(out)]
        for flag, value in flags.items():
            if value not in (None, (), []):
                words += [f"--{flag}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
        command = shlex.join([*words, "--any_family"] if settings["any_family"] else words)
        # Keys of the block for which `sparseforge prune` has no flag.
        others = {key: settings["block"][key] for key in ("include", "allow_dense") if settings["block"].get(key)}
        return f"{command}  # with {json.dumps(others)} in its block" if others else command


def selection_runs(config: CompareConfig) -> list[Run]:
    """Return the runs that decide learning rates and decays; methods with one candidate have none."""
    grids = [_grid(config, method, steps) for steps in config.deciding_budgets for method in config.methods.values()]
    return [run for grid in grids if len(grid) > 1 for run in grid]


def prunings(config: CompareConfig) -> list[Pruning]:
    """Return the models that are pruned without a run; a seed decides only the order of a training's sequences."""
    return [
        Pruning(entry, seed)
        for entry in config.one_shot.values()
        for seed in (config.seeds if entry.epochs else config.seeds[:1])
    ]


def result_runs(config: CompareConfig, chosen: Mapping[tuple[str, int], Run]) -> list[Run]:
    """Return the runs whose results are reported: the chosen ones of every method and budget, with all seeds."""
    return [
        replace(chosen[name, steps], seed=seed)
        for steps in config.budgets
        for seed in config.seeds
        for name in config.methods
    ]


def choose_rates(config: CompareConfig, validation: Mapping[str, float]) -> dict[tuple[str, int], Run]:
    """Choose the learning rate and decay of every method at every budget, by runs with the first seed.

    Args:
        config: the comparison.
        validation: the deciding measurement (`choose_by`) by run name; infinite if the run diverged.

    Returns:
        The run with the lowest measurement, by method and budget. Budgets without runs of their own take the choice at
        the smallest budget.

    Raises:
        ValueError: all runs of a method have diverged.
    """
    chosen = {}
    for name, method in config.methods.items():
        for steps in config.deciding_budgets:
            best = min(_grid(config, method, steps), key=lambda run: validation.get(run.name, 0.0))
            if math.isinf(validation.get(best.name, 0.0)):
                raise ValueError(f"methods.{name}: diverges at all learning rates with {steps} steps; add lower ones")
            chosen[name, steps] = best
        for steps in config.budgets:
            chosen.setdefault((name, steps), replace(chosen[name, config.budgets[0]], steps=steps))
    return chosen


def _grid(config: CompareConfig, method: Method, steps: int) -> list[Run]:
    """Return a run with the first seed for every learning rate and decay of a method."""
    return [
        Run(method, rate, config.seeds[0], steps, decay=decay)
        for rate in method.learning_rates
        for decay in method.decays or (None,)
    ]


AnyRun = TypeVar("AnyRun", Run, Run | Pruning)


def at_the_edge(grid: Sequence[float], value: float | None) -> bool:
    """Return True if a better value may lie outside a sorted grid; 0 is the least possible value."""
    return len(grid) > 1 and (value == grid[-1] or value == grid[0] != 0)


def unique(runs: Iterable[AnyRun]) -> list[AnyRun]:
    """Return the runs without repetitions, in their order."""
    return list({run.name: run for run in runs}.values())
