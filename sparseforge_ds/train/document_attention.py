"""Block-diagonal attention for packed documents: position ids that restart at 0 tell the model where documents begin.

Most models of transformers derive a mask from such positions. Flash attention does so for one sequence at a time only,
and ranks that share sequences exchange no masks: `within_documents` covers these two cases. Whether a model keeps its
documents apart is tried on the model itself.

Shape suffixes: B sequences, S positions, H heads, D width of a head, V entries of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparseforge_ds.ranks import AgreedError

Attention = Callable[..., Any]
"""An attention function of transformers."""
_TOKENS = 8
"""Tokens of a rank in the trial."""
_TOLERANCE = {torch.float32: 1e-5}
"""Allowed relative distance of the logits by dtype."""
_TOLERANCE_16_BIT = 1e-2
"""Allowed distance in 16 bits, where an expert may round differently when it gets other tokens besides."""
_REPLACED: list[Attention] = []
"""Attention functions that `separate_documents_in_flash` has put in place of transformers' own."""


def check_document_attention(model: PreTrainedModel, who: str) -> None:
    """Reject a model that cannot keep documents apart, as far as that shows without weights.

    Args:
        model: student or teacher, perhaps without weights.
        who: its flag and name, for messages.

    Raises:
        ValueError: the model takes no positions.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"--document_attention: {who} ({type(model).__name__}) takes no position_ids, by which a model is told "
            "where a document begins; leave the flag out"
        )


def within_documents(attention: Attention, flash: bool) -> Attention:
    """Return an attention over whole sequences that keeps documents apart by `position_ids` alone.

    Args:
        attention: computes (B, S, H, D) from queries, keys and values of (B, H, S, D).
        flash: True if it goes by positions itself, for one sequence at a time; otherwise it gets a mask.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        B = query.shape[0]
        position_BS = kwargs.get("position_ids")
        if position_BS is None or (flash and B == 1):
            return attention(module, query, key, value, mask, *args, **kwargs)
        if not flash:
            return attention(module, query, key, value, _mask(position_BS), *args, **kwargs)
        # Flash attention sees the documents of one sequence: chain all B sequences, (1, H, B * S, D).
        chained = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key, value))
        kwargs["position_ids"] = position_BS.expand(B, -1).reshape(1, -1)
        output, weights = attention(module, *chained, mask, *args, **kwargs)
        return output.unflatten(1, (B, -1)).flatten(0, 1), weights

    return attend


def _mask(position_BS: Tensor) -> Tensor:
    """Return (B, 1, S, S) booleans: each token sees itself and the earlier tokens of its document."""
    document_BS = (position_BS == 0).cumsum(1)
    return (document_BS[:, :, None] == document_BS[:, None]).tril()[:, None]


def separate_documents_in_flash(model: PreTrainedModel) -> None:
    """Let flash attention see the documents of several sequences at once, in all models of this process that use it."""
    name = model.config._attn_implementation
    if "flash" in name and ALL_ATTENTION_FUNCTIONS[name] not in _REPLACED:  # a teacher may use the same
        replacement = within_documents(ALL_ATTENTION_FUNCTIONS[name], flash=True)
        ALL_ATTENTION_FUNCTIONS[name] = replacement
        _REPLACED.append(replacement)


@torch.no_grad()
def check_documents_apart(model: PreTrainedModel, who: str, rank: int = 0, parts: int = 1) -> None:
    """Change the first document of two sequences, and require the logits of the second one to stay. Collective.

    Args:
        model: the model with its weights, divided by `SequenceParallel` or not.
        who: its flag and name, for messages.
        rank: index of this rank's part of a sequence.
        parts: number of ranks that share a sequence.

    Raises:
        AgreedError: the logits change.
    """
    # Lay out two sequences of two documents each; this rank has a slice of the tokens.
    device = get_accelerator().current_device_name()
    vocabulary = model.config.get_text_config().vocab_size
    second_start = torch.tensor([[3], [5]], device=device)  # (2, 1)
    index_S = torch.arange(parts * _TOKENS, device=device)
    in_second_BS = index_S >= second_start
    local = slice(rank * _TOKENS, (rank + 1) * _TOKENS)
    position_BS = torch.where(in_second_BS, index_S - second_start, index_S)[:, local]
    token_S = index_S * 7919 % vocabulary

    # Run the model with two versions of the first document.
    was_training = model.training
    model.eval()
    logits = [
        model(
            input_ids=torch.where(in_second_BS, token_S, (token_S + shift) % vocabulary)[:, local].contiguous(),
            position_ids=position_BS.contiguous(),
            use_cache=False,
        ).logits[in_second_BS[:, local]]
        for shift in (0, vocabulary // 2)
    ]
    model.train(was_training)

    # Compare the logits of the second document; the rank with the largest distance decides for all.
    before, after = (tensor.float() for tensor in logits)
    distance = (before - after).norm() / before.norm()
    dist.all_reduce(distance, op=dist.ReduceOp.MAX)
    if not float(distance) <= _TOLERANCE.get(logits[0].dtype, _TOLERANCE_16_BIT):
        raise AgreedError(
            f"--document_attention: {who} ({type(model).__name__}, attention {model.config._attn_implementation}) lets "
            "the documents of a sequence see each other although their positions begin anew. The logits of one change "
            f"by a relative distance of {float(distance):.2g} when another one changes; leave the flag out"
        )
