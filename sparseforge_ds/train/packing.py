"""Documents to one long row of tokens on disk, tokenised once and then mapped into memory.

Every document starts with the tokenizer's BOS token, or ends with its EOS token where it has no BOS. A finished cache
is two files: `<key>.bin`, the token ids as uint16 or uint32, and `<key>.json`, which appears last.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.train.documents import Documents

_FORMAT = 1
_DOCUMENTS_AT_A_TIME = 256


@dataclass(frozen=True)
class Packed:
    """A finished cache."""

    path: str
    key: str
    dtype: str
    tokens: int
    documents: int
    largest_id: int

    def open(self) -> np.memmap:
        """(tokens,) ids, read only.

        Raises:
            ValueError: the file is not where this process can see it.
        """
        try:
            return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path}: the token cache cannot be opened ({error}); --output_dir must be a folder that all "
                "machines of the run share"
            ) from error


def pack(documents: Documents, tokenizer: PreTrainedTokenizerBase, folder: Path, enough: int) -> Packed:
    """The token cache of a text, made if it is not there yet.

    Args:
        documents: the text.
        tokenizer: its tokenizer; the documents are framed by its BOS or EOS token.
        folder: where caches lie.
        enough: tokens after which the reading of an endless source stops.

    Raises:
        ValueError: the text cannot be read, or the tokenizer can frame no document.
        OSError: the disk is full.
    """
    frame = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if frame is None:
        raise ValueError(
            "the tokenizer has neither a BOS nor an EOS token to separate documents; set one in its folder"
        )
    key = _key(documents, tokenizer, enough)
    record, path = folder / f"{key}.json", folder / f"{key}.bin"
    if record.exists():
        return Packed(**{**json.loads(record.read_text()), "path": str(path)})
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            counts = _write(documents, tokenizer, frame, file, enough if documents.endless else None)
        packed = Packed(str(path), key, *counts)
        os.replace(temporary, path)
        temporary.write_text(json.dumps(asdict(packed)))
        os.replace(temporary, record)
    finally:
        temporary.unlink(missing_ok=True)
    return packed


def _write(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, frame: int, file: IO[bytes], enough: int | None
) -> tuple[str, int, int, int]:
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    tokens, count, largest = 0, 0, 0
    texts = (text for text in documents if text.strip())
    while batch := list(itertools.islice(texts, _DOCUMENTS_AT_A_TIME)):
        for ids in tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]:
            ids = [frame, *ids] if tokenizer.bos_token_id is not None else [*ids, frame]
            file.write(np.asarray(ids, dtype=dtype).tobytes())
            tokens, count, largest = tokens + len(ids), count + 1, max(largest, *ids)
            if enough is not None and tokens >= enough:
                return dtype.name, tokens, count, largest
    return dtype.name, tokens, count, largest


def _key(documents: Documents, tokenizer: PreTrainedTokenizerBase, enough: int) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    parts = [_FORMAT, documents.identity, enough if documents.endless else None, tokenizer.bos_token_id]
    parts += [tokenizer.eos_token_id, type(tokenizer).__name__, vocabulary]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
