"""Text that scores of weights are taken on, as tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.evaluate.finished_model import load_tokenizer
from sparseforge_ds.evaluate.perplexity import cut, positions_of, tokenize
from sparseforge_ds.evaluate.scored_text import texts_of
from sparseforge_ds.model.tokenizer import check_tokens

_LENGTH = 512
_MARGIN = 64
"""Tokens behind the last one that is used: where a text is cut, the tokens just before may be others."""
_CHARACTERS = 8
"""Of a token, to begin with."""


def calibration(folder: str, config: Any, text: str, sequences: int, seq_length: int | None) -> list[Tensor]:
    """(1, seq_length) tokens each: the first windows of a text, at most `sequences`, tokenised for the model in a
    folder, and at most 512 tokens long where no length is given. No more of the text is read than that takes.

    Raises:
        ValueError: a length that the model's positions or the text do not allow, a text that cannot be read, or tokens
            that the model does not know.
    """
    positions = positions_of(config)
    if seq_length is None:
        seq_length = min(_LENGTH, positions)
    if not 1 <= seq_length <= positions:
        raise ValueError(f"--seq_length {seq_length}: the model has {positions} positions; use 1 to {positions}")
    ids = _beginning(load_tokenizer(folder), texts_of(text), sequences * seq_length)
    check_tokens(ids, int(config.get_text_config().vocab_size), folder)
    return [torch.tensor([window]) for window in cut(ids, seq_length, seq_length)]


def _beginning(tokenizer: PreTrainedTokenizerBase, documents: Iterator[str], tokens: int) -> list[int]:
    """The first tokens of the joined documents."""
    parts: list[str] = []
    characters, had = _CHARACTERS * tokens, 0
    while True:
        while had < characters and (document := next(documents, None)) is not None:
            parts.append(document)
            had += len(document) + 2
        joined = "\n\n".join(parts)[:characters]
        ids = tokenize(tokenizer, joined, special=True)
        if len(ids) >= tokens + _MARGIN or had < characters:  # the latter where there are no more
            return ids[:tokens]
        characters *= 2
