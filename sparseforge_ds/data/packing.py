"""Documents to one long row of tokens on disk, tokenised once and then mapped into memory.

Every document is framed by the tokenizer's BOS token, its EOS token or both (see `frame_tokens`). A finished cache is
two files: `<key>.bin`, the token ids as uint16 or uint32, and `<key>.json`, which appears last.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.documents import Documents, Stream

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
    skipped: int = 0
    """Documents without any text."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the key stands for."""

    def open(self) -> np.memmap:
        """(tokens,) ids, read only.

        Raises:
            ValueError: the file is not where this process can see it.
        """
        return open_tokens(Path(self.path), self.dtype, self.tokens)

    def summary(self, wanted: int) -> str:
        """What a run of `wanted` tokens reads, for its banner."""
        skipped = f" ({self.skipped:,} without text were skipped)" if self.skipped else ""
        return (
            f"{self.documents:,} documents{skipped}, {self.tokens:,} tokens; the run reads {wanted:,} "
            f"({wanted / self.tokens:.2f} epochs)"
        )


def open_tokens(path: Path, dtype: str, tokens: int) -> np.memmap:
    """(tokens,) ids of a file, read only.

    Raises:
        ValueError: the file is not where this process can see it.
    """
    try:
        return np.memmap(path, dtype=dtype, mode="r", shape=(tokens,))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: the token cache cannot be opened ({error}); --output_dir must be a folder that all "
            "machines of the run share"
        ) from error


def pack(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, folder: Path, frame: DocumentFrame = "auto"
) -> Packed:
    """The token cache of a text, made if it is not there yet.

    Args:
        documents: the text.
        tokenizer: its tokenizer.
        folder: where caches lie.
        frame: which of its tokens stand around every document.

    Raises:
        ValueError: the text cannot be read or is empty, or the tokenizer cannot frame documents so.
        OSError: the disk is full.
    """
    key = hashlib.sha256(json.dumps(fingerprint(documents, tokenizer, frame)).encode()).hexdigest()[:16]
    record, path = folder / f"{key}.json", folder / f"{key}.bin"
    known = facts(documents, tokenizer, frame)
    if record.exists():  # the files may have other names now
        return Packed(**{**json.loads(record.read_text()), "path": str(path), "facts": known})
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder, key)
    # A name of its own: two runs may fill one folder at once (sparseforge compare), with equal bytes.
    temporary = path.with_name(f"{key}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            counts = _write(documents, tokenizer, frame, file)
        packed = Packed(str(path), key, *counts, known)
        os.replace(temporary, path)
        temporary.write_text(json.dumps(asdict(packed)))
        os.replace(temporary, record)
    finally:
        temporary.unlink(missing_ok=True)
    return packed


def _sweep(folder: Path, key: str) -> None:
    """Remove what a killed run was writing: nobody holds a lock on it."""
    for leftover in folder.glob(f"{key}.*.tmp"):
        try:
            with leftover.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
        except (BlockingIOError, FileNotFoundError):
            continue


def frame_tokens(
    tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids in front of every document, and those behind it.

    Args:
        tokenizer: has the tokens.
        frame: which of them; `auto` is BOS, or EOS where there is no BOS.

    Raises:
        ValueError: the tokenizer lacks one of them, or both are the same token.
    """
    found = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    there = [role for role, number in found.items() if number is not None]
    if not there:
        raise ValueError(
            "the tokenizer has neither a BOS nor an EOS token to separate documents; set one in its folder"
        )
    wanted = ["bos", "eos"] if frame == "both" else there[:1] if frame == "auto" else [frame]
    for role in wanted:
        if role not in there:
            raise ValueError(
                f"--document_frame {frame}: the tokenizer has no {role.upper()} token; use {there[0]}, or set "
                f"{role}_token in its tokenizer_config.json"
            )
    if len(wanted) == 2 and found["bos"] == found["eos"]:
        raise ValueError(
            f"--document_frame both: the tokenizer's BOS and EOS are one token ({tokenizer.bos_token}), which would "
            "stand twice between documents; use bos or eos"
        )
    front, behind = ((int(found[role]),) if role in wanted else () for role in ("bos", "eos"))
    return front, behind


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto") -> list[list[int]]:
    """The ids of every document, framed. A document's ids do not depend on the others."""
    front, behind = frame_tokens(tokenizer, frame)
    batch = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [[*front, *ids, *behind] for ids in batch]


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> str:
    """The smallest of numpy's types that holds every id."""
    return "uint16" if len(tokenizer) <= 2**16 else "uint32"


def fingerprint(
    documents: Documents | Stream, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> list[object]:
    """What decides the row of tokens of a text, as JSON types.

    Raises:
        ValueError: the tokenizer cannot frame documents so.
    """
    # Caches were once framed as by `auto` only, and are named without it.
    framed = [] if frame_tokens(tokenizer, frame) == frame_tokens(tokenizer) else [frame]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    # The null is a length that caches once had.
    parts: list[object] = [_FORMAT, documents.identity, None, tokenizer.bos_token_id]
    return [*parts, tokenizer.eos_token_id, type(tokenizer).__name__, vocabulary, *framed]


def facts(
    documents: Documents | Stream, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> dict[str, Any]:
    """What `fingerprint` stands for, as JSON types by names that users know, to say what differs from another text."""
    *_, bos, eos, kind, vocabulary = fingerprint(documents, tokenizer)
    front, behind = (" ".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in frame_tokens(tokenizer, frame))
    digest = hashlib.sha256(json.dumps([bos, eos, kind, vocabulary]).encode()).hexdigest()[:16]
    how = {"--document_frame": f"{front} ... {behind}".strip(), "tokenizer": f"{kind}, hash {digest}"}
    return {**documents.facts, **how}


def _write(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame, file: IO[bytes]
) -> tuple[str, int, int, int, int]:
    dtype = token_dtype(tokenizer)
    tokens, count, largest, skipped = 0, 0, 0, 0
    texts = iter(documents)
    while batch := list(itertools.islice(texts, _DOCUMENTS_AT_A_TIME)):
        used = [text for text in batch if text.strip()]
        skipped += len(batch) - len(used)
        for ids in encode(used, tokenizer, frame) if used else ():
            file.write(np.asarray(ids, dtype=dtype).tobytes())
            tokens, count, largest = tokens + len(ids), count + 1, max(largest, *ids)
    if not tokens:
        raise ValueError(
            f"--dataset {documents.name}: there is no text in it ({skipped:,} documents, all of them null or blank); "
            "give another text, or name the field that holds it with --text_field"
        )
    return dtype, tokens, count, largest, skipped
