"""Documents to tokens, framed by the tokenizer's BOS, its EOS or both; conversations by its chat template."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame, LossOn
from sparseforge_ds.data.documents import Conversation, Document, is_blank, tokenizable, trained_spans
from sparseforge_ds.data.text_files import Source
from sparseforge_ds.data.windows import document_starts, token_ids, trained_flags
from sparseforge_ds.model.chat_template import Span
from sparseforge_ds.model.tokenizer import run_tokenizer

_DOCUMENTS_AT_A_TIME = 256
_CHARACTERS_AT_A_TIME = 2**22
"""Documents are tokenised together up to one of these, so that a batch of books fits into memory."""


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
    texts = [tokenizable(text) for text in texts]
    batch = run_tokenizer(tokenizer, texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [
        list(ids) if isinstance(each, Conversation) else [*front, *ids, *behind]
        for each, ids in zip(documents, batch["input_ids"], strict=True)
    ]


def encode_trained(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> list[tuple[list[int], np.ndarray]]:
    """The ids of every document, those of `encode`, and which of them `--loss_on completion` trains on, as booleans.

    A token counts when it begins inside the completion; a token behind a document, which ends it, counts too.

    Raises:
        ValueError: as `encode`; or the tokenizer or its template does not say which tokens these are.
    """
    front, behind = frame_tokens(tokenizer, frame)
    if not tokenizer.is_fast:
        raise ValueError(
            f"--loss_on completion: the tokenizer of {tokenizer.name_or_path} ({type(tokenizer).__name__}) is a slow "
            "one, which does not say where in the text its tokens begin; put a tokenizer.json into its folder, or "
            "leave the flag out"
        )
    pairs = [trained_spans(each, tokenizer) for each in documents]
    texts = [tokenizable(text) for text, _ in pairs]
    batch = run_tokenizer(
        tokenizer,
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    found = []
    for document, (_, spans), ids, offsets in zip(
        documents, pairs, batch["input_ids"], batch["offset_mapping"], strict=True
    ):
        trained = _begin_inside(offsets, spans)
        if isinstance(document, Conversation):
            found.append((list(ids), trained))
        else:
            around = np.array([*([False] * len(front)), *trained, *([True] * len(behind))], dtype=bool)
            found.append(([*front, *ids, *behind], around))
    return found


def check_trained(source: Source, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto") -> None:
    """Look at the first document of a text, so that what `encode_trained` refuses is found early; errors as there."""
    first = next((document for document in source.read() if not is_blank(document)), None)
    if first is not None:
        encode_trained([first], tokenizer, frame)


def _begin_inside(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    begin = np.array([first for first, _ in offsets], dtype=np.int64)
    trained = np.zeros(len(begin), dtype=bool)
    for start, stop in spans:
        trained |= (start <= begin) & (begin < stop)
    return trained


@dataclass(frozen=True)
class Batch:
    """Some documents in a row, as tokens."""

    token: np.ndarray
    """(tokens,) of `token_dtype`."""
    documents: int
    skipped: int
    """Documents without text, which are not among `documents`."""


def tokenise(
    documents: Iterator[Document],
    tokenizer: PreTrainedTokenizerBase,
    frame: DocumentFrame = "auto",
    loss_on: LossOn = "all",
    document_attention: bool = False,
) -> Iterator[Batch]:
    """All documents, some at a time; takes no more from the iterator than it has given; errors as `encode`.

    With `document_attention` the first token of a document is not trained on: no token before it is in its sight.
    """
    dtype = token_dtype(tokenizer, loss_on, document_attention)
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
        ids: Sequence[list[int]] = ()
        trained: Sequence[np.ndarray] = ()
        if used and loss_on == "completion":
            ids, trained = zip(*encode_trained(used, tokenizer, frame), strict=True)
        elif used:
            ids = encode(used, tokenizer, frame)
        lengths = [len(each) for each in ids]
        token = np.zeros(sum(lengths), dtype=dtype)
        token_ids(token)[:] = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64)
        if token.dtype.names is not None:
            trained_flags(token)[:] = np.concatenate(trained) if trained else True
        if (first := document_starts(token)) is not None:
            first[[stop - length for stop, length in zip(np.cumsum(lengths), lengths, strict=True) if length]] = True
            trained_flags(token)[first] = False
        yield Batch(token, len(used), len(batch) - len(used))


def no_text_error(name: str, skipped: int) -> ValueError:
    """The error of a source that has no text."""
    return ValueError(
        f"--dataset {name}: there is no text in it ({skipped:,} documents, all of them null or blank); give another "
        "text, or name the field that holds it with --text_field"
    )


def unknown_token_error(largest: int, vocabulary: int) -> ValueError:
    """The error of a tokenizer that gives ids which the model does not know."""
    return ValueError(
        f"the tokenizer gives token {largest}, but the model knows {vocabulary}; tokenizer and weights do not belong "
        "together"
    )


def token_dtype(tokenizer: PreTrainedTokenizerBase, loss_on: LossOn = "all", document_attention: bool = False) -> str:
    """Return the numpy dtype of a token: an id, and the flags that `windows.token_ids` and its neighbours read.

    The id is uint16 where every id of the tokenizer fits, else uint32. `completion` adds a flag "trained on",
    `document_attention` adds that one and "first of its document".
    """
    marks = ",?,?" if document_attention else ",?" if loss_on == "completion" else ""
    largest = max(tokenizer.get_vocab().values(), default=0)  # a count would not do: ids may have gaps
    return ("uint16" if largest < 2**16 else "uint32") + marks


def cache_key(
    source: Source, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto", *more: object
) -> tuple[str, dict[str, Any]]:
    """A name for the tokens of a text, of all that decides them; and what it stands for, by names that users know.

    Raises:
        ValueError: the tokenizer cannot frame documents so, or a file cannot be read.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    named = f"{type(tokenizer).__name__}, hash {_hash([vocabulary, tokenizer.chat_template])}"
    ids = frame_tokens(tokenizer, frame)
    front, behind = (" ".join(tokenizer.convert_ids_to_tokens(list(each))) for each in ids)
    facts = {**source.facts, "--document_frame": f"{front} ... {behind}".strip(), "tokenizer": named}
    return _hash([source.identity, named, ids, *more]), facts


def _hash(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
