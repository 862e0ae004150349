"""Sequence parallelism: a rank has a part of the tokens, and in attention all tokens of some heads.

The exchange of tokens for heads and back is DeepSpeed's Ulysses (arXiv 2309.14509) in the form of ALST (arXiv
2506.13996). All other layers see single tokens, which only their own rank has. `model.sequence_parallel` lists the
models that allow that.

Shape suffixes: B sequences, S positions, H heads, D width of a head, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.train.document_attention import within_documents

_TOKENS = 8
"""Tokens of a rank in the trial of a divided model."""
_TOLERANCE = {torch.float32: 1e-3}
"""Allowed relative distance of the logits by dtype."""
_TOLERANCE_16_BIT = 0.2
"""Allowed distance in 16 bits, where a router near a tie may choose another expert."""


class SequenceParallel:
    """Groups of consecutive ranks that share sequences; every rank makes one object, once in a process.

    An engine learns of the groups by `sequence_parallel_size` in its configuration alone, which decides its batch.
    Given the groups as `mpu`, DeepSpeed 0.19 would sum gradients over a group at stages 0 to 2 and average them at
    stage 3. Without it, gradients are averaged over all ranks at every stage, as the losses of parts expect.

    Args:
        size: number of ranks in a group.
        document_attention: True to keep attention inside the documents of a sequence.
    """

    def __init__(self, size: int, document_attention: bool = False) -> None:
        parallel_state_sp.initialize_sequence_parallel(size)
        self.size = size
        self.document_attention = document_attention
        self.rank: int = parallel_state_sp.get_sequence_parallel_rank()
        self.process_group: dist.ProcessGroup = parallel_state_sp.get_sequence_parallel_group()
        self._is_whole = False
        """True while every rank is given whole sequences, which are not exchanged."""

    def divide(self, model: PreTrainedModel) -> None:
        """Let a model work on this rank's part of every sequence from now on.

        A hook tells it the positions of its tokens. Attention of the same implementation becomes an exchange in every
        model of this process.
        """
        name = model.config._attn_implementation
        core = ALL_ATTENTION_FUNCTIONS[name]
        if not getattr(core, "divided", False):
            core = within_documents(core, "flash" in name) if self.document_attention else core
            ALL_ATTENTION_FUNCTIONS[name] = self._exchanging(core)
        model.register_forward_pre_hook(self._add_positions, with_kwargs=True)

    def _add_positions(self, _model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Add the positions of this rank's tokens to the inputs of a model that gets none."""
        token_BS = kwargs.get("input_ids", args[0] if args else None)
        if self._is_whole or token_BS is None or kwargs.get("position_ids") is not None:
            return None
        B, S = token_BS.shape
        position_S = torch.arange(self.rank * S, (self.rank + 1) * S, device=token_BS.device)
        return args, {**kwargs, "position_ids": position_S.repeat(B, 1)}

    def _exchanging(self, core: Callable[..., Any]) -> Callable[..., Any]:
        """Return an attention that exchanges tokens for heads, calls `core` on whole sequences, and exchanges back."""
        # DeepSpeed's exchange is made for one shape of inputs.
        exchanges: dict[tuple[int, int, int, int], UlyssesSPAttentionHF] = {}

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
        ) -> Any:
            if self._is_whole:
                return core(module, query, key, value, mask, **kwargs)
            B, H, S, D = query.shape
            kv_heads = key.shape[1]
            exchange = exchanges.get((B, H, kv_heads, D))
            if exchange is None:
                exchange = exchanges[B, H, kv_heads, D] = UlyssesSPAttentionHF(
                    attn=core,
                    batch_size=B,
                    attn_head_count=H,
                    attn_head_size=D,
                    kv_head_count=kv_heads,
                    num_hidden_layers=0,  # for a debugging mode alone
                    process_group=self.process_group,
                    seq_length_is_variable=True,
                )
            # The mask covers this rank's tokens only, so it is dropped. Over the whole sequence the kernel's own causal
            # order holds, or `within_documents` makes a mask of the positions, which DeepSpeed puts together.
            output, weights = exchange(module, query, key, value, None, **kwargs)
            return output.view(B, S, H, D), weights  # DeepSpeed joins the heads, and some models count dimensions

        attend.divided = True  # type: ignore[attr-defined]
        return attend

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Let every rank work on whole sequences in the block."""
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    @torch.no_grad()
    def check_division(self, model: PreTrainedModel, who: str) -> None:
        """Compare a divided model with the same model on whole sequences of a few tokens. Collective.

        Raises:
            AgreedError: its logits differ, so that more than attention connects the tokens of a sequence.
        """
        # Run the model on a whole sequence, and on this rank's part of it.
        device = get_accelerator().current_device_name()
        token_BS = torch.arange(self.size * _TOKENS, device=device)[None] % model.config.get_text_config().vocab_size
        local = slice(self.rank * _TOKENS, (self.rank + 1) * _TOKENS)
        was_training = model.training
        model.eval()
        with self._undivided():
            whole_BSV = model(input_ids=token_BS, use_cache=False).logits[:, local].float()
        part_BSV = model(input_ids=token_BS[:, local].contiguous(), use_cache=False).logits
        model.train(was_training)

        # Compare the logits; the rank with the largest distance decides for all.
        distance = (part_BSV.float() - whole_BSV).norm() / whole_BSV.norm()
        dist.all_reduce(distance, op=dist.ReduceOp.MAX)
        if not float(distance) <= _TOLERANCE.get(part_BSV.dtype, _TOLERANCE_16_BIT):
            raise AgreedError(
                f"{who} gives other logits when {self.size} ranks share its sequences (relative distance "
                f"{float(distance):.2g}): something beside its attention connects tokens, or counts them; leave "
                "--sequence_parallel out"
            )
