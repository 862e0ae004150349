"""Files of token ids, as other tools write them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(path: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> Path:
    """Write documents of sequences of ids as Megatron-LM does, and return the index."""
    sequences = [np.array(sequence, dtype=dtype) for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    item = np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *lengths])[:-1] * item
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    path.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, CODES[dtype], len(lengths), len(bounds))
    tables = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(bounds, "<i8"))
    path.with_suffix(".idx").write_bytes(header + b"".join(table.tobytes() for table in tables))
    return path.with_suffix(".idx")
