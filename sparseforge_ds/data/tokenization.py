"""Documents to tokens: text framed by BOS, EOS or both, conversations by the chat template, token ids as they are."""

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
from sparseforge_ds.data.documents import Conversation, Document, Text, is_blank, text_with_spans, tokenizable
from sparseforge_ds.data.text_files import TextSource
from sparseforge_ds.data.token_documents import TokenDocument
from sparseforge_ds.data.windows import document_starts, ids_of_tokens, trained_flags
from sparseforge_ds.model.chat_template import TextSpan
from sparseforge_ds.model.tokenizer import run_tokenizer

DOCUMENTS_AT_A_TIME = 256
CHARACTERS_AT_A_TIME = 2**22
"""Documents are tokenized together until one of these two limits is reached, so that a batch of books fits memory."""


def frame_tokens(
    tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before every document, and the ids after it.

    Args:
        tokenizer: has the tokens.
        frame: tokens to use; `auto` is BOS, or EOS where there is no BOS.

    Raises:
        ValueError: the tokenizer lacks one of them, or both are the same token.
    """
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    available = [role for role, number in ids.items() if number is not None]
    if not available:
        raise ValueError(
            "the tokenizer has neither a BOS nor an EOS token to separate documents; set one in its folder"
        )
    # The tokens that the frame needs must be there.
    roles = ["bos", "eos"] if frame == "both" else available[:1] if frame == "auto" else [frame]
    for role in roles:
        if role not in available:
            raise ValueError(
                f"--document_frame {frame}: the tokenizer has no {role.upper()} token; use {available[0]}, or set "
                f"{role}_token in its tokenizer_config.json"
            )
    if len(roles) == 2 and ids["bos"] == ids["eos"]:
        raise ValueError(
            f"--document_frame both: the tokenizer's BOS and EOS are one token ({tokenizer.bos_token}), which would "
            "stand twice between documents; use bos or eos"
        )
    before, after = ((int(ids[role]),) if role in roles else () for role in ("bos", "eos"))
    return before, after


def check_frame(tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame) -> None:
    """Check that a tokenizer has the tokens of a frame.

    Raises:
        ValueError: the errors of `frame_tokens`.
    """
    frame_tokens(tokenizer, frame)


def tokenize(
    documents: Sequence[Text], tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> list[list[int]]:
    """Return the ids of every document. A document's ids do not depend on the other documents.

    JSON can hold one half of a surrogate pair, which no tokenizer takes: it becomes U+FFFD.

    Raises:
        ValueError: the tokenizer lacks the tokens of the frame, or has no chat template for a conversation.
    """
    before, after = frame_tokens(tokenizer, frame)
    texts = [
        tokenizable(document.render(tokenizer) if isinstance(document, Conversation) else document)
        for document in documents
    ]
    batch = run_tokenizer(tokenizer, texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [
        list(ids) if isinstance(document, Conversation) else [*before, *ids, *after]
        for document, ids in zip(documents, batch["input_ids"], strict=True)
    ]


def encode_trained(
    documents: Sequence[Text], tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto"
) -> list[tuple[list[int], np.ndarray]]:
    """Return the ids of every document, and for each id whether `--loss_on completion` trains on it.

    A token is trained on if it has a character of the completion, or follows the document to end it. So a space that
    ends the prompt is trained on where the tokenizer joins it to the completion's first word: without that word nothing
    would be left of many answers.

    Raises:
        ValueError: as `tokenize`; or the tokenizer or its template does not say which tokens these are.
    """
    before, after = frame_tokens(tokenizer, frame)
    if not tokenizer.is_fast:
        raise ValueError(
            f"--loss_on completion: the tokenizer of {tokenizer.name_or_path} ({type(tokenizer).__name__}) is a slow "
            "one, which does not say where in the text its tokens begin; put a tokenizer.json into its folder, or "
            "leave the flag out"
        )
    # 1. Texts, with their trained spans in characters.
    texts_with_spans = [text_with_spans(document, tokenizer) for document in documents]
    batch = run_tokenizer(
        tokenizer,
        [tokenizable(text) for text, _ in texts_with_spans],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    # 2. Spans in characters become flags of tokens.
    encoded = []
    for document, (_, spans), ids, offsets in zip(
        documents, texts_with_spans, batch["input_ids"], batch["offset_mapping"], strict=True
    ):
        trained = _tokens_in_spans(offsets, spans)
        if isinstance(document, Conversation):
            encoded.append((list(ids), trained))
        else:
            framed = np.array([*([False] * len(before)), *trained, *([True] * len(after))], dtype=bool)
            encoded.append(([*before, *ids, *after], framed))
    return encoded


def check_trained(source: TextSource, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto") -> None:
    """Encode the first document of a text, so that errors of `encode_trained` come before a run starts."""
    first = next((document for document in source.read() if not is_blank(document)), None)
    if first is not None and not isinstance(first, TokenDocument):
        encode_trained([first], tokenizer, frame)


def _tokens_in_spans(offsets: Sequence[TextSpan], spans: Sequence[TextSpan]) -> np.ndarray:
    """Return True for each token with a character in one of the spans."""
    token_begin, token_end = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    result = np.zeros(len(token_begin), dtype=bool)
    for start, stop in spans:
        if start < stop:  # else a token around an empty completion would count
            result |= (token_begin < stop) & (token_end > start)
    return result


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of some consecutive documents."""

    token: np.ndarray
    """(tokens,) of `token_dtype`."""
    documents: int
    """Documents with text."""
    skipped: int
    """Documents without text; they have no tokens."""


def token_batches(
    documents: Iterator[Document],
    tokenizer: PreTrainedTokenizerBase,
    frame: DocumentFrame = "auto",
    loss_on: LossOn = "all",
    document_attention: bool = False,
) -> Iterator[TokenBatch]:
    """Yield the tokens of all documents, some documents at a time; errors as `tokenize`.

    Nothing is read ahead: the iterator stands at the first document whose tokens have not been yielded.
    With `document_attention` the first token of a document is not trained on, since it sees no token before it.
    """
    dtype = token_dtype(tokenizer, loss_on, document_attention)
    largest = largest_id(tokenizer)
    while batch := _take_documents(documents):
        filled = [document for document in batch if not is_blank(document)]
        # 1. Ids, and trained flags if only completions are trained on.
        encoded = _encode_all(filled, tokenizer, frame, loss_on)
        for document in filled:
            if isinstance(document, TokenDocument):
                document.check_vocabulary(largest)
        # 2. One array of all tokens.
        lengths = [len(ids) for ids, _ in encoded]
        token = np.zeros(sum(lengths), dtype=dtype)
        for stop, (ids, trained) in zip(np.cumsum(lengths), encoded, strict=True):
            ids_of_tokens(token)[stop - len(ids) : stop] = ids
            if token.dtype.names is not None:
                trained_flags(token)[stop - len(ids) : stop] = True if trained is None else trained
        # 3. Starts of documents; no token predicts them.
        if (starts := document_starts(token)) is not None:
            starts[[stop - length for stop, length in zip(np.cumsum(lengths), lengths, strict=True) if length]] = True
            trained_flags(token)[starts] = False
        yield TokenBatch(token, len(filled), len(batch) - len(filled))


def _encode_all(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame, loss_on: LossOn
) -> list[tuple[Sequence[int] | np.ndarray, np.ndarray | None]]:
    """Return the ids of every document, and its trained flags if only completions are trained on."""
    texts = [document for document in documents if not isinstance(document, TokenDocument)]
    pairs: list[tuple[Sequence[int] | np.ndarray, np.ndarray | None]] = []
    if texts and loss_on == "completion":
        pairs.extend(encode_trained(texts, tokenizer, frame))
    elif texts:
        pairs.extend((ids, None) for ids in tokenize(texts, tokenizer, frame))
    encoded_texts = iter(pairs)
    return [
        (document.ids, document.trained) if isinstance(document, TokenDocument) else next(encoded_texts)
        for document in documents
    ]


def _take_documents(documents: Iterator[Document]) -> list[Document]:
    """Return the next documents, as many as are tokenized together; none at the end."""
    batch: list[Document] = []
    characters = 0
    for document in itertools.islice(documents, DOCUMENTS_AT_A_TIME):
        batch.append(document)
        characters += len(document)
        if characters >= CHARACTERS_AT_A_TIME:
            break
    return batch


def no_text_error(name: str, skipped: int) -> ValueError:
    """Return the error about a source without any text."""
    return ValueError(
        f"--dataset {name}: there is no text in it ({skipped:,} documents, all of them null or blank); give another "
        "text, or name the field that holds it with --text_field"
    )


def unknown_token_error(largest: int, vocabulary: int) -> ValueError:
    """Return the error about ids that are beyond the model's vocabulary."""
    return ValueError(
        f"the tokenizer gives token {largest}, but the model knows {vocabulary}; tokenizer and weights do not belong "
        "together"
    )


def token_dtype(tokenizer: PreTrainedTokenizerBase, loss_on: LossOn = "all", document_attention: bool = False) -> str:
    """Return the numpy dtype of a token: an id, and the flags that `windows.trained_flags` and `document_starts` read.

    The id is uint16 where every id of the tokenizer fits, else uint32. `completion` adds the flag "trained on".
    `document_attention` adds that flag and "first of its document".
    """
    return dtype_of_ids(largest_id(tokenizer), loss_on, document_attention)


def dtype_of_ids(largest: int, loss_on: LossOn = "all", document_attention: bool = False) -> str:
    """Return what `token_dtype` does, for a largest id instead of a tokenizer."""
    flags = ",?,?" if document_attention else ",?" if loss_on == "completion" else ""
    return ("uint16" if largest < 2**16 else "uint32") + flags


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id of a tokenizer; a count of its tokens would not do, since ids may have gaps."""
    return max(tokenizer.get_vocab().values(), default=0)


def cache_key(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, frame: DocumentFrame = "auto", *extra: object
) -> tuple[str, dict[str, Any]]:
    """Return the cache key of a tokenized text, and the settings it was hashed from, by names that users know.

    Args:
        source: the text.
        tokenizer: its tokenizer.
        frame: tokens around every document.
        *extra: more values to hash.

    Raises:
        ValueError: the tokenizer lacks the tokens of the frame, or a file cannot be read.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    tokenizer_name = f"{type(tokenizer).__name__}, hash {_hash([vocabulary, special, tokenizer.chat_template])}"
    frame_ids = frame_tokens(tokenizer, frame)
    before, after = (" ".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in frame_ids)
    facts = {**source.facts, "--document_frame": f"{before} ... {after}".strip(), "tokenizer": tokenizer_name}
    return _hash([source.identity, tokenizer_name, frame_ids, *extra]), facts


def _hash(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
