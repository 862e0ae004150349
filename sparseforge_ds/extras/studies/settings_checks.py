"""Checks of a comparison's settings beyond their types, made before anything is trained."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sparseforge_ds.config import SparseForgeConfig

if TYPE_CHECKING:
    from sparseforge_ds.extras.studies.settings import CompareConfig

_MINIMUM = {
    **dict.fromkeys(("seq_length", "batch", "workers", "ranks", "threads", "budgets"), 1),
    **dict.fromkeys(("evaluation_length", "evaluation_batch"), 1),
    **dict.fromkeys(("seeds", "save_every", "points"), 0),
}
"""The smallest value of every integer."""


def check_comparison(config: CompareConfig) -> None:
    """Raise ValueError for values that types allow and a study cannot work with."""
    # Integers have a minimum.
    for name, minimum in _MINIMUM.items():
        values = getattr(config, name)
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and value < minimum:
                raise ValueError(f"{name} = {value}: use an integer >= {minimum}")
    # Values of the grid become names of runs, with six digits.
    lists = {name: getattr(config, name) for name in ("seeds", "budgets", "learning_rates")}
    lists |= {f"methods.{method.name}.learning_rates": method.learning_rates for method in config.methods.values()}
    lists |= {f"methods.{name}.decays": method.decays for name, method in config.methods.items() if method.decays}
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name} = []: give a list of at least one value")
        if len({f"{value:g}" for value in values}) != len(values):
            raise ValueError(f"{name} = {list(values)}: two values are the same to six digits; remove one")
        if name.endswith("learning_rates") and min(values) <= 0:
            raise ValueError(f"{name} = {list(values)}: {min(values):g} is no learning rate; use numbers > 0")
    # Tasks ask something.
    if config.tasks is not None:
        for name, minimum in (("limit", 1), ("num_fewshot", 0)):
            value = getattr(config.tasks, name)
            if value is not None and value < minimum:
                raise ValueError(f"tasks.{name} = {value}: use null or an integer >= {minimum}")
    # Texts have names and ranges.
    held_out = {"validation_text": config.validation_text, "test_text": config.test_text}
    held_out |= {f"other_texts.{name}": text for name, text in config.other_texts.items()}
    if taken := sorted({"validation", "test"} & set(config.other_texts)):
        raise ValueError(f"other_texts.{taken[0]}: a text has this name already; use another")
    for name, text in held_out.items():
        first, end = text.documents
        if first < 0 or (end is not None and end <= first):
            raise ValueError(f"{name}.documents = {[first, end]}: use 0 <= first < end, or null for the end")
    # Methods have distinct names, and a batch that the ranks can share.
    if not config.methods:
        raise ValueError("methods: name at least one")
    if common := sorted(set(config.methods) & set(config.one_shot)):
        raise ValueError(f"{common[0]!r} is a name in methods and in one_shot; give one of them another name")
    if config.reference is not None and config.reference not in config.methods:
        raise ValueError(f"reference = {config.reference!r}: use one of the methods, {', '.join(config.methods)}")
    if config.batch % config.ranks:
        raise ValueError(f"batch = {config.batch} cannot be divided over ranks = {config.ranks}; use a multiple")
    # Every block must parse at every budget.
    for method, steps in itertools.product(config.methods.values(), config.budgets):
        if "max_steps" in method.block:
            raise ValueError(f"methods.{method.name}.max_steps: budgets decide it; remove it")
        try:
            for decay in method.decays or (None,):
                SparseForgeConfig.from_dict(config.block(method, steps, decay)).check_length()
        except ValueError as error:
            raise ValueError(f"methods.{method.name} with {steps} steps: {error}") from None
    # The settings of `sparseforge prune` must parse, too.
    for entry in config.one_shot.values():
        try:
            SparseForgeConfig.from_dict(config.one_shot_block(entry))
            if (tokens := entry.start.tokens or 0) < config.seq_length:
                raise ValueError(f"tokens = {tokens}: less than one sequence of {config.seq_length}; use more")
        except ValueError as error:
            raise ValueError(f"one_shot.{entry.name}: {error}") from None
