"""Calibration text as tokens: the first windows of a text, on which scores of weights are measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.evaluate.finished_model import load_tokenizer
from sparseforge_ds.evaluate.perplexity import cut_windows, max_positions, text_to_ids
from sparseforge_ds.evaluate.scored_text import iter_texts
from sparseforge_ds.model.tokenizer import check_tokens

_LENGTH = 512
_MARGIN = 64
"""Tokens that are read and dropped at the end: a cut text may end in other tokens than the whole one."""
_CHARACTERS = 8
"""Characters of a token, as a first guess."""


def calibration_windows(
    folder: str, config: Any, text: str, sequences: int, seq_length: int | None, text_field: str = "text"
) -> list[Tensor]:
    """Return the first windows of a text, each (1, seq_length), tokenized for a model. The rest is not read.

    Args:
        folder: the model's folder.
        config: the model's config.
        text: a value of `--text`.
        sequences: number of windows; a short text has fewer.
        seq_length: tokens of a window; None takes the model's positions, at most 512.
        text_field: field of a record that holds the text.

    Raises:
        ValueError: a length that the model's positions or the text do not allow, a text that cannot be read, or tokens
            that the model does not know.
    """
    positions = max_positions(config)
    if seq_length is None:
        seq_length = min(_LENGTH, positions)
    if not 1 <= seq_length <= positions:
        raise ValueError(f"--seq_length {seq_length}: the model has {positions} positions; use 1 to {positions}")
    ids = _beginning(load_tokenizer(folder), iter_texts(text, text_field), sequences * seq_length)
    check_tokens(ids, int(config.get_text_config().vocab_size), folder)
    return [torch.tensor([window]) for window in cut_windows(ids, seq_length, seq_length)]


def _beginning(tokenizer: PreTrainedTokenizerBase, documents: Iterator[str], tokens: int) -> list[int]:
    """Return the first tokens of the joined documents; read twice as many characters until they are enough."""
    parts: list[str] = []
    characters = _CHARACTERS * tokens
    characters_read = 0
    while True:
        while characters_read < characters and (document := next(documents, None)) is not None:
            parts.append(document)
            characters_read += len(document) + 2
        is_all = characters_read < characters
        joined = "\n\n".join(parts)[:characters]
        ids = text_to_ids(tokenizer, joined, special=True)
        if len(ids) >= tokens + _MARGIN or is_all:
            return ids[:tokens]
        characters *= 2
