"""Files of a split of a folder, by the names and dataset cards that `datasets` knows splits by."""

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

from sparseforge_ds.data.text_formats import KINDS, file_kind, is_indexed, is_readable
from sparseforge_ds.model.loading_error import reason

_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""Names of shards on the hub (`datasets.data_files.SPLIT_PATTERN_SHARDED`)."""
MOST_HASHED = 2**35
"""Bytes of all files up to which every byte is hashed, at some 1 or 2 GB a second; of more, samples are."""
_SAMPLES = 8
"""Samples of a long file among so many bytes."""
_SAMPLE = 2**15
"""Bytes of a sample."""
_DATA_SUFFIXES = (
    *(".csv", ".tsv", ".ndjson", ".feather", ".orc", ".avro", ".msgpack", ".npy", ".npz", ".h5", ".pkl"),
    *(".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".zstd", ".br", ".snappy"),
)
"""Ends of names of files that may hold text, and that no reader knows; the banner counts them."""
_LARGEST_CARD = 2**20
"""Bytes of the largest dataset card that is read."""
_MOST_STARS = 3
"""Most stars in a component of a pattern; more match slowly."""
_DAMAGED = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""Errors of a dataset card whose values are of other types than they should be."""


@dataclass(frozen=True)
class Files:
    """Files of one source, sorted by name."""

    root: Path
    """Folder that the user named, or the one file."""
    paths: tuple[Path, ...]
    split: str = "train"
    left_out: tuple[tuple[str, int], ...] = ()
    """Descriptions of other files of the folder, like "of split test", with their counts."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the paths of the files relative to the folder, so that they stay when the folder moves."""
        return tuple(path.relative_to(self.root).as_posix() if path != self.root else path.name for path in self.paths)

    @cached_property
    def path_texts(self) -> list[str]:
        """Return the paths of the files as text."""
        return [str(path) for path in self.paths]

    @cached_property
    def contents(self) -> dict[str, str]:
        """Return size, hash and kind of each file by its name; beyond `MOST_HASHED` bytes, samples are hashed.

        Raises:
            ValueError: one cannot be read.
        """
        try:
            hashes_all = self._bytes() <= MOST_HASHED
            return {
                name: " and ".join(_digest(part, hashes_all) for part in _parts(path))
                for name, path in zip(self.names, self.paths, strict=True)
            }
        except OSError as error:
            raise ValueError(
                f"--dataset {self.root}: not readable ({error}); repair the file or leave it out"
            ) from error

    def describe(self) -> str:
        """Return the banner's line about the files that are read, and those that are left out."""
        size = f"{self._bytes():,} bytes"
        if self.paths == (self.root,):
            return f"{self.root.name}, {size}"
        rest = ", ".join(f"{count} {description}" for description, count in self.left_out)
        return f"{describe_files(self.names, self.split)}, {size}" + (f"; left out: {rest}" if rest else "")

    def _bytes(self) -> int:
        """Return the size of all files, with those that belong to them."""
        return sum(part.stat().st_size for path in self.paths for part in _parts(path))


def describe_files(names: Sequence[str], split: str) -> str:
    """Return number, split, first and last name of some files, for the banner."""
    count = "1 file" if len(names) == 1 else f"{len(names):,} files"
    return f"{count} of split {split}: {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")


def find_files(path: Path, split: str = "train") -> Files:
    """Return the files of a split of a folder, or a single file whatever its name says.

    The folder's dataset card assigns files to splits. Without it a word like train, test, dev or validation does, in
    the name of the file or of its folders. Files without a split belong to train, except where other files name both
    train and a further split. Not text are: hidden files and folders, names that begin with two underscores, and caches
    and descriptions that `datasets` has left in the folder.

    Args:
        path: the file or folder.
        split: name of a split, or several, joined by +.

    Raises:
        ValueError: there is no such file, it is a pipe, its kind is not readable, or a link leads nowhere.
    """
    if path.suffix == ".mds" or any(next(path.glob(pattern), None) for pattern in ("*.mds*", "*/*.mds*")):
        raise ValueError(
            f"--dataset {path}: has MosaicML's shards (.mds), and their reader mosaicml-streaming cannot be installed "
            "beside transformers 5; write the tokens as parquet with a column input_ids"
        )
    if not path.is_dir():
        if not is_readable(path.name):
            raise ValueError(f"--dataset {path}: unknown kind of file {path.suffix!r}; use one of {KINDS}")
        for part in _parts(path):
            if part.exists() and not part.is_file():  # opening a pipe waits for a writer
                raise ValueError(f"--dataset {part}: is a pipe or a device; write its text into a file")
        return Files(path, (path,), split)
    unknown = Counter[str]()
    names = sorted(file.relative_to(path).as_posix() for file in _text_files(path, unknown))
    if not names:
        raise ValueError(f"--dataset {path}: the folder holds no file of {KINDS}")
    card = _splits_of_card(path, names)
    splits = {name: card.get(name) or split_named_in(name) for name in names}
    chosen, left_out = choose_split(splits, split, f"--dataset {path}")
    left_out.update({f"of a kind that is not read ({suffix})": count for suffix, count in unknown.items()})
    return Files(path, tuple(path / name for name in chosen), split, tuple(sorted(left_out.items())))


def choose_split(splits: Mapping[str, frozenset[str]], split: str, who: str) -> tuple[list[str], Counter[str]]:
    """Return the sorted files of a split, and descriptions of the other files with their counts.

    Args:
        splits: the splits of each file, by its name; empty where nothing names one.
        split: name of a split, or several, joined by +.
        who: flag and value, for the error.

    Raises:
        ValueError: there is no such split.
    """
    # Files without a split belong to train, except where other files name both train and a further split.
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
    """Return the split that a path below the dataset's folder names, by the words of `datasets`; empty if none.

    Folders decide before the file does, and inner folders before outer ones.
    """
    if shard := _SHARD.fullmatch(name):
        return frozenset({shard[1]})
    path = PurePosixPath(name)
    pattern, split_by_word = _split_words()
    for part in (*reversed(path.parent.parts), path.name):
        if match := pattern.search(part):
            return frozenset({split_by_word[match[1].lower()]})
    return frozenset()


@cache
def _split_words() -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern that finds a word for a split in a name, and the split of each word."""
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS  # heavy, and needed for folders only

    split_by_word = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
    between = f"[{NON_WORDS_CHARS}]"
    return re.compile(rf"(?:^|{between})({'|'.join(split_by_word)})(?={between}|$)", re.IGNORECASE), split_by_word


def _text_files(root: Path, unknown: Counter[str]) -> Iterator[Path]:
    """Yield the files below a folder that may be text. Links are followed, each folder is visited once.

    Args:
        root: the folder.
        unknown: counter by suffix, to which files are added that may hold text and have no reader.
    """
    from datasets.data_files import FILES_TO_IGNORE

    def unreadable(error: OSError) -> NoReturn:
        raise ValueError(f"--dataset {root}: cannot be listed ({error}); check its permissions") from error

    visited: set[str] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=unreadable):
        # Links may point to a folder above: visit each folder once.
        real = os.path.realpath(folder)
        if real in visited:  # a link to a folder above, or to one that is read anyway
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "__")))
        # Leave out hidden files, caches and descriptions of `datasets`, and kinds that have no reader.
        for name in names:
            path = Path(folder, name)
            is_cache = name.startswith("cache-") and path.suffix == ".arrow"  # of `map` and `filter` of `datasets`
            is_description = name in FILES_TO_IGNORE or name == "state.json"
            if name.startswith(".") or is_cache or is_description:
                continue
            if not is_readable(name):
                suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]  # .csv.gz has both
                unknown.update([suffix for suffix in suffixes if suffix in _DATA_SUFFIXES][-1:])
                continue
            if path.is_symlink() and not path.exists():
                raise ValueError(f"--dataset {root}: {path} is a link to nothing; bring its file back or remove it")
            if path.is_file():
                yield path


def _splits_of_card(root: Path, names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return the splits of files by the dataset card of a folder, README.md, in all of its configurations.

    Patterns are matched with `names`, the files of the folder, so nothing outside it can be found.
    """
    from fsspec.utils import glob_translate

    splits: dict[str, frozenset[str]] = {}
    for split, pattern in read_card_patterns(root / "README.md", f"--dataset {root}"):
        for name in filter(re.compile(glob_translate(pattern)).match, names):
            splits[name] = splits.get(name, frozenset()) | {split}
    return splits


def read_card_patterns(card: Path, who: str) -> list[tuple[str, str]]:
    """Return (split, pattern) pairs of a dataset card, with patterns relative to its folder; none without a card.

    Args:
        card: path of README.md.
        who: flag and value, for errors.

    Raises:
        ValueError: the card cannot be read, or a pattern leads out of the folder.
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
    from fsspec.utils import glob_translate
    from huggingface_hub import DatasetCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    # Patterns of all configurations, as `datasets` completes them.
    pairs: list[tuple[str, str]] = []
    try:
        if len(content) > _LARGEST_CARD:
            raise ValueError(f"it has more than {_LARGEST_CARD:,} bytes")
        # A few aliases of aliases would fill the memory.
        front = REGEX_YAML_BLOCK.search(content.decode())
        if front and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(front[2])):
            raise ValueError("it has YAML aliases; write their values out")
        for config in MetadataConfigs.from_dataset_card_data(DatasetCard(content.decode()).data).values():
            patterns = sanitize_patterns(config["data_files"]) if config.get("data_files") else {}
            for split, pattern in ((str(name), pattern) for name, own in patterns.items() for pattern in own):
                if "://" in pattern:
                    continue
                below = posixpath.normpath(posixpath.join(config.get("data_dir", "."), pattern))
                stars = [part.count("*") for part in below.split("/")]
                if below.startswith(("/", "~", "..")) or max(stars) > _MOST_STARS or sum(stars) > 3 * _MOST_STARS:
                    raise ValueError(f"it names {below[:100]!r}, outside of the folder or with too many *")
                glob_translate(below)  # raises: ** is a component of its own
                pairs.append((split, below))
    except (*_DAMAGED, yaml.YAMLError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{who}: its README.md is no readable dataset card ({reason(error)}); repair or remove it"
        ) from None
    return pairs


def _parts(path: Path) -> list[Path]:
    """Return a file, with the file beside it that belongs to it."""
    return [path, path.with_suffix(".bin")] if is_indexed(path.name) else [path]


def _digest(path: Path, hashes_all: bool) -> str:
    """Return size, hash and kind of a file: the hash of all its bytes, or of evenly spaced samples of a long one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if hashes_all or size <= _SAMPLES * _SAMPLE:
            digest = hashlib.file_digest(file, "sha256")
        else:
            digest = hashlib.sha256()
            for number in range(_SAMPLES):
                file.seek((size - _SAMPLE) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return f"{size:,} bytes, hash {digest.hexdigest()[:16]}, {''.join(file_kind(path.name))}"
