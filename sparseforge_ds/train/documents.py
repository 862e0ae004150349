"""Where training text comes from: one document after another, from the standard library, files or the hub."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseforge_ds.train import stdlib_text
from sparseforge_ds.train.arguments import EMBEDDED_TEXT

_SUFFIXES = (".txt", ".jsonl", ".parquet", ".arrow")


@dataclass(frozen=True)
class Documents:
    """A text as a sequence of documents that can be read again and again.

    Two sources with equal `identity` give the same documents; the token cache is named by it. `endless` sources are
    too large to be read whole: whoever reads them stops when it has enough.
    """

    name: str
    identity: str
    endless: bool
    open: Callable[[], Iterator[str]]

    def __iter__(self) -> Iterator[str]:
        return self.open()


def find_documents(dataset: str, text_field: str) -> Documents:
    """The documents of a `--dataset`.

    Looks, but reads nothing except the first record of a file, whose field must exist.

    Raises:
        ValueError: no such file, a folder without usable files, an unknown kind of file, or a field that is missing.
    """
    if dataset == EMBEDDED_TEXT:
        recipe = hashlib.sha256(Path(stdlib_text.__file__).read_bytes()).hexdigest()
        identity = f"stdlib {sys.version} {recipe}"
        return Documents("stdlib", identity, False, lambda: iter(stdlib_text.stdlib_documents("train")))
    path = Path(dataset)
    if path.exists():
        files = _files(path)
        for file in files:
            next(_read(file, text_field), None)
        stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        identity = json.dumps(["files", stamps, text_field])
        return Documents(dataset, identity, False, lambda: (text for file in files for text in _read(file, text_field)))
    if dataset.startswith((".", "/", "~")) or dataset.count("/") != 1 or path.suffix in _SUFFIXES:
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give {', '.join(_SUFFIXES)}, a folder of them, "
            f"a hub id like allenai/c4:en, or {EMBEDDED_TEXT}"
        )
    return Documents(dataset, json.dumps(["hub", dataset, text_field]), True, lambda: _stream(dataset, text_field))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"--dataset {path}: the folder holds no {', '.join(_SUFFIXES)} file")
        return files
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"--dataset {path}: unknown kind of file {path.suffix!r}; use one of {', '.join(_SUFFIXES)}")
    return [path]


def _read(file: Path, text_field: str) -> Iterator[str]:
    """The documents of one file; a .txt file is one document."""
    try:
        if file.suffix == ".txt":
            yield file.read_text(encoding="utf-8")
        elif file.suffix == ".jsonl":
            yield from _read_jsonl(file, text_field)
        else:
            yield from _read_columns(file, text_field)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset {file}: not readable ({error}); repair the file or leave it out") from error


def _read_jsonl(file: Path, text_field: str) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"--dataset {file}, line {number}: not JSON ({error}); repair or remove it") from None
            if not isinstance(record, dict):
                raise ValueError(f"--dataset {file}, line {number}: not an object with fields, like {{'text': ...}}")
            yield _text(record, text_field, f"{file}, line {number}")


def _read_columns(file: Path, text_field: str) -> Iterator[str]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import ipc, parquet

    try:
        if file.suffix == ".parquet":
            table = parquet.ParquetFile(file)
            _text(dict.fromkeys(table.schema_arrow.names, ""), text_field, str(file))
            batches = table.iter_batches(columns=[text_field])
        else:
            try:
                batches = ipc.open_stream(pyarrow.memory_map(str(file)))
            except pyarrow.ArrowInvalid:  # not the stream format of `datasets` but the file format (Feather)
                table = ipc.open_file(pyarrow.memory_map(str(file)))
                batches = (table.get_batch(i) for i in range(table.num_record_batches))
        row = 0
        for batch in batches:
            _text(dict.fromkeys(batch.schema.names, ""), text_field, str(file))
            for value in batch.column(batch.schema.names.index(text_field)).to_pylist():
                yield _text({text_field: value}, text_field, f"{file}, row {row}")
                row += 1
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"--dataset {file}: not a readable {file.suffix} file ({error})") from None


def _stream(dataset: str, text_field: str) -> Iterator[str]:
    import datasets  # heavy, and needed for the hub only

    name, _, config = dataset.partition(":")
    try:
        records = iter(datasets.load_dataset(name, config or None, split="train", streaming=True))
        first = next(records, None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"--dataset {dataset}: neither a local file or folder nor a readable hub dataset ({error}); "
            "check the name and the network, name one of its configurations as owner/name:config, "
            "or download it and give the files"
        ) from error
    for row, record in enumerate(itertools.chain([first] if first is not None else [], records)):
        yield _text(record, text_field, f"{dataset}, row {row}")


def _text(record: dict[str, Any], text_field: str, where: str) -> str:
    if text_field not in record:
        raise ValueError(
            f"--dataset {where}: no field {text_field!r}; name the one that holds the text with --text_field "
            f"(there are: {', '.join(map(str, record))})"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(
            f"--dataset {where}: field {text_field!r} is {type(text).__name__}, not text; use --text_field"
        )
    return text
