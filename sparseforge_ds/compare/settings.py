"""CONFIG of `sparseforge compare`: one model, one corpus, a grid of methods, seeds and budgets. Parsed strictly."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import NOT_OF_A_RUN, RunArguments

SelectAt = Literal["smallest", "each"]
Protocol = Literal["documents", "windows"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_OURS = (
    *("deepspeed", "model", "dataset", "text_field", "max_steps", "seq_length", "output_dir"),
    *("learning_rate", "save_every", "keep_checkpoints", "seed", "resume", "global_batch"),
)
"""Run flags that the grid decides."""
_FLAGS = tuple(field.name for field in fields(RunArguments) if field.name not in NOT_OF_A_RUN)
_IN_A_METHOD = ("flags", "learning_rates")
"""Keys of a method that do not belong to its `sparseforge` block."""


@dataclass(frozen=True)
class HeldOut:
    """A text to measure on, or a part of one."""

    path: str
    documents: tuple[int, int | None] = (0, None)
    """First document, and the one before which it ends; null: to the end."""


@dataclass(frozen=True)
class Method:
    """A column of the grid."""

    name: str
    block: dict[str, Any]
    """Its keys over the `sparseforge` block of the base."""
    flags: dict[str, Any]
    """Its run flags over those of all, like another `teacher`."""
    learning_rates: tuple[float, ...]


@dataclass(frozen=True)
class CompareConfig:
    """The file. Paths are read from its own folder, unless they are absolute or begin with a $VARIABLE."""

    model: str
    """The dense model, a folder or hub id; the baseline, and the start of every run."""
    train_text: str
    """What every run reads, in the same order for the same seed: `--dataset` of the launcher."""
    validation_text: HeldOut
    """Decides the learning rates, and nothing else."""
    test_text: HeldOut
    """What the result is measured on; it decides nothing."""
    base: dict[str, Any]
    """A DeepSpeed JSON, whose path CONFIG gives, or which stands in it."""
    methods: dict[str, Method]
    """Trained methods, by name: keys of the `sparseforge` block, and `flags` and `learning_rates` of their own."""
    learning_rates: tuple[float, ...]
    """The grid for each method."""
    seeds: tuple[int, ...]
    budgets: tuple[int, ...]
    """Optimizer steps."""
    one_shot: dict[str, Method]
    """Methods that prune and do not train: one run a seed, no budget, no learning rate."""
    select_at: SelectAt = "smallest"
    """The budget at which a learning rate is chosen: the smallest, for all; or each for itself."""
    selection_seed: int | None = None
    """Seed of the runs that choose the learning rate; null: the first of `seeds`."""
    reference: str | None = None
    """The method that all others are compared with, seed by seed; null: the first."""
    seq_length: int = 256
    batch: int = 8
    """Sequences of an optimizer step, over all ranks."""
    flags: dict[str, Any] | None = None
    """Run flags of every run, like {"warmup": 0.05}."""
    workers: int = 1
    """Runs at a time."""
    ranks: int = 1
    """Processes of a run."""
    threads: int | None = None
    """Threads of a process; null: OMP_NUM_THREADS, or the processors divided by workers and ranks."""
    save_every: int = 500
    """Steps between checkpoints, from which an interrupted run goes on."""
    points: int = 40
    """Measurements of mask values in a run, and half as many of the gap, which cost two forwards each; 0: none."""
    text_field: str = "text"
    """Field of a record that holds the text."""
    dtype: str = "auto"
    """Of every model that is measured, the dense one too; auto: what the dense model is stored in."""
    protocol: Protocol | None = None
    """How perplexity is measured (sparseforge_ds.evaluate.perplexity); null: documents for .jsonl, else windows."""
    evaluation_length: int | None = None
    """Tokens of a window, or of a document at most; null: what the model can."""
    evaluation_batch: int = 8
    keep_models: bool = True
    """Whether the exported model of every run that counts stays."""

    @property
    def selection_budgets(self) -> tuple[int, ...]:
        """Budgets at which learning rates are chosen."""
        return self.budgets if self.select_at == "each" else self.budgets[:1]

    @property
    def first_seed(self) -> int:
        """Seed of the runs that choose."""
        return self.seeds[0] if self.selection_seed is None else self.selection_seed

    @property
    def compared_with(self) -> str:
        """Name of the reference."""
        return next(iter(self.methods)) if self.reference is None else self.reference

    def block(self, method: Method, steps: int) -> dict[str, Any]:
        """The `sparseforge` block of a run."""
        every = max(1, steps // self.points) if self.points and steps else 0
        watched = {"monitor": {"histograms_every": every, "gap_every": 2 * every}}
        return {**_merge(_merge(watched, self.base.get("sparseforge", {})), method.block), "max_steps": steps}


def read_config(path: str) -> CompareConfig:
    """The checked file.

    Raises:
        ValueError: it is missing, no JSON, has an unknown key, or a value that cannot work.
    """
    content = _read_json(path, "CONFIG")
    names = [item.name for item in fields(CompareConfig)]
    for key in content:
        if key not in names:
            (near,) = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            raise ValueError(f"{path}: unknown key {key!r}; did you mean {near!r}?")
    optional = {"one_shot": {}, **{f.name: f.default for f in fields(CompareConfig) if f.default is not MISSING}}
    for name in names:
        if name not in content and name not in optional:
            raise ValueError(f"{path}: no {name!r}; see launch/compare_stories.json for an example")
    try:
        config = CompareConfig(**_convert(optional | content, Path(path).parent))
        _check(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def _convert(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    for name in ("text_field", "dtype"):
        content[name] = _expand(_is(content[name], str, name, "a string"), name)
    for name in ("model", "train_text"):
        content[name] = _place(_is(content[name], str, name, "a string"), name, folder)
    for name in ("validation_text", "test_text"):
        content[name] = _held_out(content[name], name, folder)
    for name in ("seq_length", "batch", "workers", "ranks", "save_every", "evaluation_batch"):
        content[name] = _integer(content[name], name, 0 if name == "save_every" else 1)
    content["points"] = _integer(content["points"], "points", 0)
    for name in ("threads", "evaluation_length", "selection_seed"):
        if content[name] is not None:
            content[name] = _integer(content[name], name, 0 if name == "selection_seed" else 1)
    for name in ("seeds", "budgets"):
        least = 0 if name == "seeds" else 1
        content[name] = tuple(_integer(value, name, least) for value in _some(content[name], name))
    content["budgets"] = tuple(sorted(content["budgets"]))
    content["learning_rates"] = _rates(content["learning_rates"], "learning_rates")
    content["flags"] = _flags(content["flags"], "flags", folder)
    _is(content["keep_models"], bool, "keep_models", "true or false")
    for name, options in (("select_at", get_args(SelectAt)), ("protocol", (*get_args(Protocol), None))):
        if content[name] not in options:
            raise ValueError(f"{name} = {json.dumps(content[name])}: use one of {', '.join(map(json.dumps, options))}")
    if isinstance(content["base"], str):
        content["base"] = _read_json(_place(content["base"], "base", folder, file=True), "base")
    _is(content["base"], dict, "base", "the path of a DeepSpeed JSON, or such an object")
    _is(content["base"].get("sparseforge", {}), dict, "base.sparseforge", "an object")
    for name in ("methods", "one_shot"):
        entries = _is(content[name], dict, name, "an object of methods by name")
        rates = content["learning_rates"]
        content[name] = {key: _method(key, value, rates, name, folder) for key, value in entries.items()}
    return content


def _check(config: CompareConfig) -> None:
    if not config.methods:
        raise ValueError("methods: name at least one")
    if both := sorted(set(config.methods) & set(config.one_shot)):
        raise ValueError(f"{both[0]!r} stands in methods and in one_shot; give one of them another name")
    for name in ("seeds", "budgets", "learning_rates"):
        values = getattr(config, name)
        if len(set(values)) != len(values):
            raise ValueError(f"{name} = {list(values)}: one value stands there twice")
    if config.reference is not None and config.reference not in config.methods:
        raise ValueError(f"reference = {config.reference!r}: use one of the methods, {', '.join(config.methods)}")
    if config.batch % config.ranks:
        raise ValueError(f"batch = {config.batch} cannot be divided over ranks = {config.ranks}")
    patterns = set()
    for where, method, steps in (
        *(("methods", method, steps) for method in config.methods.values() for steps in config.budgets),
        *(("one_shot", method, one_shot_steps(method)) for method in config.one_shot.values()),
    ):
        try:
            patterns.add(SparseForgeConfig.from_dict(config.block(method, steps)).pattern)
        except ValueError as error:
            raise ValueError(f"{where}.{method.name} with {steps} steps: {error}") from None
    if len(patterns) != 1:
        raise ValueError(f"methods of different patterns ({', '.join(sorted(patterns))}): compare one at a time")


def one_shot_steps(method: Method) -> int:
    """Steps of a run that is not to train: what its block says, or none.

    A preset with a fixed mask is a trainer like any other and needs a step; its learning rate is then too small to
    matter.
    """
    return int(method.block.get("max_steps", 0 if "method" in method.block else 1))


def _method(name: str, entry: Any, rates: tuple[float, ...], where: str, folder: Path) -> Method:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}: {name!r} is to be the name of a folder; use letters, digits, _ . and +")
    entry = _is(entry, dict, f"{where}.{name}", "an object with keys of the sparseforge block")
    if where == "one_shot" and "learning_rates" in entry:
        raise ValueError(f"one_shot.{name}.learning_rates: it does not train; remove it")
    return Method(
        name,
        {key: value for key, value in entry.items() if key not in _IN_A_METHOD},
        _flags(entry.get("flags"), f"{where}.{name}.flags", folder),
        _rates(entry.get("learning_rates", list(rates)), f"{where}.{name}.learning_rates"),
    )


def _flags(value: Any, where: str, folder: Path) -> dict[str, Any]:
    found = _is({} if value is None else value, dict, where, "an object of run flags")
    for flag, given in found.items():
        if flag in _OURS:
            raise ValueError(f"{where}.{flag}: the grid decides it; remove it")
        if flag not in _FLAGS:
            (near,) = difflib.get_close_matches(flag, _FLAGS, n=1, cutoff=0.0)
            raise ValueError(f"{where}.{flag}: no flag of a run; did you mean {near!r}?")
        if not isinstance(given, (str, int, float)):
            raise ValueError(f"{where}.{flag} = {json.dumps(given)}: use a string, a number, or true")
    placed = {flag: _expand(given, where) if isinstance(given, str) else given for flag, given in found.items()}
    if isinstance(found.get("teacher"), str):
        placed["teacher"] = _place(found["teacher"], f"{where}.teacher", folder)
    return placed


def _held_out(value: Any, where: str, folder: Path) -> HeldOut:
    if isinstance(value, str):
        return HeldOut(_place(value, where, folder))
    value = _is(value, dict, where, 'a path, or {"path": ..., "documents": [first, end]}')
    if unknown := sorted(set(value) - {"path", "documents"}):
        raise ValueError(f"{where}.{unknown[0]}: unknown key; there are path and documents")
    path = _place(_is(value.get("path"), str, f"{where}.path", "a path"), where, folder)
    span = value.get("documents", [0, None])
    whole = isinstance(span, list) and len(span) == 2 and all(type(n) is int or n is None for n in span)
    if not whole or span[0] is None or span[0] < 0 or (span[1] is not None and span[1] <= span[0]):
        raise ValueError(f"{where}.documents = {json.dumps(span)}: give [first, end] with 0 <= first < end, or null")
    return HeldOut(path, (span[0], span[1]))


def _rates(value: Any, where: str) -> tuple[float, ...]:
    found = _some(value, where)
    for rate in found:
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise ValueError(f"{where}: {json.dumps(rate)} is no learning rate; use numbers > 0")
    return tuple(sorted(float(rate) for rate in found))


def _some(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} = {json.dumps(value)}: give a list with at least one value")
    return value


def _integer(value: Any, where: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{where} = {json.dumps(value)}: use an integer >= {least}")
    return value


def _is(value: Any, kind: type, where: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} = {json.dumps(value)}: give {what}")
    return value


def _expand(text: str, where: str) -> str:
    expanded = os.path.expandvars(text)
    if left := re.search(r"\$\{?\w+\}?", expanded):
        raise ValueError(f"{where} = {text!r}: the environment has no {left[0]}; export it, or write the path")
    return expanded


def _place(text: str, where: str, folder: Path, file: bool = False) -> str:
    """A path of the file, from the working directory; what names none, like a hub id or a built-in text, as it is."""
    expanded = _expand(text, where)
    kind, path = ("stream:", expanded[7:]) if expanded.startswith("stream:") else ("", expanded)
    if Path(path).is_absolute() or text.removeprefix("stream:").startswith("$"):
        return expanded
    there = folder / path
    if there.exists():
        return f"{kind}{there}"
    if Path(path).exists():  # which it once meant
        raise ValueError(
            f"{where} = {text!r}: paths are read from the folder of CONFIG, where there is none; "
            f"write {kind + os.path.relpath(path, folder)!r}"
        )
    is_file = file or path.startswith(".") or Path(path).suffix in (".json", ".jsonl", ".txt")
    return f"{kind}{there}" if is_file else expanded


def _read_json(path: str, what: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} {path}: not a readable JSON file ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{what} {path}: not a JSON object with keys")
    return content


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged
