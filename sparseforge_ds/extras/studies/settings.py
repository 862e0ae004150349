"""CONFIG of `sparseforge compare`: one model, one corpus, and a grid of methods, seeds and budgets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig
from sparseforge_ds.config.arguments import NOT_OF_A_RUN, RunArguments
from sparseforge_ds.config.block import method_name
from sparseforge_ds.config.block_sections import BlockStartMask
from sparseforge_ds.config.json_file import parse_json_file
from sparseforge_ds.config.strict import build, merge
from sparseforge_ds.evaluate.scored_text import documents_belong_together
from sparseforge_ds.extras.studies.settings_checks import check_comparison

Protocol = Literal["documents", "windows"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_RESERVED = (
    *("deepspeed", "model", "dataset", "text_field", "max_steps", "epochs", "seq_length", "output_dir", "allow_dense"),
    *("learning_rate", "save_every", "keep_checkpoints", "keep_best", "seed", "resume", "global_batch"),
    "gradient_accumulation_steps",  # --micro_batch decides it, for the same tokens in a step
    *NOT_OF_A_RUN,
)
"""Run flags that the grid or the base decides, or that have no meaning for a single run."""


@dataclass(frozen=True)
class HeldOutText:
    """A text to measure on, or a range of its documents."""

    path: str
    documents: tuple[int, int | None] = (0, None)
    """First document of the range, and the one behind its last; null: to the end."""
    protocol: Protocol | None = None
    """Unit that perplexity is measured on, "documents" or "windows" (`evaluate.perplexity`); null: windows for a
    running text like a .txt file."""


@dataclass(frozen=True)
class Method:
    """A method of the grid."""

    name: str
    block: dict[str, Any]
    """Keys that override those of the base's `sparseforge` block."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Run flags that override the common ones, like another `teacher`."""
    learning_rates: tuple[float, ...] = ()
    """Grid that replaces the common one."""
    decays: tuple[float, ...] = ()
    """Values of `method.decay` to choose from together with the learning rate (ast, cast, sr_ste, elsa, pat)."""


@dataclass(frozen=True)
class MeasuredTasks:
    """Tasks of lm-evaluation-harness; keys as the flags of `sparseforge evaluate`, whose guide describes them."""

    names: tuple[str, ...]
    """Names of the tasks."""
    include_path: str | None = None
    """Folder of task files, or of benchmark data; null: the hub."""
    limit: int | None = None
    """Rows of each task; null: all."""
    num_fewshot: int | None = None
    """Examples in a prompt of generated answers; null: the task's own number."""
    gen_kwargs: str | None = None
    """Settings of generation, like "max_gen_toks=256"."""
    apply_chat_template: bool = False
    """Put prompts into the tokenizer's chat template."""
    confirm_run_unsafe_code: bool = False
    """Allow tasks that run the code that a model writes."""


@dataclass(frozen=True)
class OneShot:
    """A model that `sparseforge prune` makes of the training text; its keys are flags of that command."""

    name: str
    mask: BlockStartMask | None = None
    """Source of the first masks; null: the command's default."""
    soft: float = BlockStartConfig.soft
    """Share of a block's steps in which its masks move."""
    pattern: str | None = None
    """Pattern; null: that of the base's `sparseforge` block."""
    tokens: int | None = None
    """Tokens of the training text that are read; null: the command's default."""
    epochs: int = BlockStartConfig.epochs
    """Passes of every block's training over them; 0: masks alone, which no seed changes."""
    rate: float = BlockStartConfig.rate
    """Adam's rate, relative to the RMS of each matrix."""
    batch: int | None = None
    """Sequences of an Adam step; null: the command's default."""
    exclude: tuple[str, ...] | None = None
    """Weights that stay dense; null: those of the base's block."""
    any_family: bool = False
    """Prune a family without rows."""

    @property
    def start(self) -> BlockStartConfig:
        """Settings of the blocks' training, with the number of tokens."""
        start = BlockStartConfig(
            mask=self.mask,
            soft=self.soft,
            tokens=self.tokens,
            epochs=self.epochs,
            rate=self.rate,
            batch=self.batch,
        )
        return replace(start, tokens=start.tokens_of(0))


@dataclass(frozen=True)
class CompareConfig:
    """Content of CONFIG. Paths are relative to its folder, unless they are absolute or begin with a $VARIABLE."""

    model: str
    """Dense model, a folder or hub id; the baseline, and the start of every run."""
    train_text: str
    """Training text (`--dataset` of the launcher); runs with the same seed read it in the same order."""
    validation_text: HeldOutText
    """Text that decides the learning rates, and nothing else."""
    test_text: HeldOutText
    """Text that results are measured on; it decides nothing."""
    base: dict[str, Any]
    """DeepSpeed JSON of every run, as its path or its content."""
    methods: dict[str, Method]
    """Trained methods, by name: keys of the `sparseforge` block, and their own `flags`, `learning_rates`, `decays`."""
    learning_rates: tuple[float, ...]
    """Grid for each method. One value is chosen with the first seed, at the smallest budget."""
    seeds: tuple[int, ...]
    """Seeds of the order of the text, and of random choices of a method; the first one decides the learning rates."""
    budgets: tuple[int, ...]
    """Optimizer steps."""
    choose_at_each_budget: bool = False
    """True: every budget has a learning rate, and decay, chosen by runs of its own length."""
    choose_by: Literal["perplexity", "kl"] = "perplexity"
    """Measurement on the validation text that decides a learning rate: its perplexity, or the KL divergence to the
    dense model, which no method can lower by learning the text."""
    other_texts: dict[str, HeldOutText] = field(default_factory=dict)
    """Further texts that results are measured on, by the name of their column; they decide nothing."""
    tasks: MeasuredTasks | None = None
    """Tasks that results are measured on; they decide nothing. Each has columns for accuracy, for the items that the
    dense model alone has right, and for generated answers for their tokens and the share that the limit cut."""
    one_shot: dict[str, OneShot] = field(default_factory=dict)
    """Models that `sparseforge prune` makes without a run, by name: its flags `mask`, `pattern`, `tokens`, `epochs`,
    `rate`, `batch`, `exclude` and `any_family`. Each is made for each seed, or once where `epochs` is 0."""
    reference: str | None = None
    """Method that all others are compared with, seed by seed; null: the first."""
    axis: Literal["tokens", "path", "seconds"] = "tokens"
    """Horizontal axis of the figure of perplexity: tokens a pruned weight, path or training time. All of them count the
    start, but path."""
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
    """Steps between checkpoints, from which an interrupted run continues."""
    points: int = 40
    """Measurements of mask values in a run's TensorBoard log, and half as many of the gap, which cost two forwards
    each; 0: none."""
    text_field: str = "text"
    """Field of a record that holds the text."""
    evaluation_length: int | None = None
    """Tokens of a window, or of a document at most; null: the model's limit."""
    evaluation_batch: int = 8
    """Sequences of one forward of an evaluation."""
    keep_models: bool = True
    """False: remove the exported model of every reported run once it is measured."""

    @property
    def compared_with(self) -> str:
        """Name of the reference method."""
        return next(iter(self.methods)) if self.reference is None else self.reference

    @property
    def dense_control(self) -> str | None:
        """Name of the first method that removes nothing, like one with the pattern 4:4; None without one."""
        for name, method in self.methods.items():
            pattern = SparseForgeConfig.from_dict(self.block(method, self.budgets[0])).parsed_pattern
            if pattern.kept_count == pattern.members:
                return name
        return None

    @property
    def pruned(self) -> SparseForgeConfig:
        """Block of the reference method, whose pattern and layers the magnitude baseline has."""
        return SparseForgeConfig.from_dict(self.block(self.methods[self.compared_with], self.budgets[0]))

    @property
    def patterns(self) -> set[str]:
        """Patterns of all methods."""
        blocks = [self.block(method, self.budgets[0]) for method in self.methods.values()]
        blocks += [self.one_shot_block(entry) for entry in self.one_shot.values()]
        return {SparseForgeConfig.from_dict(block).pattern for block in blocks}

    @property
    def deciding_budgets(self) -> tuple[int, ...]:
        """Budgets at which learning rates and decays are chosen."""
        return self.budgets if self.choose_at_each_budget else self.budgets[:1]

    def block(self, method: Method, steps: int, decay: float | None = None) -> dict[str, Any]:
        """Return the `sparseforge` block of a run; `decay` replaces the method's unless it is None."""
        every = max(1, steps // self.points) if self.points and steps else 0
        monitor = {"monitor": {"histograms_every": every, "gap_every": 2 * every}}
        base = dict(self.base.get("sparseforge", {}))
        own = dict(method.block)
        # Settings of the base's method belong to no other method; an entry that only names it again keeps them.
        if _names_method(own) and method_name(own) != method_name(base):
            base.pop("method", None)
        elif isinstance(own.get("method"), str) and isinstance(base.get("method"), dict):
            del own["method"]
        block = merge(merge(monitor, base), own)
        if decay is not None:
            section = block["method"] if isinstance(block.get("method"), dict) else {"name": method_name(block)}
            block["method"] = {**section, "decay": decay}
        return {**block, "max_steps": steps}

    def one_shot_block(self, entry: OneShot) -> dict[str, Any]:
        """Return the `sparseforge` block of a model that is pruned without a run."""
        base = self.base.get("sparseforge", {})
        own = {"pattern": entry.pattern, "exclude": entry.exclude, "include": None, "allow_dense": None}
        chosen = {key: base.get(key) if value is None else value for key, value in own.items()}
        block = {"method": "naive_retrain", "importance": "magnitude"}
        return block | {key: value for key, value in chosen.items() if value is not None}


def read_comparison(path: str) -> CompareConfig:
    """Read and check CONFIG.

    Raises:
        ValueError: an unknown key, or a value that cannot work.
    """
    if not Path(path).exists():
        raise ValueError(f"CONFIG {path}: no such file; give one like studies/stories.json")
    content = parse_json_file(path, f"CONFIG {path}")
    try:
        if not isinstance(content, dict):
            raise ValueError("not a JSON object with keys")
        # The base may be a file of its own.
        folder = Path(path).parent
        if isinstance(content.get("base"), str):
            base = _resolve_path(content["base"], "base", folder)
            content["base"] = parse_json_file(base, f"base {base}")
        # An entry of a method mixes keys of its block with settings of the grid.
        if isinstance(content.get("methods"), dict):
            content["methods"] = {name: _split_entry(name, entry) for name, entry in content["methods"].items()}
        if isinstance(content.get("one_shot"), dict):
            content["one_shot"] = {name: _named("one_shot", name, entry) for name, entry in content["one_shot"].items()}
        config = _resolve(build(CompareConfig, content, "CONFIG"), folder)
        check_comparison(config)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).replace('CONFIG.', '')}") from None
    return config


def _named(kind: str, name: str, entry: Any) -> Any:
    """Add its name to an entry."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{kind}: {name!r} becomes the name of a folder; use letters, digits, _ . and +")
    if not isinstance(entry, dict):
        return entry
    if "name" in entry:
        raise ValueError(f"{kind}.{name}.name: unknown key; an entry is called by its own key, {name!r}")
    return {"name": name, **entry}


def _names_method(block: dict[str, Any]) -> bool:
    """Return True if a `sparseforge` block says by name which method it has."""
    method = block.get("method")
    return isinstance(method, str) or (isinstance(method, dict) and "name" in method)


def _split_entry(name: str, entry: Any) -> Any:
    """Separate a method's run flags, learning rates and decays from the keys of its block."""
    named = _named("methods", name, entry)
    if not isinstance(entry, dict):
        return named
    for key in ("learning_rates", "decays"):
        if key in entry and not entry[key]:
            raise ValueError(f"methods.{name}.{key}: the list is empty; remove it")
    own = {key: entry[key] for key in ("flags", "learning_rates", "decays") if key in entry}
    return {"name": name, "block": {key: value for key, value in entry.items() if key not in own}, **own}


def _resolve(config: CompareConfig, folder: Path) -> CompareConfig:
    """Make paths relative to the working directory, sort budgets and rates, and give methods the common rates."""

    def resolve_method(method: Method) -> Method:
        rates = tuple(sorted(method.learning_rates or config.learning_rates))
        flags = _resolve_flags(method.flags, f"methods.{method.name}.flags", folder)
        return replace(method, flags=flags, learning_rates=rates, decays=tuple(sorted(method.decays)))

    def resolve_text(key: str, text: HeldOutText) -> HeldOutText:
        path = _resolve_path(text.path, key, folder)
        is_one_text = documents_belong_together(path)
        return replace(text, path=path, protocol=text.protocol or ("windows" if is_one_text else "documents"))

    return replace(
        config,
        model=_resolve_path(config.model, "model", folder),
        train_text=_resolve_path(config.train_text, "train_text", folder),
        validation_text=resolve_text("validation_text", config.validation_text),
        test_text=resolve_text("test_text", config.test_text),
        other_texts={name: resolve_text(f"other_texts.{name}", text) for name, text in config.other_texts.items()},
        tasks=_resolve_tasks(config.tasks, folder),
        text_field=_expand(config.text_field, "text_field"),
        budgets=tuple(sorted(config.budgets)),
        learning_rates=tuple(sorted(config.learning_rates)),
        flags=_resolve_flags(config.flags, "flags", folder),
        methods={name: resolve_method(method) for name, method in config.methods.items()},
    )


def _resolve_tasks(tasks: MeasuredTasks | None, folder: Path) -> MeasuredTasks | None:
    if tasks is None or tasks.include_path is None:
        return tasks
    return replace(tasks, include_path=_resolve_path(tasks.include_path, "tasks.include_path", folder))


def _resolve_flags(flags: dict[str, Any], key: str, folder: Path) -> dict[str, Any]:
    """Check run flags, and resolve environment variables and paths in them; `key` names them in errors."""
    if reserved := [name for name in flags if name in _RESERVED]:
        raise ValueError(f"{key}.{reserved[0]}: the grid or its base decides it; remove it")
    build(RunArguments, {"deepspeed": "", **flags}, key)  # raises for a flag that the launcher would refuse
    expanded = {n: _expand(value, f"{key}.{n}") if isinstance(value, str) else value for n, value in flags.items()}
    paths = {name: flags[name] for name in ("teacher", "teacher_logits", "eval_dataset") if flags.get(name) is not None}
    return expanded | {name: _resolve_path(path, f"{key}.{name}", folder) for name, path in paths.items()}


def _expand(text: str, key: str) -> str:
    """Replace environment variables; `key` names the text in errors."""
    expanded = os.path.expandvars(text)
    if unset := re.search(r"\$\{?\w+\}?", expanded):
        raise ValueError(f"{key} = {text!r}: the environment has no {unset[0]}; export it, or write the path")
    return expanded


def _resolve_path(text: str, key: str, folder: Path) -> str:
    """Make a path of CONFIG relative to the working directory; leave hub ids and built-in texts as they are."""
    expanded = _expand(text, key)
    kind, path = ("stream:", expanded[7:]) if expanded.startswith("stream:") else ("", expanded)
    if Path(path).is_absolute() or text.removeprefix("stream:").startswith("$"):
        return expanded
    is_file = path.startswith(".") or Path(path).suffix in (".json", ".jsonl", ".txt")
    return f"{kind}{folder / path}" if is_file or (folder / path).exists() else expanded
