"""Documents to tokens, and a text that is tokenised whole before training: one file of ids, mapped into memory.

Text is framed by the tokenizer's BOS token, its EOS token or both (see `frame_tokens`), and a conversation by the chat
template alone. A finished cache is two files: `<key>.bin`, the ids as uint16 or uint32, and `<key>.json`, its record,
which appears last.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.documents import Documents, Stream
from sparseforge_ds.data.formats import Conversation, Document, is_blank

_DOCUMENTS_AT_A_TIME = 256
_CHARACTERS_AT_A_TIME = 2**22
"""Documents are tokenised together up to one of these, so that a batch of books fits into memory."""
_LEFTOVER_SECONDS = 600
"""A temporary file that nobody has written to for so long belongs to a run that was killed."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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
        """(tokens,) ids, read only; errors as `open_tokens`."""
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
        ValueError: this process cannot see the file.
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
    key, known = cache_key(documents, tokenizer, frame), facts(documents, tokenizer, frame)
    record, path = folder / f"{key}.json", folder / f"{key}.bin"
    if record.exists():  # the folder may have moved, and the files may have other names now
        return Packed(**{**json.loads(record.read_text()), "path": str(path), "facts": known})
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    # A name of its own: two runs may fill one folder at once (sparseforge compare), with equal bytes.
    temporary = path.with_name(f"{key}.{uuid.uuid4().hex[:8]}.tmp")
    dtype, tokens, count, largest, skipped = token_dtype(tokenizer), 0, 0, 0, 0
    try:
        with temporary.open("wb") as file:
            for batch in tokenise(iter(documents), tokenizer, frame):
                file.write(batch.token.tobytes())
                tokens, count, skipped = tokens + len(batch.token), count + batch.documents, skipped + batch.skipped
                largest = max(largest, int(batch.token.max(initial=0)))
        if not tokens:
            raise without_text(documents.name, skipped)
        packed = Packed(str(path), key, dtype, tokens, count, largest, skipped, known)
        os.replace(temporary, path)
        temporary.write_text(json.dumps(asdict(packed)))
        os.replace(temporary, record)
    finally:
        temporary.unlink(missing_ok=True)
    return packed


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs were writing."""
    for leftover in folder.glob("*.tmp"):
        if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
            leftover.unlink(missing_ok=True)


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


def encode(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> list[list[int]]:
    """The ids of every document. A document's ids do not depend on the others.

    Half of a surrogate pair alone, which JSON can have and no tokenizer takes, becomes U+FFFD.

    Raises:
        ValueError: the tokenizer cannot frame documents so, or has no chat template for a conversation.
    """
    front, behind = frame_tokens(tokenizer, frame)
    texts = [each.render(tokenizer) if isinstance(each, Conversation) else each for each in documents]
    texts = [_LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text) for text in texts]
    batch = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [
        list(ids) if isinstance(each, Conversation) else [*front, *ids, *behind]
        for each, ids in zip(documents, batch, strict=True)
    ]


@dataclass(frozen=True)
class Batch:
    """Some documents in a row, as tokens."""

    token: np.ndarray
    """(tokens,) ids."""
    documents: int
    skipped: int
    """Documents without text, which are not among `documents`."""


def tokenise(
    documents: Iterator[Document], tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> Iterator[Batch]:
    """All documents, some at a time; takes no more from the iterator than it has given; errors as `encode`."""
    dtype = token_dtype(tokenizer)
    while True:
        batch, characters = [], 0
        for document in itertools.islice(documents, _DOCUMENTS_AT_A_TIME):
            batch.append(document)
            characters += len(document)
            if characters >= _CHARACTERS_AT_A_TIME:
                break
        if not batch:
            return
        used = [document for document in batch if not is_blank(document)]
        ids = itertools.chain.from_iterable(encode(used, tokenizer, frame)) if used else ()
        yield Batch(np.fromiter(ids, dtype=dtype), len(used), len(batch) - len(used))


def without_text(name: str, skipped: int) -> ValueError:
    """The error of a source that has no text."""
    return ValueError(
        f"--dataset {name}: there is no text in it ({skipped:,} documents, all of them null or blank); give another "
        "text, or name the field that holds it with --text_field"
    )


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> str:
    """The smallest of numpy's types that holds every id."""
    return "uint16" if len(tokenizer) <= 2**16 else "uint32"


def cache_key(
    documents: Documents | Stream, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame, *more: object
) -> str:
    """A name for the tokens of a text, of all that decides them.

    Raises:
        ValueError: the tokenizer cannot frame documents so.
    """
    parts = [documents.identity, _of_tokenizer(tokenizer), frame_tokens(tokenizer, frame), *more]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def facts(
    documents: Documents | Stream, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> dict[str, Any]:
    """What a `cache_key` stands for, as JSON types by names that users know, to say what differs from another text."""
    front, behind = (" ".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in frame_tokens(tokenizer, frame))
    digest = hashlib.sha256(json.dumps(_of_tokenizer(tokenizer)).encode()).hexdigest()[:16]
    named = f"{type(tokenizer).__name__}, hash {digest}"
    return {**documents.facts, "--document_frame": f"{front} ... {behind}".strip(), "tokenizer": named}


def _of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return [type(tokenizer).__name__, vocabulary, tokenizer.chat_template]
