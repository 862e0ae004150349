"""A text cut into what goes through the model at once, by the two protocols of `evaluate.perplexity`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Passage:
    """A run of tokens that goes through the model at once."""

    tokens: list[int]
    skip: int
    """Tokens at the beginning that are context only (at least the first)."""


def windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], seq_length: int, stride: int, keep_tail: bool
) -> tuple[list[Passage], int]:
    """The windows of the joined documents, and the tokens that these have. Raises ValueError where the text is shorter
    than a window, or the stride is longer."""
    if not 1 <= stride <= seq_length:
        raise ValueError(f"--stride {stride}: use 1 to seq_length = {seq_length}")
    ids = _tokenize(tokenizer, "\n\n".join(documents), special=True)
    if len(ids) < seq_length:
        raise ValueError(f"the text has {len(ids)} tokens, less than one window; use --seq_length {len(ids)} or less")
    starts = range(0, len(ids) - seq_length + 1, stride)
    overlap = max(1, seq_length - stride)
    passages = [Passage(ids[s : s + seq_length], overlap if s else 1) for s in starts]
    tail = ids[starts[-1] + stride :]
    if keep_tail and len(tail) > overlap:
        passages.append(Passage(tail, overlap))
    return passages, len(ids)


def whole_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], seq_length: int
) -> tuple[list[Passage], int]:
    """Every document by itself, and the tokens of all. Raises ValueError where there is no token to begin a document
    with, or none in any document."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise ValueError("the tokenizer has neither BOS nor EOS to begin a document with; use --protocol windows")
    tokens = [_tokenize(tokenizer, document, special=False) for document in documents]
    passages = [Passage([first, *ids][:seq_length], 1) for ids in tokens if ids]
    if not passages:
        raise ValueError("no document has a token in it")
    return passages, sum(map(len, tokens))


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids
