"""Callback of transformers' `Trainer` that keeps the zeros of a sparse model; needs no DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sparseforge_ds.integrations.mask_keeper import MaskKeeper, SparseZeros, find_zeros, torch_optimizer

_LOG = logging.getLogger(__name__)


class MaskKeeperCallback(TrainerCallback):
    """Callback that keeps a sparse model sparse while a `Trainer`, or a subclass such as TRL's, fine-tunes it.

    Give it in `callbacks=`: the mask is the zeros of the model that the trainer is made with, also where training goes
    on from a checkpoint. Zeros are checked at every save and at the end.

    Args:
        pattern: that of the weights, like 2:4; None searches for 2:4 and 4:8.
        names: globs of the weights to keep, as in `keep_mask`; None takes every weight that is in the pattern.

    Raises:
        ValueError: by the trainer, as it is made or begins: as `keep_mask`; or as it saves: a zero was lost.
    """

    keeper: MaskKeeper | None
    """Handle of the training that runs or ran last; None before."""

    def __init__(self, pattern: str | None = None, names: str | Sequence[str] | None = None) -> None:
        self.keeper = None
        self._pattern = pattern
        self._names = names
        self._zeros: SparseZeros | None = None
        """Zeros of the model that the trainer was made with."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any = None, **_: Any
    ) -> None:
        """Note the zeros, before a checkpoint is loaded in which a kept weight may be 0."""
        if isinstance(model, nn.Module):
            self._zeros = find_zeros(model, self._pattern, self._names)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        **_: Any,
    ) -> None:
        """Hang the hooks in, once the optimizer is there and a checkpoint is loaded."""
        inner = torch_optimizer(optimizer, model)
        if self._zeros is None:  # a callback that was added after the trainer was made
            self._zeros = find_zeros(model, self._pattern, self._names)
        self._remove()
        self.keeper = MaskKeeper(model, [inner], self._zeros)
        self.keeper.check()
        _LOG.info("%s", self.keeper)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Check that what was saved is sparse."""
        if self.keeper is not None:
            self.keeper.check()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Check the trained weights, and take the hooks away."""
        if self.keeper is not None:
            self.keeper.check()
        self._remove()

    def _remove(self) -> None:
        if self.keeper is not None:
            self.keeper.remove()
