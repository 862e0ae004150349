"""A teacher's pass over a text, whose largest logits are written for runs that have no room for the teacher."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.checkpoint.disk import locked
from sparseforge_ds.checkpoint.tensors import hash_tensor
from sparseforge_ds.config.arguments import DocumentFrame, LossOn, SampleBy
from sparseforge_ds.data.mixture import find_source, require_records, require_splits
from sparseforge_ds.data.teacher_logits import TOKENS, LogitsRecord, TeacherLogits, remove_empty, remove_unsaved
from sparseforge_ds.data.text_files import LocalText, TextOptions, TextSource
from sparseforge_ds.data.token_cache import TokenCache, ensure_token_cache
from sparseforge_ds.data.tokenization import cache_key, unknown_token_error
from sparseforge_ds.data.windows import ids_of_tokens
from sparseforge_ds.evaluate.perplexity import BLOCK, max_positions
from sparseforge_ds.model.sound_weights import why_not_finite
from sparseforge_ds.model.top_logits import largest_logits

SAVED_EVERY = 64
"""Batches after which a killed process continues."""


@dataclass(frozen=True)
class TeachSettings:
    """Settings of the logits, which a run must have too."""

    seq_length: int
    top_k: int
    temperature: float
    document_frame: DocumentFrame = "auto"
    batch_size: int = 8
    """Windows of one forward pass."""


def find_texts(
    names: Sequence[str], text_field: str, split: str, sample_by: SampleBy, loss_on: LossOn
) -> list[TextSource]:
    """Return the texts that `--text` names, as `--dataset` of a run with the same flags does."""
    try:
        sources = [find_source(name, TextOptions(text_field, split, sample_by, loss_on)) for name in names]
        require_records(sources, text_field)
        require_splits(sources, split)
    except ValueError as error:
        raise ValueError(str(error).replace("--dataset", "--text")) from None
    for source in sources:
        if not isinstance(source, LocalText) or source.streamed:
            raise ValueError(f"--text {source.name}: a stream has no numbered windows; give files of this machine")
    return sources


def check_settings(settings: TeachSettings, config: Any) -> None:
    """Raise ValueError unless the model of a config has the positions and the vocabulary for these settings."""
    vocabulary = int(config.get_text_config().vocab_size)
    positions = max_positions(config)
    if not 1 <= settings.top_k < vocabulary:
        raise ValueError(f"--top_k {settings.top_k}: use 1 to {vocabulary - 1}, less than the model's vocabulary")
    if not 2 <= settings.seq_length <= positions:
        raise ValueError(f"--seq_length {settings.seq_length}: use 2 to {positions}, the positions")


def tokenize(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, folder: Path, settings: TeachSettings
) -> TokenCache:
    """Tokenize a text into the folder of its logits, unless its tokens are there.

    Raises:
        ValueError: the text cannot be read, or is shorter than a window.
        OSError: the disk is too full.
    """
    try:
        cache = ensure_token_cache(source, tokenizer, folder / TOKENS, settings.document_frame)
    except ValueError as error:
        remove_empty(folder)
        raise ValueError(str(error).replace("--dataset", "--text")) from None
    if cache.tokens < settings.seq_length:
        raise ValueError(f"--text {source.name}: has {cache.tokens} tokens, less than --seq_length; give more text")
    return cache


def teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: TextSource,
    folder: Path,
    settings: TeachSettings,
) -> LogitsRecord:
    """Write a model's largest logits of every window of a text; a killed process is continued.

    Call `check_settings` before the model is loaded.

    Raises:
        ValueError: the text is shorter than a window, the model does not know a token, or its logits are not finite.
        OSError: the disk is too full.
    """
    key, _ = cache_key(source, tokenizer, settings.document_frame)
    folder.mkdir(parents=True, exist_ok=True)
    # What one removes at its end, another one of the same text would be writing to.
    refusal = f"--output {folder}: another process writes the logits of this text"
    with locked(folder / f"{key}.lock", refusal, "wait for it, or give another --output"):
        try:
            return _write_logits(model, tokenizer, source, folder, settings)
        finally:
            remove_unsaved(folder, key)


def _write_logits(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: TextSource,
    folder: Path,
    settings: TeachSettings,
) -> LogitsRecord:
    """Do the work of `teach`; after an error, room that was taken for logits stays."""
    # Tokenize the text, and take room for its logits.
    head: Any = model.get_output_embeddings()
    vocabulary = int(head.weight.shape[0])
    cache = tokenize(source, tokenizer, folder, settings)
    if cache.largest_id >= vocabulary:
        raise unknown_token_error(cache.largest_id, vocabulary)
    windows = cache.tokens // settings.seq_length
    record = LogitsRecord(
        key=cache.name,
        facts=dict(cache.facts),
        seq_length=settings.seq_length,
        windows=windows,
        vocabulary=vocabulary,
        temperature=settings.temperature,
        top_k=settings.top_k,
        teacher=model.name_or_path,
        teacher_hash=_hash_weights(model),
        dtype=str(model.dtype).removeprefix("torch."),
    )
    logits = TeacherLogits.create(folder, record)

    # Run the model over the windows in their order.
    window_WS = ids_of_tokens(cache.open())[: windows * settings.seq_length].reshape(windows, settings.seq_length)
    first = logits.record.written
    with tqdm(total=windows, initial=first, unit=" windows", disable=None) as bar:
        for number, start in enumerate(range(first, windows, settings.batch_size), start=1):
            token_BS = torch.from_numpy(window_WS[start : start + settings.batch_size].astype(np.int64))
            logits.write(*_answers(model, token_BS, settings))
            if number % SAVED_EVERY == 0:
                logits.save()
            bar.update(len(token_BS))
    logits.save()
    return logits.record


def _hash_weights(model: PreTrainedModel) -> str:
    """Return a hash of the names, shapes and values of all tensors of a model."""
    entries = [(name, tuple(value.shape), hash_tensor(value.cpu())) for name, value in model.state_dict().items()]
    return hashlib.sha256(repr(entries).encode()).hexdigest()


@torch.no_grad()
def _answers(model: PreTrainedModel, token_BS: torch.Tensor, settings: TeachSettings) -> tuple[np.ndarray, np.ndarray]:
    """Return entries (B, S, K) and log-probabilities (B, S, K + 1) in fp16 of a batch."""
    logits_TV = model(input_ids=token_BS.to(model.device), use_cache=False).logits.flatten(0, 1)
    parts = [
        largest_logits(block_TV, settings.top_k, settings.temperature)
        for block_TV in logits_TV.split(max(1, BLOCK // logits_TV.shape[1]))
    ]
    entry_TK, share_TL = (torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    if not np.isfinite(share_TL).all():
        raise ValueError(f"{model.name_or_path}: its logits are infinite or NaN: {why_not_finite(model)}")
    shape = token_BS.shape
    return entry_TK.reshape(*shape, -1), share_TL.reshape(*shape, -1).astype(np.float16)
