"""Which files of a folder are the text: those of a split, by the names and cards that `datasets` knows splits by."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import NoReturn

from sparseforge_ds.data.text_formats import KINDS, file_kind, is_readable

_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""What the hub calls the shards of a split (`datasets.data_files.SPLIT_PATTERN_SHARDED`)."""
_SAMPLES, _SAMPLE = 8, 2**15
"""A long file is hashed in so many samples of so many bytes: there may be thousands of files."""

_LARGEST_CARD = 2**20
_MOST_STARS = 3
"""In a component of a pattern; more match slowly."""
_DAMAGED = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""Errors of a dataset card whose values are of other types than they should be."""


@dataclass(frozen=True)
class Files:
    """The files of one source, in the order of their names."""

    root: Path
    """The folder that was named, or the one file."""
    paths: tuple[Path, ...]
    split: str = "train"
    left_out: tuple[tuple[str, int], ...] = ()
    """What else the folder has, and how many files of it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files, below the folder: they stay when the folder moves."""
        return tuple(path.relative_to(self.root).as_posix() if path != self.root else path.name for path in self.paths)

    @cached_property
    def contents(self) -> dict[str, str]:
        """Size, hash and kind of each file, by its name; of a long one, samples from beginning to end are hashed.

        Raises:
            ValueError: one cannot be read.
        """
        try:
            return {name: _digest(path) for name, path in zip(self.names, self.paths, strict=True)}
        except OSError as error:
            raise ValueError(
                f"--dataset {self.root}: not readable ({error}); repair the file or leave it out"
            ) from error

    def line(self) -> str:
        """For the screen: which files are read, and which are not."""
        size = f"{sum(path.stat().st_size for path in self.paths):,} bytes"
        if self.paths == (self.root,):
            return f"{self.root.name}, {size}"
        rest = ", ".join(f"{count} {what}" for what, count in self.left_out)
        return f"{describe(self.names, self.split)}, {size}" + (f"; left out: {rest}" if rest else "")


def describe(names: Sequence[str], split: str) -> str:
    """For the screen: how many files of which split these are, and their names."""
    count = "1 file" if len(names) == 1 else f"{len(names):,} files"
    return f"{count} of split {split}: {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")


def find_files(path: Path, split: str = "train") -> Files:
    """The files of a split of a folder; a file that is named itself is read whatever its name says of splits.

    A file is of the split that the folder's dataset card, or a word like train, test, dev or validation in the names of
    its folders or in its own assigns it to. What belongs to no split is of train, unless other files are, beside those
    of further splits. Hidden files and folders, those that begin with two underscores, and files that `datasets` left
    in a folder as caches or descriptions are no text.

    Args:
        path: the file or folder.
        split: name of a split, or several, joined by +.

    Raises:
        ValueError: there is none, the kind of file is not readable, or a link leads nowhere.
    """
    if not path.is_dir():
        if not is_readable(path.name):
            raise ValueError(f"--dataset {path}: unknown kind of file {path.suffix!r}; use one of {KINDS}")
        return Files(path, (path,), split)
    names = sorted(file.relative_to(path).as_posix() for file in _text_files(path))
    if not names:
        raise ValueError(f"--dataset {path}: the folder holds no file of {KINDS}")
    card = _splits_of_card(path, names)
    splits = {name: card.get(name) or split_named_in(name) for name in names}
    chosen, left_out = choose(splits, split, f"--dataset {path}")
    return Files(path, tuple(path / name for name in chosen), split, tuple(sorted(left_out.items())))


def choose(splits: Mapping[str, frozenset[str]], split: str, who: str) -> tuple[list[str], Counter[str]]:
    """The files of a split, sorted, and how many there are of what is left out.

    Args:
        splits: the splits that each file belongs to; none where nothing says so.
        split: name of a split, or several, joined by +.
        who: what the error is about.

    Raises:
        ValueError: there is no such split.
    """
    known = frozenset[str]().union(*splits.values())
    if known == {"train"} or "train" not in known:
        splits = {name: own or frozenset({"train"}) for name, own in splits.items()}
        known = frozenset[str]().union(*splits.values())
    wanted = frozenset(split.split("+"))
    for missing in sorted(wanted - known):
        raise ValueError(
            f"{who}: has no split {missing} (there are: {', '.join(sorted(known))}); choose one with --split, or give "
            "the files"
        )
    rest = [own for own in splits.values() if not own & wanted]
    left_out = Counter(f"of split {' and '.join(sorted(own))}" if own else "of no split" for own in rest)
    return sorted(name for name, own in splits.items() if own & wanted), left_out


def split_named_in(name: str) -> frozenset[str]:
    """The split that a path below the dataset's folder names, by the words of `datasets`; none if it names none.

    Folders decide before the file does, and the innermost before those above it.
    """
    if shard := _SHARD.fullmatch(name):
        return frozenset({shard[1]})
    path, (word, split_by_word) = PurePosixPath(name), _words()
    for part in (*reversed(path.parent.parts), path.name):
        if found := word.search(part):
            return frozenset({split_by_word[found[1].lower()]})
    return frozenset()


@cache
def _words() -> tuple[re.Pattern[str], dict[str, str]]:
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS  # heavy, and needed for folders only

    split_by_word = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
    between = f"[{NON_WORDS_CHARS}]"
    return re.compile(rf"(?:^|{between})({'|'.join(split_by_word)})(?={between}|$)", re.IGNORECASE), split_by_word


def _text_files(root: Path) -> Iterator[Path]:
    """Files below a folder that may be text, also behind links, each folder once."""
    from datasets.data_files import FILES_TO_IGNORE

    def unreadable(error: OSError) -> NoReturn:
        raise ValueError(f"--dataset {root}: cannot be listed ({error}); check its permissions") from error

    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=unreadable):
        place = os.path.realpath(folder)
        if place in seen:  # a link to a folder above, or to one that is read anyway
            subfolders.clear()
            continue
        seen.add(place)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "__")))
        for name in names:
            path = Path(folder, name)
            is_cache = name.startswith("cache-") and path.suffix == ".arrow"  # of `map` and `filter` of `datasets`
            is_description = name in FILES_TO_IGNORE or name == "state.json"
            if name.startswith(".") or is_cache or is_description or not is_readable(name):
                continue
            if path.is_symlink() and not path.exists():
                raise ValueError(f"--dataset {root}: {path} is a link to nothing; bring its file back or remove it")
            if path.is_file():
                yield path


def _splits_of_card(root: Path, names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return the splits that a dataset card, README.md, gives the files of a folder, in all of its configurations.

    Its patterns are matched with `names`, the files that are there, and with nothing outside of the folder.
    """
    from fsspec.utils import glob_translate

    splits: dict[str, frozenset[str]] = {}
    for split, pattern in patterns_of_card(root / "README.md", f"--dataset {root}"):
        for name in filter(re.compile(glob_translate(pattern)).match, names):
            splits[name] = splits.get(name, frozenset()) | {split}
    return splits


def patterns_of_card(card: Path, who: str) -> list[tuple[str, str]]:
    """Return the patterns of files in a dataset card that is there, below its folder, each with its split.

    Raises ValueError, which begins with `who`, where the card cannot be read, or a pattern leads out of the folder.
    """
    if not card.is_file():
        return []
    with card.open("rb") as file:
        content = file.read(_LARGEST_CARD + 1)
    if not content.startswith(b"---"):
        return []
    import datasets
    import yaml
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    found: list[tuple[str, str]] = []
    try:
        if len(content) > _LARGEST_CARD:
            raise ValueError(f"it has more than {_LARGEST_CARD:,} bytes")
        for config in MetadataConfigs.from_dataset_card_data(DatasetCard(content.decode()).data).values():
            patterns = sanitize_patterns(config["data_files"]) if config.get("data_files") else {}
            for split, pattern in ((str(split), one) for split, own in patterns.items() for one in own):
                if "://" in pattern:
                    continue
                below = posixpath.normpath(posixpath.join(config.get("data_dir", "."), pattern))
                stars = [part.count("*") for part in below.split("/")]
                if below.startswith(("/", "~", "..")) or max(stars) > _MOST_STARS or sum(stars) > 3 * _MOST_STARS:
                    raise ValueError(f"it names {below[:100]!r}, outside of the folder or with too many *")
                found.append((split, below))
    except (*_DAMAGED, yaml.YAMLError, datasets.exceptions.DatasetsError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{who}: its README.md is no readable dataset card ({why[0][:300]}); repair or remove it"
        ) from None
    return found


def _digest(path: Path) -> str:
    size = path.stat().st_size
    places = [0] if size <= _SAMPLES * _SAMPLE else [(size - _SAMPLE) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            digest.update(file.read(_SAMPLE if len(places) > 1 else size))
    return f"{size:,} bytes, hash {digest.hexdigest()[:16]}, {''.join(file_kind(path.name))}"
