"""Text that scores of weights are taken on, as tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.evaluate.perplexity import positions_of, windows
from sparseforge_ds.evaluate.pretrained import load_tokenizer
from sparseforge_ds.evaluate.text import read_documents

_LENGTH = 512


def calibration(folder: str, config: Any, text: str, sequences: int, seq_length: int | None) -> list[Tensor]:
    """(1, seq_length) tokens each: the first windows of a text, tokenised for the model in a folder, at most 512 tokens
    long where no length is given.

    Raises:
        ValueError: a length that the model's positions or the text do not allow, or a text that cannot be read.
    """
    positions = positions_of(config)
    if seq_length is None:
        seq_length = min(_LENGTH, positions)
    if not 1 <= seq_length <= positions:
        raise ValueError(f"--seq_length {seq_length}: the model has {positions} positions; use 1 to {positions}")
    passages, _ = windows(load_tokenizer(folder), read_documents(text), seq_length, seq_length)
    return [torch.tensor([passage.tokens]) for passage in passages[:sequences]]
