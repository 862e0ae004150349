"""Perplexity of a Hugging Face model on a text: exp(sum of the negative log-likelihoods / number of scored tokens).

Softmax is in fp32, and one perplexity counts the whole text (it is no mean of perplexities). There are two protocols:

`windows` is the protocol of the papers on WikiText-2. Documents are joined by two newlines and tokenized at once, with
the tokenizer's default special tokens. Windows of `seq_length` do not overlap; every token of one but the first is
scored. The tail is dropped; with `stride` a window scores only what no earlier one scored.

`documents` scores each document by itself: a BOS in front (the EOS where a tokenizer has no BOS), then all tokens of
the document are scored, cut where the model's positions (or `seq_length`) end.

Beside a dense model, the KL divergence to it is the mean over the same tokens of KL(dense || model), in nats.

Shape suffixes: B sequences, S their tokens, T scored tokens, V entries of the vocabulary, C scores of a token.
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
from sparseforge_ds.evaluate.finished_model import check_embeddings_for
from sparseforge_ds.model.registration import positions_of
from sparseforge_ds.model.sound_weights import why_not_finite
from sparseforge_ds.model.tokenizer import run_tokenizer
from sparseforge_ds.ranks import Ranks

Protocol = Literal["documents", "windows"]
LONGEST_DEFAULT = 4096
"""Longest default window, for models with more positions."""
BLOCK = 2**24
"""Largest number of logits that are in fp32 at a time: those of one sequence can outweigh the model."""


@dataclass(frozen=True)
class Perplexity:
    """Result of one evaluation."""

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
        dense = "" if self.kl is None else f"  KL to dense {self.kl:.5f} nats a token"
        dense += "" if self.dense_perplexity is None else f", whose perplexity is {self.dense_perplexity:.4f}\n"
        scored = f"{self.tokens} of {self.tokens + self.unscored} tokens scored"
        return (
            f"  perplexity {self.perplexity:.4f}  ({self.nll:.5f} nats a token)\n{dense}"
            f"  {scored}, of a text of {self.documents} documents\n"
            f"  protocol {self.protocol}, seq_length {self.seq_length}"
        )


@dataclass(frozen=True)
class Passage:
    """A run of tokens that goes through the model at once."""

    tokens: list[int]
    skip: int
    """Tokens at the beginning that are context only (at least the first)."""


@dataclass(frozen=True)
class Scoring:
    """Settings of an evaluation."""

    protocol: Protocol
    seq_length: int | None = None
    """Tokens of a window, or limit of a document; None for the model's positions, at most 4096 for windows."""
    stride: int | None = None
    """Tokens between the beginnings of two windows; None for `seq_length`."""
    batch_size: int = 8
    """Windows or documents that go through the model together."""
    max_tokens: int | None = None
    """Limit of scored tokens; the first windows or documents of the text are taken, at least one."""


@dataclass(frozen=True)
class CutText:
    """Passages of a text, which models score."""

    passages: list[Passage]
    tokens: int
    """Tokens of the whole text."""
    documents: int
    """Documents of the whole text."""
    protocol: Protocol
    seq_length: int
    """Tokens of a window, or limit of a document."""
    batch_size: int


class NotFiniteError(ValueError):
    """A loss of a model on a text that is infinite or NaN."""


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    scoring: Scoring,
    ranks: Ranks | None = None,
    dense: PreTrainedModel | None = None,
) -> Perplexity:
    """Measure the perplexity of a model on documents by one of the protocols above.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        documents: the text.
        scoring: protocol and lengths.
        ranks: see `score_text`.
        dense: see `score_text`.

    Raises:
        ValueError: as `cut_text` and `score_text`.
        NotFiniteError: the loss is infinite or NaN.
    """
    configs = [model.config] if dense is None else [model.config, dense.config]
    return score_text(model, cut_text(tokenizer, documents, scoring, configs), ranks, dense)


def score_text(
    model: PreTrainedModel, text: CutText, ranks: Ranks | None = None, dense: PreTrainedModel | None = None
) -> Perplexity:
    """Measure the perplexity of a model on a text that was cut for it.

    Args:
        model: the model.
        text: the passages.
        ranks: ranks that share the work; collective then, and every rank gets the whole result.
        dense: a model to compare with on the same tokens, which must mean the same to it.

    Raises:
        ValueError: a model does not know a token, or the vocabularies differ in size.
        NotFiniteError: the loss is infinite or NaN.
    """
    # Check the tokens of all passages, so that every rank finds the same error.
    for candidate in [model] if dense is None else [model, dense]:
        check_embeddings_for(candidate, itertools.chain.from_iterable(passage.tokens for passage in text.passages))

    # Average over tokens: the negative log-likelihood and, with a dense model, KL and the dense model's.
    tokens, (nll, *dense_means) = mean_scores(model, text.passages, text.batch_size, ranks, dense)
    kl, dense_nll = dense_means or (None, None)
    # KL comes last: it is infinite where the model excludes a token that a sound dense model allows.
    for candidate, what, mean in ((model, "loss", nll), (dense, "loss", dense_nll), (model, "KL divergence", kl)):
        if candidate is not None and mean is not None and not math.isfinite(mean):
            raise NotFiniteError(f"{candidate.name_or_path}: the {what} is {mean}: {why_not_finite(candidate)}")
    return Perplexity(
        perplexity=_exp(nll),
        nll=nll,
        tokens=tokens,
        unscored=text.tokens - tokens,
        protocol=text.protocol,
        seq_length=text.seq_length,
        documents=text.documents,
        kl=kl,
        dense_perplexity=None if dense_nll is None else _exp(dense_nll),
    )


def mean_scores(
    model: PreTrainedModel,
    passages: Iterable[Passage],
    batch_size: int,
    ranks: Ranks | None = None,
    dense: PreTrainedModel | None = None,
) -> tuple[int, list[float]]:
    """Return the number of scored tokens of passages, and the means of `score_tokens` over them.

    Every rank scores its share of the batches and gets the whole result. Batches do not depend on the number of ranks,
    and fsum rounds once: the result is the same to the last bit.
    """
    # A batch has passages of similar length.
    ranks = ranks or Ranks()
    ordered = sorted(passages, key=lambda passage: -len(passage.tokens))
    batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    own_batches = tqdm(batches[ranks.rank :: ranks.world_size], unit=" batches", disable=None if ranks.first else True)
    scores = list(itertools.chain.from_iterable(ranks.gather([_score(model, batch, dense) for batch in own_batches])))
    tokens = sum(count for count, _ in scores)
    return tokens, [math.fsum(column) / tokens for column in zip(*(sums for _, sums in scores), strict=True)]


def table(scores: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the fields of several results and the `text` of each as a Markdown table."""
    lines = ["| text | perplexity | dense | KL to dense | tokens |", "|---|---:|---:|---:|---:|"]
    for score in scores:
        dense = "" if score["dense_perplexity"] is None else f"{score['dense_perplexity']:.4f}"
        kl = "" if score["kl"] is None else f"{score['kl']:.5f}"
        lines.append(f"| {score['text']} | {score['perplexity']:.4f} | {dense} | {kl} | {score['tokens']} |")
    return "\n".join(lines)


def require_same_tokens(
    models: Sequence[str], tokenizers: Sequence[PreTrainedTokenizerBase], documents: Iterable[str]
) -> None:
    """Reject a model and its dense model whose tokenizers make different tokens of a text: KL has no meaning there."""
    tokenizer, dense = tokenizers
    for document in documents:
        if text_to_ids(tokenizer, document, special=True) != text_to_ids(dense, document, special=True):
            raise ValueError(
                f"--dense {models[1]}: its tokenizer makes other tokens of the text than that of {models[0]}, so that "
                "KL has no meaning; give the dense model that this one was made of"
            )


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


def cut_text(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], scoring: Scoring, configs: Sequence[Any]
) -> CutText:
    """Cut documents into the passages that models score.

    Args:
        tokenizer: tokenizer of the models.
        documents: the text.
        scoring: protocol and lengths.
        configs: transformers' configs of the models.

    Raises:
        ValueError: a length does not fit a model or the text.
    """
    # Settle the length.
    positions = min(map(max_positions, configs))
    seq_length = scoring.seq_length
    if seq_length is None:
        seq_length = min(positions, LONGEST_DEFAULT) if scoring.protocol == "windows" else positions
    if not 2 <= seq_length <= positions:
        raise ValueError(f"--seq_length {seq_length}: the model has {positions} positions; use 2 to {positions}")
    # Cut the text by the protocol, and keep what the limit of tokens leaves.
    if scoring.protocol == "windows":
        stride = seq_length if scoring.stride is None else scoring.stride
        passages, total = windows(tokenizer, documents, seq_length, stride)
    elif scoring.stride is not None:
        raise ValueError("--stride belongs to --protocol windows; documents are scored whole")
    else:
        passages, total = whole_documents(tokenizer, documents, seq_length)
    if scoring.max_tokens is not None:
        scored = itertools.accumulate(len(passage.tokens) - passage.skip for passage in passages)
        passages = passages[: max(1, sum(count <= scoring.max_tokens for count in scored))]
    return CutText(passages, total, len(documents), scoring.protocol, seq_length, scoring.batch_size)


def windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], seq_length: int, stride: int
) -> tuple[list[Passage], int]:
    """Return the windows of the joined documents, and the number of tokens of the documents.

    Raises:
        ValueError: the text is shorter than a window, or the stride is longer.
    """
    if not 1 <= stride <= seq_length:
        raise ValueError(f"--stride {stride}: use 1 to seq_length = {seq_length}")
    ids = text_to_ids(tokenizer, "\n\n".join(documents), special=True)
    overlap = max(1, seq_length - stride)
    token_windows = cut_windows(ids, seq_length, stride)
    return [Passage(tokens, overlap if number else 1) for number, tokens in enumerate(token_windows)], len(ids)


def cut_windows(ids: list[int], seq_length: int, stride: int) -> list[list[int]]:
    """Cut tokens into windows, without the tail; ValueError where there is no window."""
    if len(ids) < seq_length:
        raise ValueError(
            f"the text has {len(ids)} tokens, less than one window of {seq_length}; give a longer text or, where the "
            f"command takes it, --seq_length {len(ids)} or less"
        )
    return [ids[start : start + seq_length] for start in range(0, len(ids) - seq_length + 1, stride)]


def whole_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], seq_length: int
) -> tuple[list[Passage], int]:
    """Return every document as a passage, and the number of tokens of all documents.

    Raises:
        ValueError: the tokenizer has no token to begin a document with, or no document has a token.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise ValueError("the tokenizer has neither BOS nor EOS to begin a document with; use --protocol windows")
    tokens = [text_to_ids(tokenizer, document, special=False) for document in documents]
    passages = [Passage([first, *ids][:seq_length], 1) for ids in tokens if ids]
    if not passages:
        raise ValueError("no document has a token in it")
    return passages, sum(map(len, tokens))


def text_to_ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    """Return the ids of a text, with or without the special tokens that the tokenizer puts around it."""
    ids: list[int] = run_tokenizer(tokenizer, tokenizable(text), add_special_tokens=special, verbose=False)["input_ids"]
    return ids


@torch.no_grad()
def _score(model: PreTrainedModel, batch: list[Passage], dense: PreTrainedModel | None) -> tuple[int, list[float]]:
    """Return the number of scored tokens of a batch, and the sums of `score_tokens` over them."""
    # Pad on the right.
    length = max(len(passage.tokens) for passage in batch)
    input_BS = torch.zeros(len(batch), length, dtype=torch.long)
    mask_BS = torch.zeros(len(batch), length, dtype=torch.long)
    for row, passage in enumerate(batch):
        end = len(passage.tokens)
        input_BS[row, :end] = torch.tensor(passage.tokens)
        mask_BS[row, :end] = 1
    # Run the models.
    inputs = {"input_ids": input_BS, "attention_mask": mask_BS}
    logits_BSV = _logits(model, inputs)
    dense_BSV = None if dense is None else _logits(dense, inputs)
    if dense_BSV is not None and dense_BSV.shape != logits_BSV.shape:
        raise ValueError(
            f"the dense model's head has {dense_BSV.shape[-1]} entries and the model's {logits_BSV.shape[-1]}; KL "
            "compares them entry by entry, so give the dense model that this one was made of, or leave --dense out"
        )
    # Score every token but the context. Logits at a position predict the token after it.
    scores = []
    for row, passage in enumerate(batch):
        before = slice(passage.skip - 1, len(passage.tokens) - 1)
        target_T = input_BS[row, passage.skip : len(passage.tokens)].to(logits_BSV.device)
        dense_TV = None if dense_BSV is None else dense_BSV[row, before]
        scores.append(score_tokens(logits_BSV[row, before], target_T, dense_TV))
    scores_TC = torch.cat(scores)
    return len(scores_TC), scores_TC.double().sum(0).tolist()


def _logits(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    device_inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    logits_BSV: Tensor = model(**device_inputs, use_cache=False).logits
    return logits_BSV


@torch.no_grad()
def score_tokens(logits_TV: Tensor, target_T: Tensor, dense_TV: Tensor | None = None) -> Tensor:
    """Score targets by the logits that predict them, in nats, with log-softmax in fp32.

    Args:
        logits_TV: (T, V) logits of the model.
        target_T: (T,) token ids.
        dense_TV: (T, V) logits of a dense model at the same positions, if it is compared.

    Returns:
        (T, 1), the negative log-likelihoods. With a dense model (T, 3): behind them KL(dense || model) and the dense
        model's negative log-likelihoods.
    """
    parts = []
    size = max(1, BLOCK // logits_TV.shape[1])
    for start in range(0, len(target_T), size):
        rows = slice(start, start + size)
        log_q_TV = torch.log_softmax(logits_TV[rows].float(), -1)
        columns = [-log_q_TV.gather(1, target_T[rows, None])[:, 0]]
        if dense_TV is not None:
            log_p_TV = torch.log_softmax(dense_TV[rows].float(), -1)
            dense_nll_T = -log_p_TV.gather(1, target_T[rows, None])[:, 0]
            # KL(p || q) = sum p (log p - log q), in place; 0 where p is 0, also where both logits are -inf
            kl_TV = log_q_TV.neg_().add_(log_p_TV)
            p_TV = log_p_TV.exp_()
            kl_T = kl_TV.mul_(p_TV).masked_fill_(p_TV == 0, 0.0).sum(-1)
            columns += [kl_T, dense_nll_T]
        parts.append(torch.stack(columns, 1))
    return torch.cat(parts)


def max_positions(config: Any) -> int:
    """Return the number of tokens that a model can read at once, or `LONGEST_DEFAULT` if its config does not say it."""
    return positions_of(config) or LONGEST_DEFAULT
