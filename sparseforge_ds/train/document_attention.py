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

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.ranks import AgreedError

Attention = Callable[..., Any]
"""One of transformers'."""
_TRIED = 8
"""Tokens of a rank on which documents are held against each other."""
_TOLERANCE = {torch.float32: 1e-5}
"""Relative distance of the logits; in 16 bits an expert may round otherwise when it gets other tokens besides."""
_IN_16_BITS = 1e-2
_JOINING: list[Attention] = []
"""What `separate_documents_in_flash` has put among transformers' attentions."""


def check_document_attention(model: PreTrainedModel, who: str, config: SparseForgeConfig) -> None:
    """Refuse what can be seen before weights are loaded.

    Args:
        model: student or teacher, perhaps without weights.
        who: its flag and name.
        config: of the run.

    Raises:
        ValueError: the model takes no positions, or the curvature would be of other tokens than the loss.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"--document_attention: {who} ({type(model).__name__}) takes no position_ids, by which a model is told "
            "where a document begins; leave the flag out"
        )


def within_documents(attention: Attention, flash: bool) -> Attention:
    """The same attention, of whole sequences, that keeps documents apart by `position_ids` alone.

    Args:
        attention: computes (B, S, H, D) from queries, keys and values of (B, H, S, D).
        flash: whether it goes by positions itself, of one sequence at a time; else it needs a mask.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        position_BS, B = kwargs.get("position_ids"), query.shape[0]
        if position_BS is None or (flash and B == 1):
            return attention(module, query, key, value, mask, *args, **kwargs)
        if not flash:
            return attention(module, query, key, value, _mask(position_BS), *args, **kwargs)
        one_after_another = (each.transpose(0, 1).flatten(1, 2)[None] for each in (query, key, value))
        kwargs["position_ids"] = position_BS.expand(B, -1).reshape(1, -1)
        output, weights = attention(module, *one_after_another, mask, *args, **kwargs)
        return output.unflatten(1, (B, -1)).flatten(0, 1), weights

    return attend


def _mask(position_BS: Tensor) -> Tensor:
    """(B, 1, S, S) of what each token sees: those before it, and itself, of its document."""
    document_BS = (position_BS == 0).cumsum(1)
    return (document_BS[:, :, None] == document_BS[:, None]).tril()[:, None]


def separate_documents_in_flash(model: PreTrainedModel) -> None:
    """Let flash attention, of every model in this process that has the same, see documents in several sequences."""
    name = model.config._attn_implementation
    if "flash" in name and ALL_ATTENTION_FUNCTIONS[name] not in _JOINING:  # a teacher may have the same
        ALL_ATTENTION_FUNCTIONS[name] = joining = within_documents(ALL_ATTENTION_FUNCTIONS[name], flash=True)
        _JOINING.append(joining)


@torch.no_grad()
def check_documents_apart(model: PreTrainedModel, who: str, rank: int = 0, parts: int = 1) -> None:
    """Change one document of a sequence, and see whether what the model says of the next one changes. Collective.

    Args:
        model: with its weights, divided by `SequenceParallel` or not.
        who: its flag and name.
        rank: which part of a sequence is here.
        parts: ranks that share one.

    Raises:
        AgreedError: it does.
    """
    training, device = model.training, get_accelerator().current_device_name()
    vocabulary, length = model.config.get_text_config().vocab_size, parts * _TRIED
    begin_B1 = torch.tensor([[3], [5]], device=device)  # of the second document, in two sequences
    place_S = torch.arange(length, device=device)
    mine, later_BS = slice(rank * _TRIED, (rank + 1) * _TRIED), place_S >= begin_B1
    position_BS = torch.where(later_BS, place_S - begin_B1, place_S)[:, mine]
    token_S = place_S * 7919 % vocabulary
    model.eval()
    logits = [
        model(
            input_ids=torch.where(later_BS, token_S, (token_S + other) % vocabulary)[:, mine].contiguous(),
            position_ids=position_BS.contiguous(),
            use_cache=False,
        ).logits[later_BS[:, mine]]
        for other in (0, vocabulary // 2)
    ]
    model.train(training)
    one, two = (each.float() for each in logits)
    apart = (one - two).norm() / one.norm()
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    if not float(apart) <= _TOLERANCE.get(logits[0].dtype, _IN_16_BITS):
        raise AgreedError(
            f"--document_attention: {who} ({type(model).__name__}, attention {model.config._attn_implementation}) lets "
            f"the documents of a sequence see each other although their positions begin anew (relative distance "
            f"{float(apart):.2g} of the logits of one when another changes); leave the flag out"
        )
