"""The text of a run: what `--dataset A=0.7 B=0.3` names, as one source or several with their shares of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from sparseforge_ds.config.arguments import EMBEDDED_TEXT
from sparseforge_ds.data.hub_text import HubText
from sparseforge_ds.data.round_robin import whole_parts
from sparseforge_ds.data.splits import find_files
from sparseforge_ds.data.stdlib_text import stdlib_file
from sparseforge_ds.data.text_files import DEFAULTS, LocalText, Source, TextOptions
from sparseforge_ds.data.text_formats import KINDS, check_size, file_kind, is_plain_text, is_readable

STREAM = "stream:"
"""Before a path: read it while the run goes on."""


@dataclass(frozen=True)
class Mixture:
    """The sources of a run, often a single one, and how many windows of a round each of them has."""

    sources: tuple[Source, ...]
    parts: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the tokens of every source; they add up to 1."""
        return tuple(part / sum(self.parts) for part in self.parts)


def find_text(dataset: Sequence[str], options: TextOptions = DEFAULTS) -> Mixture:
    """The text of a run: the values of `--dataset`, each a source or source=weight.

    Raises:
        ValueError: a source or file cannot be used or comes twice, a weight is missing or no number above 0, or there
            is no .txt file to divide.
    """
    pairs = [source_and_weight(value) for value in dataset]
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--dataset {twice[0]}: is named {names.count(twice[0])} times; name it once, with one weight")
    unweighted = [name for name, weight in pairs if weight is None]
    if unweighted and len(unweighted) < len(pairs):
        raise ValueError(
            f"--dataset {unweighted[0]}: has no weight, others have; give all or none, like {unweighted[0]}=0.3 "
            "(without any, all have the same)"
        )
    parts = whole_parts(names, [Fraction(1) if weight is None else weight for _, weight in pairs])
    sources = tuple(find_source(name, options) for name in names)
    owners: dict[Path, str] = {}
    for path, name in ((path.resolve(), source.name) for source in sources for path in _paths(source)):
        if owners.setdefault(path, name) != name:
            raise ValueError(f"--dataset {owners[path]} and {name}: both read {path}; name it once, with one weight")
    if options.sample_by != "document" and not any(
        isinstance(source, HubText) or any(is_plain_text(path.name) for path in _paths(source)) for source in sources
    ):
        raise ValueError(
            f"--sample_by {options.sample_by}: it divides .txt files, and --dataset {' '.join(names)} has none; leave "
            "it out"
        )
    return Mixture(sources, parts)


def find_source(dataset: str, options: TextOptions = DEFAULTS) -> Source:
    """One source of `--dataset`: a path, stream: and a path, a hub id, or stdlib.

    Looks, but reads nothing except the first record of a file, whose field must exist, or its first lines.

    Raises:
        ValueError: no such file, a folder without usable files or that split, an unknown kind of file, a field that is
            missing, plain text where the loss is on the completion, or too much of it for one document.
    """
    if dataset == EMBEDDED_TEXT:
        if "train" not in options.split.split("+"):
            raise ValueError(f"--split {options.split}: --dataset {EMBEDDED_TEXT} has train only; name another text")
        embedded = LocalText(dataset, find_files(stdlib_file("train")), replace(options, text_field="text"))
        if options.loss_on == "completion":
            next(embedded.read())  # for its error
        return embedded
    path = Path(dataset.removeprefix(STREAM))
    if path.exists():
        source = LocalText(dataset, find_files(path, options.split), options, dataset.startswith(STREAM))
        lines = replace(source, options=replace(options, sample_by="line"))  # of a .txt file the first one will do
        for number, file in enumerate(source.files.paths):
            if options.sample_by == "document" and file_kind(file.name) == (".txt", ""):  # else known when it is read
                check_size(str(file), file.stat().st_size)
            next(lines.read({"file": number}), None)
        return source
    is_hub_id = dataset.partition(":")[0].count("/") == 1 and not is_readable(dataset)
    if not is_hub_id or dataset.startswith((".", "/", "~", STREAM)):
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give a file of {KINDS}, a folder of them, "
            f"{STREAM} and one of these, a hub id like allenai/c4:en, or {EMBEDDED_TEXT}; in a mixture with =WEIGHT"
        )
    return HubText(dataset, options)


def file_lines(source: Source) -> list[str]:
    """Which files a source reads, and what a .txt file is to it; nothing of one whose files the user did not name."""
    if not isinstance(source, LocalText) or source.name == EMBEDDED_TEXT:
        return []
    lines = [source.files.line()]
    if source.options.sample_by == "document" and any(map(is_plain_text, source.files.names)):
        lines.append("a .txt file is one document; --sample_by paragraph or line divides it")
    return lines


def _paths(source: Source) -> tuple[Path, ...]:
    return source.files.paths if isinstance(source, LocalText) else ()


def source_and_weight(value: str) -> tuple[str, Fraction | None]:
    """Of a value of `--dataset`. What exists under the whole name has no weight: folders may be called date=2024."""
    name, sign, weight = value.rpartition("=")
    if not sign or Path(value.removeprefix(STREAM)).exists():
        return value, None
    try:
        number = Fraction(weight)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if number <= 0 or not name:
        raise ValueError(f"--dataset {value}: {weight!r} is no weight; use SOURCE=NUMBER with a number > 0, like 0.3")
    return name, number
