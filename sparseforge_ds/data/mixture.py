"""Text of a run from the values of `--dataset`, like `A=0.7 B=0.3`: sources and their shares of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from sparseforge_ds.config.arguments import EMBEDDED_TEXT
from sparseforge_ds.config.given_path import path_exists
from sparseforge_ds.data.hub_text import HubText
from sparseforge_ds.data.round_robin import integer_shares
from sparseforge_ds.data.splits import find_files, split_named_in
from sparseforge_ds.data.stdlib_text import stdlib_file
from sparseforge_ds.data.text_files import DEFAULTS, LocalText, TextOptions, TextSource
from sparseforge_ds.data.text_formats import KINDS, check_size, file_kind, is_plain_text, is_readable

STREAM = "stream:"
"""Prefix of a path that is tokenized while the run goes on."""


@dataclass(frozen=True)
class Mixture:
    """Sources of a run, often a single one, and their turns in a round."""

    sources: tuple[TextSource, ...]
    parts: tuple[int, ...]
    """Windows of each source in a round."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the share of the tokens of every source; they add up to 1."""
        return tuple(part / sum(self.parts) for part in self.parts)


def find_text(dataset: Sequence[str], options: TextOptions = DEFAULTS, held_out: TextSource | None = None) -> Mixture:
    """Return the text of a run from the values of `--dataset`, each SOURCE or SOURCE=SHARE.

    Args:
        dataset: the values.
        options: flags of the text.
        held_out: source of `--eval_dataset`, which `--sample_by` divides too.

    Raises:
        ValueError: a source or file cannot be used or comes twice; some sources have a share and others none; a
            share is no number above 0; or `--sample_by` is given and there is no .txt file, `--text_field` and there
            are no records, or `--split` and there are only files of another split.
    """
    # 1. Names and shares.
    pairs = [source_and_share(value) for value in dataset]
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--dataset {twice[0]}: is named {names.count(twice[0])} times; name it once, with one share")
    without_share = [name for name, share in pairs if share is None]
    if without_share and len(without_share) < len(pairs):
        raise ValueError(
            f"--dataset {without_share[0]}: has no share, others have; give all or none, like {without_share[0]}=0.3 "
            "(without any, all have the same)"
        )
    parts = integer_shares(dataset, [Fraction(1) if share is None else share for _, share in pairs])
    # 2. The files of every source, none of them twice.
    sources = tuple(find_source(name, options) for name in names)
    owners: dict[Path, str] = {}
    for path, name in ((path.resolve(), source.name) for source in sources for path in _paths(source)):
        if owners.setdefault(path, name) != name:
            raise ValueError(f"--dataset {owners[path]} and {name}: both read {path}; name it once, with one share")
    # 3. A flag about .txt files needs some.
    everything = sources if held_out is None else (*sources, held_out)
    if options.sample_by != "document" and not any(
        isinstance(source, HubText) or any(is_plain_text(path.name) for path in _paths(source)) for source in everything
    ):
        with_held_out = "" if held_out is None else f" and --eval_dataset {held_out.name}"
        raise ValueError(
            f"--sample_by {options.sample_by}: it divides .txt files, and --dataset {' '.join(names)}{with_held_out} "
            f"{'has' if held_out is None else 'have'} none; leave it out"
        )
    # 4. A flag about fields needs records that have some.
    require_records(everything, options.text_field)
    # 5. A flag about splits needs a source that can be divided into them.
    require_splits(sources, options.split)
    return Mixture(sources, parts)


def require_records(sources: Sequence[TextSource], text_field: str) -> None:
    """Raise ValueError for a `--text_field` that no source has a record for: plain text, or the package's own."""
    if text_field != DEFAULTS.text_field and not any(map(_has_records, sources)):
        names = " ".join(source.name for source in sources)
        raise ValueError(f"--text_field {text_field}: {names} has no records, whose field it could name; leave it out")


def _has_records(source: TextSource) -> bool:
    """Return whether a source may have records whose field is the user's to name."""
    if source.name == EMBEDDED_TEXT:
        return False
    return isinstance(source, HubText) or not all(is_plain_text(path.name) for path in _paths(source))


def require_splits(sources: Sequence[TextSource], split: str, default: str = DEFAULTS.split) -> None:
    """Raise ValueError for a `--split` other than `default` where each source is a file, of another split by its name.

    A file is read whatever its name says, and belongs to train where that names no split.
    """
    wanted = frozenset(split.split("+"))
    if split == default or any(_may_be_of(source, wanted) for source in sources):
        return
    names = " ".join(source.name for source in sources)
    raise ValueError(
        f"--split {split}: --dataset {names} is no folder or hub id, of which it could choose files; leave it out"
    )


def _may_be_of(source: TextSource, wanted: frozenset[str]) -> bool:
    """Return False for a single file whose name puts it into other splits than the wanted ones."""
    if not isinstance(source, LocalText) or source.files.paths != (source.files.root,):
        return True
    return bool((split_named_in(source.files.root.name) or {"train"}) & wanted)


def find_source(dataset: str, options: TextOptions = DEFAULTS) -> TextSource:
    """Return one source of `--dataset`: a path, stream: and a path, a hub id, or stdlib.

    Reads no more than the first record of every file, or the first line of a .txt file.

    Raises:
        ValueError: there is no such file, a folder has no usable files or not that split, a file is of an unknown kind
            or lacks the field, a .txt file is too large for one document, or plain text has no completion.
    """
    # 1. The text inside the package.
    if dataset == EMBEDDED_TEXT:
        if "train" not in options.split.split("+"):
            raise ValueError(f"--split {options.split}: --dataset {EMBEDDED_TEXT} has train only; name another text")
        embedded = LocalText(dataset, find_files(stdlib_file("train")), replace(options, text_field="text"))
        if options.loss_on == "completion":
            next(embedded.read())  # raises: plain text has no completion
        return embedded
    # 2. Files of this machine. An empty path would be the working folder.
    if not dataset.removeprefix(STREAM):
        raise ValueError(f"--dataset {dataset!r}: names no text; give a path, a hub id or {EMBEDDED_TEXT}")
    path = Path(dataset.removeprefix(STREAM))
    if path_exists(path, f"--dataset {dataset}"):
        source = LocalText(dataset, find_files(path, options.split), options, dataset.startswith(STREAM))
        # A .txt file is read by lines here, since its first line is enough.
        lines = replace(source, options=replace(options, sample_by="line"))
        for number, file in enumerate(source.files.paths):
            if options.sample_by == "document" and file_kind(file.name) == (".txt", ""):  # compressed: known when read
                check_size(str(file), file.stat().st_size)
            next(lines.read({"file": number}), None)
        return source
    # 3. A dataset of the hub.
    is_hub_id = dataset.partition(":")[0].count("/") == 1 and not is_readable(dataset)
    if not is_hub_id or dataset.startswith((".", "/", "~", STREAM)):
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give a file of {KINDS}, a folder of them, "
            f"{STREAM} and one of these, a hub id like allenai/c4:en, or {EMBEDDED_TEXT}; in a mixture with =SHARE"
        )
    return HubText(dataset, options)


def file_lines(source: TextSource) -> list[str]:
    """Return the banner's lines about the files of a source; none if the user did not name files."""
    if not isinstance(source, LocalText) or source.name == EMBEDDED_TEXT:
        return []
    lines = [source.files.describe()]
    if source.options.sample_by == "document" and any(map(is_plain_text, source.files.names)):
        lines.append("a .txt file is one document; --sample_by paragraph or line divides it")
    return lines


def _paths(source: TextSource) -> tuple[Path, ...]:
    return source.files.paths if isinstance(source, LocalText) else ()


def source_and_share(value: str) -> tuple[str, Fraction | None]:
    """Split a value of `--dataset` into source and share. The share is None if there is none.

    A path that exists under the whole value has no share: folders may be called date=2024.
    """
    name, sign, share = value.rpartition("=")
    if not sign or path_exists(value.removeprefix(STREAM), f"--dataset {value}"):
        return value, None
    try:
        number = Fraction(share)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if number <= 0 or not name:
        raise ValueError(f"--dataset {value}: {share!r} is no share; use SOURCE=NUMBER with a number > 0, like 0.3")
    return name, number
