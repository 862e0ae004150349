"""Sequences that a model is pruned on: documents of a text one behind the other, as training packs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.data.tokenization import tokenize
from sparseforge_ds.evaluate.perplexity import max_positions
from sparseforge_ds.evaluate.scored_text import iter_texts
from sparseforge_ds.model.tokenizer import check_tokens

LENGTH = 512
"""Tokens of a sequence by default."""
_DOCUMENTS = 64
"""Documents that are tokenized together, at most."""
_CHARACTERS = 8
"""Characters of a token, as a first guess."""
_MARGIN = 64
"""Tokens that are read and dropped at the end: a cut document may end in other tokens than the whole one."""


def read_sequences(
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    text: str,
    tokens: int,
    seq_length: int | None,
    text_field: str = "text",
) -> Tensor:
    """Return the first `tokens` of a text as (sequences, seq_length) ids, or as many as it has.

    Every document begins with BOS (EOS where the tokenizer has no BOS).

    Raises:
        ValueError: a length that the model's positions or the text do not allow, a text that cannot be read, or tokens
            that the model does not know.
    """
    seq_length = length_of(seq_length, max_positions(config))
    # Documents are tokenized until there are enough tokens.
    documents = iter_texts(text, text_field)
    ids: list[int] = []
    while (needed := tokens - len(ids)) > 0 and (some := _next_documents(documents, _CHARACTERS * needed)):
        for document_ids in tokenize(some[:-1], tokenizer) if len(some) > 1 else ():
            ids += document_ids
        ids += _first_ids(tokenizer, some[-1], tokens - len(ids))
    count = min(len(ids), tokens) // seq_length
    if not count:
        raise ValueError(
            f"--text {text}: {min(len(ids), tokens)} tokens of it are read, less than one sequence of {seq_length}; "
            "give more text or --tokens, or a shorter --seq_length"
        )
    check_tokens(ids, int(config.get_text_config().vocab_size), tokenizer.name_or_path)
    return torch.tensor(ids[: count * seq_length]).view(count, seq_length)


def _next_documents(documents: Iterator[str], characters: int) -> list[str]:
    """Return the next documents; only the last one reaches beyond so many characters."""
    batch: list[str] = []
    while len(batch) < _DOCUMENTS and characters > 0 and (document := next(documents, None)) is not None:
        batch.append(document)
        characters -= len(document)
    return batch


def _first_ids(tokenizer: PreTrainedTokenizerBase, document: str, tokens: int) -> list[int]:
    """Return at least the first `tokens` ids of a document, or all; a long one is not tokenized to its end."""
    characters = _CHARACTERS * (max(tokens, 0) + _MARGIN)
    while True:
        (ids,) = tokenize([document[:characters]], tokenizer)
        if characters >= len(document):
            return ids
        if len(ids) >= tokens + _MARGIN:
            return ids[: max(tokens, 0)]
        characters *= 2


def length_of(seq_length: int | None, positions: int) -> int:
    """Return the tokens of a sequence, or the default for None; ValueError where the model has fewer positions."""
    if seq_length is None:
        seq_length = min(LENGTH, positions)
    if not 2 <= seq_length <= positions:
        raise ValueError(f"--seq_length {seq_length}: the model has {positions} positions; use 2 to {positions}")
    return seq_length
