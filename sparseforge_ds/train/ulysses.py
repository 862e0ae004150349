"""Sequences that several ranks share: each has a part of the tokens, and in attention all tokens of some heads.

The exchange of tokens for heads and back is DeepSpeed's Ulysses (arXiv 2309.14509) in the form of ALST (arXiv
2506.13996). All other layers see single tokens, which their rank alone has. `model.sequence_parallel` says which
models allow that.

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

_TRIED = 8
"""Tokens of a rank on which a divided model is held against the whole one."""
_TOLERANCE = {torch.float32: 1e-3}
"""Relative distance of the logits; in 16 bits a router near a tie may choose another expert."""
_IN_16_BITS = 0.2


class SequenceParallel:
    """The groups of consecutive ranks that share sequences; every rank makes one, once in a process.

    An engine is told of them by `sequence_parallel_size` in its configuration alone, which its batch goes by.
    Given the groups as `mpu`, DeepSpeed 0.19 sums gradients over a group at stages 0 to 2 and averages them at stage 3;
    without, it averages over all ranks at every stage, as the losses of parts are made for.

    Args:
        size: ranks of a group.
        document_attention: whether attention stays inside the documents of a sequence.
    """

    def __init__(self, size: int, document_attention: bool = False) -> None:
        parallel_state_sp.initialize_sequence_parallel(size)
        self.size = size
        self.document_attention = document_attention
        self.rank: int = parallel_state_sp.get_sequence_parallel_rank()
        self.group: dist.ProcessGroup = parallel_state_sp.get_sequence_parallel_group()
        self._whole = False
        self._exchanges: dict[tuple[str, int, int, int, int], UlyssesSPAttentionHF] = {}

    def divide(self, model: PreTrainedModel) -> None:
        """Let a model work on this rank's part of every sequence that it is given from now on.

        It is told the positions of its tokens. Attention of every model in this process that has the same
        implementation becomes an exchange too.
        """
        name = model.config._attn_implementation
        core = ALL_ATTENTION_FUNCTIONS[name]
        if not getattr(core, "divided", False):
            core = within_documents(core, "flash" in name) if self.document_attention else core
            ALL_ATTENTION_FUNCTIONS[name] = self._attention(name, core)
        model.register_forward_pre_hook(self._place, with_kwargs=True)

    def _place(self, _model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        token_BS = kwargs.get("input_ids", args[0] if args else None)
        if self._whole or token_BS is None or kwargs.get("position_ids") is not None:
            return None
        B, S = token_BS.shape
        position_S = torch.arange(self.rank * S, (self.rank + 1) * S, device=token_BS.device)
        return args, {**kwargs, "position_ids": position_S.repeat(B, 1)}

    def _attention(self, name: str, core: Callable[..., Any]) -> Callable[..., Any]:
        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
        ) -> Any:
            if self._whole:
                return core(module, query, key, value, mask, **kwargs)
            (B, H, S, D), groups = query.shape, key.shape[1]
            exchange = self._exchanges.get((name, B, H, groups, D))
            if exchange is None:
                exchange = self._exchanges[name, B, H, groups, D] = UlyssesSPAttentionHF(
                    attn=core,
                    batch_size=B,
                    attn_head_count=H,
                    attn_head_size=D,
                    kv_head_count=groups,
                    num_hidden_layers=0,  # for a debugging mode alone
                    process_group=self.group,
                    seq_length_is_variable=True,
                )
            # The mask is of this rank's tokens; over the whole sequence, the kernel's own causal order is all there is,
            # or what `within_documents` makes of the positions, which DeepSpeed puts together.
            output, weights = exchange(module, query, key, value, None, **kwargs)
            return output.view(B, S, H, D), weights  # DeepSpeed joins the heads, and some models count dimensions

        attend.divided = True  # type: ignore[attr-defined]
        return attend

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    @torch.no_grad()
    def check_division(self, model: PreTrainedModel, who: str) -> None:
        """Hold a divided model against the same model on whole sequences of a few tokens. Collective.

        Raises:
            AgreedError: its logits differ, so that more than attention connects the tokens of a sequence.
        """
        training = model.training
        model.eval()
        device = get_accelerator().current_device_name()
        token_BS = torch.arange(self.size * _TRIED, device=device)[None] % model.config.get_text_config().vocab_size
        mine = slice(self.rank * _TRIED, (self.rank + 1) * _TRIED)
        with self._undivided():
            whole_BSV = model(input_ids=token_BS, use_cache=False).logits[:, mine].float()
        part_BSV = model(input_ids=token_BS[:, mine].contiguous(), use_cache=False).logits
        model.train(training)
        apart = (part_BSV.float() - whole_BSV).norm() / whole_BSV.norm()
        dist.all_reduce(apart, op=dist.ReduceOp.MAX)
        if not float(apart) <= _TOLERANCE.get(part_BSV.dtype, _IN_16_BITS):
            raise AgreedError(
                f"{who} gives other logits when {self.size} ranks share its sequences (relative distance "
                f"{float(apart):.2g}): something beside its attention connects tokens, or counts them; leave "
                "--sequence_parallel out"
            )
