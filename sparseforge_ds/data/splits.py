"""Which files of a folder are the text: those of a split, by the names and records that `datasets` knows splits by."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from sparseforge_ds.data.formats import KINDS, is_readable, kind_of

_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""What the hub calls the shards of a split (`datasets.data_files.SPLIT_PATTERN_SHARDED`)."""
_NAMED = 6
"""Files that are named on the screen."""
_SAMPLES, _SAMPLE = 8, 2**15
"""A long file is hashed in so many samples of so many bytes: there may be thousands of files."""


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
        return tuple(
            (path.relative_to(self.root).as_posix() if path != self.root else path.name) for path in self.paths
        )

    def bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for path in self.paths)

    @cached_property
    def contents(self) -> dict[str, str]:
        """What is in each file, by its name: size and a hash, of samples from beginning to end where it is long.

        Raises:
            ValueError: one cannot be read.
        """
        try:
            return {name: _digest(path) for name, path in zip(self.names, self.paths, strict=True)}
        except OSError as error:
            raise ValueError(
                f"--dataset {self.root}: not readable ({error}); repair the file or leave it out"
            ) from error

    @property
    def identity(self) -> list[tuple[str, str]]:
        """Kind and content of each file: equal wherever it lies, whatever its name, whenever it was written."""
        return [("".join(kind_of(name)), content) for name, content in self.contents.items()]

    def line(self) -> str:
        """For the screen: which files are read, and which are not."""
        size = f"{self.bytes():,} bytes"
        if self.paths == (self.root,):
            return f"{self.root.name}, {size}"
        names = self.names if len(self.paths) <= _NAMED else (*self.names[: _NAMED - 2], "...", self.names[-1])
        line = f"{len(self.paths)} of split {self.split}, {size}: {', '.join(names)}"
        rest = ", ".join(f"{count} {what}" for what, count in self.left_out)
        return f"{line}; left out: {rest}" if rest else line


def find_files(path: Path, split: str = "train") -> Files:
    """The files of a split of a folder; a file that is named itself is read whatever its name says of splits.

    A file is of the split that the folder's dataset card, `dataset_dict.json`, or a word like train, test, dev or
    validation in the names of its folders or in its own assigns it to. What belongs to no split is of train, unless
    other files are, beside those of further splits. Hidden files and folders, those that begin with two underscores,
    and files that `datasets` left in a folder as caches or descriptions are no text.

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
    names, saved, caches = _text_files(path)
    if not names:
        raise ValueError(f"--dataset {path}: the folder holds no file of {KINDS}")
    card = _splits_of_card(path)
    splits = {name: card.get(name) or saved.get(name) or split_of(name) for name in names}
    chosen, left_out = choose(splits, split, f"--dataset {path}")
    if caches:
        left_out["cached by datasets"] = caches
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


def split_of(name: str) -> frozenset[str]:
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


def _text_files(root: Path) -> tuple[list[str], dict[str, frozenset[str]], int]:
    """Names below a folder of files that may be text, the splits of those in saved datasets, and how many caches."""
    from datasets.data_files import FILES_TO_IGNORE

    names, splits, caches = [], {}, 0
    split_of_folder: dict[Path, str] = {}
    for folder, files in _walk(root):
        if "dataset_dict.json" in files:
            found = _read_json(folder / "dataset_dict.json").get("splits")
            split_of_folder |= {folder / split: split for split in (found if isinstance(found, list) else ())}
        saved = _saved_files(folder) if {"state.json", "dataset_info.json"} <= set(files) else None
        for path in map(folder.joinpath, files):
            is_cache = path.name.startswith("cache-") and path.suffix == ".arrow"
            if path.name not in saved if saved is not None else is_cache:
                caches += is_cache
            elif is_readable(path.name) and path.name not in FILES_TO_IGNORE:
                if path.is_symlink() and not path.exists():
                    raise ValueError(f"--dataset {root}: {path} is a link to nothing; bring its file back or remove it")
                if path.is_file():
                    names.append(path.relative_to(root).as_posix())
                    splits[names[-1]] = frozenset(split_of_folder[up] for up in path.parents if up in split_of_folder)
    return names, splits, caches


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders that are not hidden, also behind links, each once; and the names in them that are not hidden."""

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
        yield Path(folder), sorted(name for name in names if not name.startswith("."))


def _saved_files(folder: Path) -> set[str] | None:
    """The data files of a folder that `Dataset.save_to_disk` wrote; None if it did not."""
    entries = _read_json(folder / "state.json").get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "filename" in entry for entry in entries):
        return None
    saved = {str(entry["filename"]) for entry in entries}
    for name in sorted(saved):
        if not (folder / name).is_file():
            raise ValueError(f"--dataset {folder}: {name}, which its state.json names, is missing; bring it back")
    return saved


def _splits_of_card(root: Path) -> dict[str, frozenset[str]]:
    """The splits of the files that a dataset card, README.md, lists, in all of its configurations."""
    card = root / "README.md"
    if not card.is_file() or not card.read_bytes().startswith(b"---"):
        return {}
    import datasets
    import yaml
    from datasets.data_files import resolve_pattern, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    splits: dict[str, frozenset[str]] = {}
    try:
        configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data)
        for config in configs.values():
            folder = str(root / config.get("data_dir", "."))
            patterns = sanitize_patterns(config["data_files"]) if config.get("data_files") else {}
            for split, pattern in ((split, pattern) for split, own in patterns.items() for pattern in own):
                if "://" in pattern:
                    continue
                try:
                    files = resolve_pattern(pattern, folder)
                except FileNotFoundError:  # a part of the dataset that was not downloaded
                    continue
                for file in files:
                    name = Path(os.path.relpath(file, root)).as_posix()
                    splits[name] = splits.get(name, frozenset()) | {split}
    except (ValueError, yaml.YAMLError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"--dataset {root}: its README.md is no readable dataset card ({error}); repair or remove it"
        ) from None
    return splits


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--dataset {path}: not readable ({error}); repair it, or save the dataset again") from None
    return content if isinstance(content, dict) else {}


def _digest(path: Path) -> str:
    size = path.stat().st_size
    places = [0] if size <= _SAMPLES * _SAMPLE else [(size - _SAMPLE) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            digest.update(file.read(_SAMPLE if len(places) > 1 else size))
    return f"{size:,} bytes, hash {digest.hexdigest()[:16]}"
