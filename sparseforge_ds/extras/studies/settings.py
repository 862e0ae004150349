"""CONFIG of `sparseforge compare`: one model, one corpus, a grid of methods, seeds and budgets. Parsed strictly."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import NOT_OF_A_RUN, RunArguments
from sparseforge_ds.config.block import method_name
from sparseforge_ds.config.json_file import read_json
from sparseforge_ds.config.strict import build, merge
from sparseforge_ds.evaluate.scored_text import documents_belong_together

Protocol = Literal["documents", "windows"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_OURS = (
    *("deepspeed", "model", "dataset", "text_field", "max_steps", "epochs", "seq_length", "output_dir", "allow_dense"),
    *("learning_rate", "save_every", "keep_checkpoints", "seed", "resume", "global_batch"),
    *NOT_OF_A_RUN,
)
"""Run flags that the grid or the base decides, or that are none of a run."""
_LEAST = {
    **dict.fromkeys(("seq_length", "batch", "workers", "ranks", "threads", "budgets"), 1),
    **dict.fromkeys(("evaluation_length", "evaluation_batch"), 1),
    **dict.fromkeys(("seeds", "save_every", "points"), 0),
}
"""The smallest value of every integer."""


@dataclass(frozen=True)
class HeldOut:
    """A text to measure on, or a part of one."""

    path: str
    documents: tuple[int, int | None] = (0, None)
    """First document, and the one before which it ends; null: to the end."""
    protocol: Protocol | None = None
    """How perplexity is measured on it, "documents" or "windows" (`evaluate.perplexity`); null: windows where documents
    belong together, as in a .txt file."""


@dataclass(frozen=True)
class Method:
    """A column of the grid."""

    name: str
    block: dict[str, Any]
    """Its keys over the `sparseforge` block of the base."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Its run flags over those of all, like another `teacher`."""
    learning_rates: tuple[float, ...] = ()
    """Instead of those of all."""
    decays: tuple[float, ...] = ()
    """Values of `method.decay` to choose from together with the learning rate (ast, cast, sr_ste)."""


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
    """The grid for each method, of which one is chosen with the first seed, at the smallest budget."""
    seeds: tuple[int, ...]
    """Of the order of the text, and of whatever a method draws; the first one decides the learning rates."""
    budgets: tuple[int, ...]
    """Optimizer steps."""
    choose_at_each_budget: bool = False
    """Whether every budget has a learning rate, and decay, chosen by runs of its own length."""
    choose_by: Literal["perplexity", "kl"] = "perplexity"
    """The figure of the validation text that decides a learning rate: its perplexity, or the KL divergence to the dense
    model, which no method can lower by learning the text."""
    other_texts: dict[str, HeldOut] = field(default_factory=dict)
    """More texts that results are measured on, by the name of their column; they decide nothing."""
    one_shot: dict[str, Method] = field(default_factory=dict)
    """Methods that prune and do not train: one run a seed, no budget, no learning rate."""
    reference: str | None = None
    """The method that all others are compared with, seed by seed; null: the first."""
    seq_length: int = 256
    """Tokens of a sequence."""
    batch: int = 8
    """Sequences of an optimizer step, over all ranks."""
    flags: dict[str, Any] = field(default_factory=dict)
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
    """Measurements of mask values in a run's TensorBoard log, and half as many of the gap, which cost two forwards
    each; 0: none."""
    text_field: str = "text"
    """Field of a record that holds the text."""
    evaluation_length: int | None = None
    """Tokens of a window, or of a document at most; null: what the model can."""
    evaluation_batch: int = 8
    """Sequences of one forward of an evaluation."""
    keep_models: bool = True
    """Whether the exported model of every run that counts stays."""

    @property
    def compared_with(self) -> str:
        """Name of the reference."""
        return next(iter(self.methods)) if self.reference is None else self.reference

    @property
    def pruned(self) -> SparseForgeConfig:
        """The block of the reference, whose pattern and layers the magnitude baseline has."""
        return SparseForgeConfig.from_dict(self.block(self.methods[self.compared_with], self.budgets[0]))

    @property
    def patterns(self) -> set[str]:
        """Of all methods."""
        blocks = [self.block(method, self.budgets[0]) for method in self.methods.values()]
        blocks += [self.block(method, 0) for method in self.one_shot.values()]
        return {SparseForgeConfig.from_dict(block).pattern for block in blocks}

    @property
    def deciding_budgets(self) -> tuple[int, ...]:
        """Budgets at which learning rates and decays are chosen."""
        return self.budgets if self.choose_at_each_budget else self.budgets[:1]

    def block(self, method: Method, steps: int, decay: float | None = None) -> dict[str, Any]:
        """The `sparseforge` block of a run; a decay of its own takes the place of the method's."""
        every = max(1, steps // self.points) if self.points and steps else 0
        watched = {"monitor": {"histograms_every": every, "gap_every": 2 * every}}
        block = merge(merge(watched, self.base.get("sparseforge", {})), method.block)
        if decay is not None:
            named = block["method"] if isinstance(block.get("method"), dict) else {"name": method_name(block)}
            block["method"] = {**named, "decay": decay}
        return {**block, "max_steps": steps}


def read_config(path: str) -> CompareConfig:
    """The checked file. Raises ValueError where it has an unknown key, or a value that cannot work."""
    if not Path(path).exists():
        raise ValueError(f"CONFIG {path}: no such file; give one like studies/stories.json")
    content = read_json(path, f"CONFIG {path}")
    try:
        if not isinstance(content, dict):
            raise ValueError("not a JSON object with keys")
        folder = Path(path).parent
        if isinstance(content.get("base"), str):
            base = _place(content["base"], "base", folder)
            content["base"] = read_json(base, f"base {base}")
        for kind in ("methods", "one_shot"):
            if isinstance(content.get(kind), dict):
                content[kind] = {name: _split(kind, name, entry) for name, entry in content[kind].items()}
        config = _located(build(CompareConfig, content, "CONFIG"), folder)
        _check(config)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).replace('CONFIG.', '')}") from None
    return config


def _split(kind: str, name: str, entry: Any) -> Any:
    """A method's run flags, learning rates and decays apart from the keys of its block."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{kind}: {name!r} is to be the name of a folder; use letters, digits, _ . and +")
    if not isinstance(entry, dict):
        return entry
    for key in ("learning_rates", "decays"):
        if key in entry and (kind == "one_shot" or not entry[key]):
            why = "it does not train" if kind == "one_shot" else "none is given"
            raise ValueError(f"{kind}.{name}.{key}: {why}; remove it")
    own = {key: entry[key] for key in ("flags", "learning_rates", "decays") if key in entry}
    return {"name": name, "block": {key: value for key, value in entry.items() if key not in own}, **own}


def _located(config: CompareConfig, folder: Path) -> CompareConfig:
    """With paths as seen from the working directory, sorted budgets and rates, and every method's own rates."""

    def method(kind: str, found: Method) -> Method:
        rates = tuple(sorted(found.learning_rates or config.learning_rates))
        flags = _flags(found.flags, f"{kind}.{found.name}.flags", folder)
        return replace(found, flags=flags, learning_rates=rates, decays=tuple(sorted(found.decays)))

    def held_out(where: str, text: HeldOut) -> HeldOut:
        path = _place(text.path, where, folder)
        is_one_text = documents_belong_together(path)
        return replace(text, path=path, protocol=text.protocol or ("windows" if is_one_text else "documents"))

    return replace(
        config,
        model=_place(config.model, "model", folder),
        train_text=_place(config.train_text, "train_text", folder),
        validation_text=held_out("validation_text", config.validation_text),
        test_text=held_out("test_text", config.test_text),
        other_texts={name: held_out(f"other_texts.{name}", text) for name, text in config.other_texts.items()},
        text_field=_expand(config.text_field, "text_field"),
        budgets=tuple(sorted(config.budgets)),
        learning_rates=tuple(sorted(config.learning_rates)),
        flags=_flags(config.flags, "flags", folder),
        methods={name: method("methods", found) for name, found in config.methods.items()},
        one_shot={name: method("one_shot", found) for name, found in config.one_shot.items()},
    )


def _check(config: CompareConfig) -> None:
    for name, least in _LEAST.items():
        values = getattr(config, name)
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and value < least:
                raise ValueError(f"{name} = {value}: use an integer >= {least}")
    lists = {name: getattr(config, name) for name in ("seeds", "budgets", "learning_rates")}
    lists |= {f"methods.{method.name}.learning_rates": method.learning_rates for method in config.methods.values()}
    lists |= {f"methods.{name}.decays": found.decays for name, found in config.methods.items() if found.decays}
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name} = []: give a list of at least one value")
        if len({f"{value:g}" for value in values}) != len(values):  # names of runs have so many digits
            raise ValueError(f"{name} = {list(values)}: one value stands there twice, to six digits")
        if name.endswith("learning_rates") and min(values) <= 0:
            raise ValueError(f"{name} = {list(values)}: {min(values):g} is no learning rate; use numbers > 0")
    held_out = {"validation_text": config.validation_text, "test_text": config.test_text}
    held_out |= {f"other_texts.{name}": text for name, text in config.other_texts.items()}
    if taken := sorted({"validation", "test"} & set(config.other_texts)):
        raise ValueError(f"other_texts.{taken[0]}: a text of this name is there already; use another")
    for name, text in held_out.items():
        first, end = text.documents
        if first < 0 or (end is not None and end <= first):
            raise ValueError(f"{name}.documents = {[first, end]}: use 0 <= first < end, or null for the end")
    if not config.methods:
        raise ValueError("methods: name at least one")
    if both := sorted(set(config.methods) & set(config.one_shot)):
        raise ValueError(f"{both[0]!r} stands in methods and in one_shot; give one of them another name")
    if config.reference is not None and config.reference not in config.methods:
        raise ValueError(f"reference = {config.reference!r}: use one of the methods, {', '.join(config.methods)}")
    if config.batch % config.ranks:
        raise ValueError(f"batch = {config.batch} cannot be divided over ranks = {config.ranks}; use a multiple")
    for where, method, steps in (
        *(("methods", method, steps) for method in config.methods.values() for steps in config.budgets),
        *(("one_shot", method, 0) for method in config.one_shot.values()),
    ):
        if "max_steps" in method.block:
            raise ValueError(f"{where}.{method.name}.max_steps: budgets decide it; remove it")
        if (where == "one_shot") != ((name := method_name(method.block)) == "oneshot"):
            raise ValueError(f'{where}.{method.name}: method "{name}": "oneshot" stands in one_shot, others in methods')
        try:
            for decay in method.decays or (None,):
                SparseForgeConfig.from_dict(config.block(method, steps, decay)).check_length()
        except ValueError as error:
            raise ValueError(f"{where}.{method.name} with {steps} steps: {error}") from None


def _flags(given: dict[str, Any], where: str, folder: Path) -> dict[str, Any]:
    if ours := [name for name in given if name in _OURS]:
        raise ValueError(f"{where}.{ours[0]}: the grid or its base decides it; remove it")
    build(RunArguments, {"deepspeed": "", **given}, where)  # for its errors
    found = {n: _expand(value, f"{where}.{n}") if isinstance(value, str) else value for n, value in given.items()}
    paths = {name: given[name] for name in ("teacher", "eval_dataset") if given.get(name) is not None}
    return found | {name: _place(path, f"{where}.{name}", folder) for name, path in paths.items()}


def _expand(text: str, where: str) -> str:
    expanded = os.path.expandvars(text)
    if left := re.search(r"\$\{?\w+\}?", expanded):
        raise ValueError(f"{where} = {text!r}: the environment has no {left[0]}; export it, or write the path")
    return expanded


def _place(text: str, where: str, folder: Path) -> str:
    """A path of the file, from the working directory; what names none, like a hub id or a built-in text, as it is."""
    expanded = _expand(text, where)
    kind, path = ("stream:", expanded[7:]) if expanded.startswith("stream:") else ("", expanded)
    if Path(path).is_absolute() or text.removeprefix("stream:").startswith("$"):
        return expanded
    is_file = path.startswith(".") or Path(path).suffix in (".json", ".jsonl", ".txt")
    return f"{kind}{folder / path}" if is_file or (folder / path).exists() else expanded
