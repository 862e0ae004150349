"""Perplexity of a Hugging Face model on a text: exp(sum of the negative log-likelihoods / number of scored tokens).

Softmax in fp32, one number over the whole text (not a mean of perplexities), by one of two protocols:

`windows` is the protocol of the papers on WikiText-2. Documents are joined by two newlines and tokenised at once, with
the tokenizer's default special tokens. Windows of `seq_length` do not overlap; every token of one but the first is
scored. The tail is dropped; with `stride` a window scores only what no earlier one scored.

`documents` scores each document by itself: a BOS in front (the EOS where a tokenizer has no BOS), then all tokens of
the document are scored, cut where the model's positions (or `seq_length`) end.

Beside a dense model, the KL divergence to it is the mean over the same tokens of KL(dense || model), in nats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.data.documents import tokenizable
from sparseforge_ds.evaluate.finished_model import check_known
from sparseforge_ds.evaluate.token_scores import score_tokens
from sparseforge_ds.model.tokenizer import run_tokenizer
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
    kl: float | None = None
    """Mean KL(dense || model) of a scored token, in nats; None without a dense model."""
    dense_perplexity: float | None = None
    """Perplexity of the dense model on the same tokens."""

    def __str__(self) -> str:
        beside = "" if self.kl is None else f"  KL to dense {self.kl:.5f} nats a token"
        beside += "" if self.dense_perplexity is None else f", whose perplexity is {self.dense_perplexity:.4f}\n"
        return (
            f"  perplexity {self.perplexity:.4f}  ({self.nll:.5f} nats a token)\n{beside}"
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
    dense: PreTrainedModel | None = None,
    max_tokens: int | None = None,
) -> Perplexity:
    """Perplexity of `model` on `documents` by one of the protocols above.

    Raises ValueError for a length that a model or the text does not allow, tokens that a model does not know, two
    vocabularies of different sizes, and NotFiniteError.

    Args:
        seq_length: window, or cut of a document, in tokens; by default what the model's positions allow, at most 4096
            for windows.
        ranks: those that work on this together; collective then, and every rank gets the whole result.
        dense: the model to compare with on the same tokens, which must mean the same to it.
        max_tokens: scored tokens at most, the first windows or documents of the text; one of these at least.
    """
    models = [model] if dense is None else [model, dense]
    positions = min(positions_of(one.config) for one in models)
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
    if max_tokens is not None:
        scored = itertools.accumulate(len(passage.tokens) - passage.skip for passage in passages)
        passages = passages[: max(1, sum(count <= max_tokens for count in scored))]
    # Of all passages, so that every rank finds the same.
    for one in models:
        check_known(one, itertools.chain.from_iterable(passage.tokens for passage in passages))
    ranks = ranks or Ranks()
    passages = sorted(passages, key=lambda passage: -len(passage.tokens))
    batches = [passages[start : start + batch_size] for start in range(0, len(passages), batch_size)]
    mine = tqdm(batches[ranks.rank :: ranks.world_size], unit=" batches", disable=None if ranks.first else True)
    # Batches do not depend on the number of ranks, and fsum rounds once: the number is the same to the last bit.
    scores = list(itertools.chain.from_iterable(ranks.gather([_score(model, batch, dense) for batch in mine])))
    tokens = sum(count for count, _ in scores)
    nll, *beside = (math.fsum(column) / tokens for column in zip(*(sums for _, sums in scores), strict=True))
    for mean in (nll, *beside):
        if not math.isfinite(mean):
            whose = "dense model's" if math.isfinite(nll) else "model's"
            raise NotFiniteError(
                f"the loss is {mean}: the {whose} weights or activations are not finite; try --dtype float32"
            )
    kl, dense_nll = beside or (None, None)
    return Perplexity(
        perplexity=_exp(nll),
        nll=nll,
        tokens=tokens,
        unscored=total - tokens,
        protocol=protocol,
        seq_length=seq_length,
        documents=len(documents),
        kl=kl,
        dense_perplexity=None if dense_nll is None else _exp(dense_nll),
    )


def table(scores: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the fields of several results and the `text` of each as a Markdown table."""
    lines = ["| text | perplexity | dense | KL to dense | tokens |", "|---|---:|---:|---:|---:|"]
    for score in scores:
        dense = "" if score["dense_perplexity"] is None else f"{score['dense_perplexity']:.4f}"
        kl = "" if score["kl"] is None else f"{score['kl']:.5f}"
        lines.append(f"| {score['text']} | {score['perplexity']:.4f} | {dense} | {kl} | {score['tokens']} |")
    return "\n".join(lines)


def require_same_tokens(
    tokenizer: PreTrainedTokenizerBase, dense: PreTrainedTokenizerBase, documents: Iterable[str]
) -> None:
    """Raise ValueError where two tokenizers make different tokens of a text: KL would have no meaning there."""
    for document in documents:
        if tokenize(tokenizer, document, special=True) != tokenize(dense, document, special=True):
            raise ValueError(
                f"--dense {dense.name_or_path}: its tokenizer makes other tokens of the text than that of "
                f"{tokenizer.name_or_path}, so that KL has no meaning; give the dense model that this one was made of"
            )


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


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
    ids: list[int] = run_tokenizer(tokenizer, tokenizable(text), add_special_tokens=special, verbose=False)["input_ids"]
    return ids


@torch.no_grad()
def _score(model: PreTrainedModel, batch: list[Passage], dense: PreTrainedModel | None) -> tuple[int, list[float]]:
    """Return how many tokens of a batch are scored, and the sums of `score_tokens` over them."""
    # Pad on the right.
    length = max(len(passage.tokens) for passage in batch)
    input_BS = torch.zeros(len(batch), length, dtype=torch.long)
    mask_BS = torch.zeros(len(batch), length, dtype=torch.long)
    for row, passage in enumerate(batch):
        end = len(passage.tokens)
        input_BS[row, :end] = torch.tensor(passage.tokens)
        mask_BS[row, :end] = 1
    inputs = {"input_ids": input_BS, "attention_mask": mask_BS}
    logits_BSV = _logits(model, inputs)
    dense_BSV = None if dense is None else _logits(dense, inputs)
    if dense_BSV is not None and dense_BSV.shape != logits_BSV.shape:
        raise ValueError(
            f"the dense model's head has {dense_BSV.shape[-1]} entries and the model's {logits_BSV.shape[-1]}; KL "
            "compares them entry by entry, so give the dense model that this one was made of, or leave --dense out"
        )
    scores = []
    for row, passage in enumerate(batch):
        # Logits at a position predict the token after it.
        before = slice(passage.skip - 1, len(passage.tokens) - 1)
        target_T = input_BS[row, passage.skip : len(passage.tokens)].to(logits_BSV.device)
        dense_TV = None if dense_BSV is None else dense_BSV[row, before]
        scores.append(score_tokens(logits_BSV[row, before], target_T, dense_TV))
    scores_TC = torch.cat(scores)
    return len(scores_TC), scores_TC.double().sum(0).tolist()


def _logits(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    there = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    logits_BSV: Tensor = model(**there, use_cache=False).logits
    return logits_BSV


def positions_of(config: Any) -> int:
    """Tokens that a model can read at once, by its config."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST_DEFAULT)
