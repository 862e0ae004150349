"""Documents that are token ids already, made with the model's tokenizer before: records, and Megatron-LM's files."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseforge_ds.config.arguments import LossOn
from sparseforge_ds.data.micro_batch import IGNORED

_HEADER = struct.Struct("<9sQBQQ")
"""Header of an .idx file: magic, version, code of the ids' dtype, number of sequences, number of document bounds."""
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of integers in an .idx file; 6 and 7 are floats."""
_REPAIR = "write both files anew, or leave them out"


@dataclass(frozen=True, eq=False)
class TokenDocument:
    """Document of token ids. Tokens around documents are among them, and none are added."""

    ids: np.ndarray
    """(tokens,) int64, without padding."""
    trained: np.ndarray | None
    """(tokens,) bool: True where the labels train on a token; None without labels."""
    where: str
    """File and record, for error messages."""

    def __len__(self) -> int:
        return len(self.ids)

    def check_loss(self, loss_on: LossOn) -> None:
        """Raise ValueError if the labels do not say what `--loss_on` needs to know, or say otherwise."""
        if not len(self):
            return
        if loss_on == "completion" and self.trained is None:
            raise ValueError(
                f"{self.where}: has token ids without labels, which --loss_on completion needs; add a field labels "
                "with -100 where a token is not trained on, or leave the flag out"
            )
        if loss_on == "all" and self.trained is not None and not self.trained.all():
            raise ValueError(
                f"{self.where}: its labels leave tokens out, and the loss is on all tokens; use --loss_on completion, "
                "which follows the labels, or remove the field labels"
            )

    def check_vocabulary(self, largest: int) -> None:
        """Raise ValueError if an id is larger than all ids of the tokenizer."""
        if len(self.ids) and self.ids.max() > largest:
            raise ValueError(
                f"{self.where}: has token {self.ids.max()}, and the tokenizer's ids end at {largest}; tokenize the "
                "text with the tokenizer of the model"
            )


def parse_token_record(record: Mapping[str, Any], where: str) -> TokenDocument:
    """Return the document of a record with `input_ids`, and perhaps `labels` and `attention_mask`.

    Tokens whose attention mask is 0 are padding, and are removed. A label is the id of its own token, not of the next
    one, or -100 where the token is not trained on. Null `input_ids` are an empty document.

    Raises:
        ValueError: a field is no flat list of integers, an id is negative, or fields do not fit each other.
    """
    # 1. Ids, without padding.
    ids = _integers(record["input_ids"], "input_ids", where, 0, 2**31 - 1)
    labels = None
    if record.get("labels") is not None:
        labels = _integers(record["labels"], "labels", where, IGNORED, 2**31 - 1, len(ids))
    if record.get("attention_mask") is not None:
        is_token = _integers(record["attention_mask"], "attention_mask", where, 0, 1, len(ids)) == 1
        ids = ids[is_token]
        labels = None if labels is None else labels[is_token]
    if labels is None:
        return TokenDocument(ids, None, where)
    # 2. Labels say which of them are trained on, and nothing else.
    trained = labels != IGNORED
    if not np.array_equal(labels[trained], ids[trained]):
        raise ValueError(
            f"{where}: labels are neither the ids of their tokens nor {IGNORED}; write input_ids as labels, unshifted, "
            f"with {IGNORED} where a token is not trained on"
        )
    return TokenDocument(ids, trained, where)


def _integers(value: Any, field: str, where: str, least: int, most: int, length: int | None = None) -> np.ndarray:
    """Return a list of integers within bounds as (tokens,) int64."""
    try:
        array = np.asarray([] if value is None else value)
    except (ValueError, OverflowError):  # lists of unequal lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in ("iub" if most == 1 else "iu")):
        raise ValueError(f"{where}: {field} is not a flat list of integers; write one list of token ids a record")
    if length is not None and len(array) != length:
        raise ValueError(f"{where}: {field} has {len(array)} entries, and input_ids {length}; write one for each token")
    if array.size and (array.min() < least or array.max() > most):
        wrong = array.min() if array.min() < least else array.max()
        raise ValueError(f"{where}: {field} has {wrong}, which is not from {least} to {most}; repair the record")
    return array.astype(np.int64)


def iter_megatron(file: str, longest: int) -> Iterator[TokenDocument]:
    """Yield the documents of Megatron-LM's indexed files.

    Nothing is trusted: every bound of the index is compared with the files before something is read by it.

    Args:
        file: path of the .idx file; the .bin file lies beside it.
        longest: most tokens of a document.

    Raises:
        ValueError: the index is damaged or does not fit the .bin file, holds no integers, or a document is too long.
    """
    if "://" in file:
        raise ValueError(f"{file}: Megatron files are read on this machine only; download both and give the .idx")
    index = _MegatronIndex(Path(file))
    with index.data.open("rb") as content:
        for number in range(index.documents):
            where = f"{file}, document {number + 1}"
            # A document is one or more sequences, which need not lie one after the other.
            parts = []
            tokens = 0
            for sequence in index.sequences(number, where):
                start, length = index.locate(sequence, where)
                tokens += length
                if tokens > longest:
                    raise ValueError(f"{where}: has more than {longest:,} tokens; divide it into several")
                content.seek(start)
                parts.append(np.frombuffer(content.read(length * index.item), dtype=index.dtype))
            ids = np.concatenate(parts) if parts else np.empty(0, dtype=index.dtype)
            yield TokenDocument(_integers(ids, "the document", where, 0, 2**31 - 1), None, where)


class _MegatronIndex:
    """Index of Megatron-LM's files: bounds of documents in sequences, and of sequences in bytes of the .bin file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path.with_suffix(".bin")
        if not self.data.is_file():
            raise ValueError(f"{path}: {self.data.name} does not lie beside it; give both files, or leave it out")
        self.data_size = self.data.stat().st_size
        # 1. The header.
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or header[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{path}: is no index of Megatron; {_REPAIR}")
        _, version, code, sequences, bounds = _HEADER.unpack(header)
        if version != 1:
            raise ValueError(f"{path}: is an index of version {version}, and only 1 can be read; {_REPAIR}")
        if code not in _DTYPES:
            raise ValueError(f"{path}: holds no integers (dtype code {code}), so no token ids; {_REPAIR}")
        self.dtype = np.dtype(_DTYPES[code])
        self.item = self.dtype.itemsize
        # 2. The size follows from the header. A byte more for each sequence is a mode of multimodal data.
        size = path.stat().st_size
        expected = _HEADER.size + 12 * sequences + 8 * bounds
        if size not in (expected, expected + sequences) or bounds < 1:
            raise ValueError(f"{path}: has {size:,} bytes, and its header asks for {expected:,}; {_REPAIR}")
        # 3. The tables, mapped.
        tables = np.memmap(path, dtype=np.uint8, mode="r")
        pointers = _HEADER.size + 4 * sequences
        bound_table = pointers + 8 * sequences
        self._lengths = tables[_HEADER.size : pointers].view("<i4")
        self._pointers = tables[pointers:bound_table].view("<i8")
        self._bounds = tables[bound_table : bound_table + 8 * bounds].view("<i8")
        self.documents = bounds - 1
        if self._bounds[0] != 0 or self._bounds[-1] != sequences:
            raise ValueError(f"{path}: its documents do not cover its {sequences:,} sequences; {_REPAIR}")

    def sequences(self, document: int, where: str) -> range:
        """Return the sequences of a document."""
        start = int(self._bounds[document])
        stop = int(self._bounds[document + 1])
        if not 0 <= start <= stop <= len(self._lengths):
            raise ValueError(f"{where}: its bounds are {start} and {stop} in the index; {_REPAIR}")
        return range(start, stop)

    def locate(self, sequence: int, where: str) -> tuple[int, int]:
        """Return the first byte of a sequence in the .bin file, and its tokens."""
        start = int(self._pointers[sequence])
        length = int(self._lengths[sequence])
        if length < 0 or not 0 <= start <= self.data_size - length * self.item:
            raise ValueError(
                f"{where}: the index puts {length} tokens at byte {start:,} of {self.data.name}, which has "
                f"{self.data_size:,}; {_REPAIR}"
            )
        return start, length
