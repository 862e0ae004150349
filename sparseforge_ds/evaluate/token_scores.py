"""Scores of tokens from logits: the negative log-likelihood, and the KL divergence of one model to another.

Vocabularies are large: the fp32 log-probabilities of one sequence can outweigh the model. Rows of logits are therefore
scored a block at a time. Shape suffixes: T tokens, V entries of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**24
"""Largest number of logits that are in fp32 at a time."""


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
