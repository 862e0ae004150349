"""Perplexity of a Hugging Face model on a text: exp(sum of the negative log-likelihoods / number of scored tokens).

Softmax in fp32, one number over the whole text (not a mean of perplexities), by one of two protocols:

`windows` is the protocol of the papers on WikiText-2. Documents are joined by two newlines and tokenised at once, with
the tokenizer's default special tokens. Windows of `seq_length` do not overlap; every token of one but the first is
scored. The tail is dropped; with `stride` a window scores only what no earlier one scored.

`documents` scores each document by itself: a BOS in front (the EOS where a tokenizer has no BOS), then all tokens of
the document are scored, cut where the model's positions (or `seq_length`) end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.data.documents import tokenizable
from sparseforge_ds.evaluate.pretrained import check_known
from sparseforge_ds.ranks import Ranks

Protocol = Literal["documents", "windows"]
LONGEST_DEFAULT = 4096
"""Window of models whose positions reach further, unless --seq_length says otherwise."""


@dataclass(frozen=True)
class Perplexity:
    """The result of one evaluation."""

    perplexity: float
    nll: float
    """Mean negative log-likelihood of a scored token, in nats."""
    tokens: int
    unscored: int
    """Tokens of the text that were not scored: first of a window, tail, cut."""
    protocol: Protocol
    seq_length: int
    documents: int

    def __str__(self) -> str:
        return (
            f"  perplexity {self.perplexity:.4f}  ({self.nll:.5f} nats a token)\n"
            f"  {self.tokens} tokens of {self.documents} documents scored, {self.unscored} not\n"
            f"  protocol {self.protocol}, seq_length {self.seq_length}"
        )


@dataclass(frozen=True)
class Passage:
    """A run of tokens that goes through the model at once."""

    tokens: list[int]
    skip: int
    """Tokens at the beginning that are context only (at least the first)."""


class NotFiniteError(ValueError):
    """A model computes no finite loss on a text."""


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    protocol: Protocol,
    seq_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    ranks: Ranks | None = None,
) -> Perplexity:
    """Perplexity of `model` on `documents` by one of the protocols above.

    Raises ValueError for a length that the model or the text does not allow, tokens that the model does not know, and
    NotFiniteError.

    Args:
        seq_length: window, or cut of a document, in tokens; by default what the model's positions allow, at most 4096
            for windows.
        ranks: those that work on this together; collective then, and every rank gets the whole result.
    """
    positions = positions_of(model.config)
    if seq_length is None:
        seq_length = min(positions, LONGEST_DEFAULT) if protocol == "windows" else positions
    if not 2 <= seq_length <= positions:
        raise ValueError(f"--seq_length {seq_length}: the model has {positions} positions; use 2 to {positions}")
    if batch_size < 1:
        raise ValueError(f"--batch_size {batch_size}: use an integer >= 1")
    if protocol == "windows":
        passages, total = windows(tokenizer, documents, seq_length, seq_length if stride is None else stride)
    elif stride is not None:
        raise ValueError("--stride belongs to --protocol windows; documents are scored whole")
    else:
        passages, total = whole_documents(tokenizer, documents, seq_length)
    # Of all passages, so that every rank finds the same.
    check_known(model, itertools.chain.from_iterable(passage.tokens for passage in passages))
    ranks = ranks or Ranks()
    passages = sorted(passages, key=lambda passage: -len(passage.tokens))
    batches = [passages[start : start + batch_size] for start in range(0, len(passages), batch_size)]
    mine = tqdm(batches[ranks.rank :: ranks.world_size], unit=" batches", disable=None if ranks.first else True)
    # Batches do not depend on the number of ranks, and fsum rounds once: the number is the same to the last bit.
    scores = list(itertools.chain.from_iterable(ranks.gather([_score(model, batch) for batch in mine])))
    nll, tokens = math.fsum(score for score, _ in scores), sum(count for _, count in scores)
    if not math.isfinite(nll):
        raise NotFiniteError(
            f"the loss is {nll}: the model's weights or activations are not finite; try --dtype float32"
        )
    mean = nll / tokens
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return Perplexity(perplexity, mean, tokens, total - tokens, protocol, seq_length, len(documents))


def windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], seq_length: int, stride: int
) -> tuple[list[Passage], int]:
    """The windows of the joined documents, and the tokens that these have. Raises ValueError where the text is shorter
    than a window, or the stride is longer."""
    if not 1 <= stride <= seq_length:
        raise ValueError(f"--stride {stride}: use 1 to seq_length = {seq_length}")
    ids = tokenize(tokenizer, "\n\n".join(documents), special=True)
    overlap = max(1, seq_length - stride)
    whole = cut(ids, seq_length, stride)
    return [Passage(tokens, overlap if number else 1) for number, tokens in enumerate(whole)], len(ids)


def cut(ids: list[int], seq_length: int, stride: int) -> list[list[int]]:
    """Whole windows, without the tail. Raises ValueError where there is none."""
    if len(ids) < seq_length:
        raise ValueError(f"the text has {len(ids)} tokens, less than one window; use --seq_length {len(ids)} or less")
    return [ids[start : start + seq_length] for start in range(0, len(ids) - seq_length + 1, stride)]


def whole_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], seq_length: int
) -> tuple[list[Passage], int]:
    """Every document by itself, and the tokens of all. Raises ValueError where there is no token to begin a document
    with, or none in any document."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise ValueError("the tokenizer has neither BOS nor EOS to begin a document with; use --protocol windows")
    tokens = [tokenize(tokenizer, document, special=False) for document in documents]
    passages = [Passage([first, *ids][:seq_length], 1) for ids in tokens if ids]
    if not passages:
        raise ValueError("no document has a token in it")
    return passages, sum(map(len, tokens))


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    """The ids of a text, with the special tokens that the tokenizer puts around it or without."""
    ids: list[int] = tokenizer(tokenizable(text), add_special_tokens=special, verbose=False)["input_ids"]
    return ids


@torch.no_grad()
def _score(model: PreTrainedModel, batch: list[Passage]) -> tuple[float, int]:
    """Summed negative log-likelihood and number of the scored tokens of a batch, padded on the right."""
    length = max(len(passage.tokens) for passage in batch)
    input_BS = torch.zeros(len(batch), length, dtype=torch.long)
    mask_BS = torch.zeros(len(batch), length, dtype=torch.long)
    target_BS = torch.full((len(batch), length), -100)
    for row, passage in enumerate(batch):
        end = len(passage.tokens)
        input_BS[row, :end] = torch.tensor(passage.tokens)
        mask_BS[row, :end] = 1
        target_BS[row, passage.skip : end] = input_BS[row, passage.skip : end]
    logits_BSV = model(
        input_ids=input_BS.to(model.device), attention_mask=mask_BS.to(model.device), use_cache=False
    ).logits
    target_BS = target_BS.to(model.device)
    nll = 0.0
    for logits_SV, target_S in zip(logits_BSV[:, :-1], target_BS[:, 1:], strict=True):
        nll += float(cross_entropy(logits_SV.float(), target_S, ignore_index=-100, reduction="none").double().sum())
    return nll, int((target_BS[:, 1:] != -100).sum())


def positions_of(config: Any) -> int:
    """Tokens that a model can read at once, by its config."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST_DEFAULT)
