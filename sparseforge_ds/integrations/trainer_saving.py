"""Saves of a trainer: models that transformers loads, and checkpoints whose weights are finite."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.forge import SparseForge
from sparseforge_ds.integrations.trainer_settings import cure_of_divergence
from sparseforge_ds.model.basis import keep_basis
from sparseforge_ds.model.low_rank import lost_parts, saves_allowed, would_lose

_LOG = logging.getLogger(__name__)
if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class SavingMixin(_Trainer):
    """Part of `SparseForgeMixin` that saves."""

    forge: SparseForge | None
    """None until `train` has an engine."""
    _config: SparseForgeConfig
    _saves_checkpoint = False
    """True inside `_save_checkpoint`."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a model that transformers loads; weights that ZeRO-3 partitions are gathered for it.

        Raises:
            ValueError: the model has low-rank branches, or CAST's factors before they are folded into the weights, and
                transformers would leave them out.
        """
        if not _internal_call:
            self._before_model_save("save_model")
        gathers = not _internal_call or self.args.push_to_hub or self.args.save_only_model
        with self._gathered_on_save(gathers), self._without_states():
            super().save_model(output_dir, _internal_call)

    @contextmanager
    def _without_states(self) -> Iterator[None]:
        """Save no states of DeepSpeed in the block, if they are saved behind it.

        Where ZeRO-3's weights are not gathered, the trainer saves the states in their place, and for a checkpoint once
        more.
        """
        engine = self.deepspeed
        if engine is None or not self._saves_checkpoint or self.args.save_only_model:
            yield
            return
        save_states = engine.save_checkpoint
        engine.save_checkpoint = lambda *_args, **_kwargs: True
        try:
            yield
        finally:
            engine.save_checkpoint = save_states

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push a model that transformers loads; errors are those of `save_model`."""
        self._before_model_save("push_to_hub")
        with self._gathered_on_save(True):
            return super().push_to_hub(*args, **kwargs)

    @contextmanager
    def _gathered_on_save(self, wanted: bool) -> Iterator[None]:
        """Have saves gather the weights that ZeRO-3 partitions, in the block.

        "stage3_gather_16bit_weights_on_model_save" of the DeepSpeed JSON does the same for all saves, but a checkpoint
        needs no such copy. Without it a trainer writes no weights.
        """
        engine = self.deepspeed
        if not wanted or engine is None or engine.zero_optimization_stage() < 3:
            yield
            return
        zero = engine._config.zero_config
        before = zero.gather_16bit_weights_on_model_save
        zero.gather_16bit_weights_on_model_save = True
        try:
            yield
        finally:
            zero.gather_16bit_weights_on_model_save = before

    def _before_model_save(self, method: str) -> None:
        """Reject a model that transformers would load in part, and warn of moving masks; `method` is for messages."""
        self._refuse_lost_parts(method)
        if self.deepspeed is None:
            raise ValueError(
                f"{method}() before train(): nothing is trained yet; call train(), or model.save_pretrained"
            )
        if not self._frozen and self.accelerator.is_main_process:
            step = 0 if self.forge is None else self.forge.step_count
            _LOG.warning("%s: masks are not frozen at step %d, and the weights that it writes not sparse", method, step)

    def _refuse_lost_parts(self, method: str) -> None:
        if (parts := lost_parts(self.model)) is not None:
            raise ValueError(
                f"{method}: {would_lose(parts)}; make it from the newest checkpoint: sparseforge consolidate "
                f"{shlex.quote(str(self.args.output_dir))} OUT"
            )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as the trainer does: it writes the model first and removes older checkpoints last.

        Raises:
            DivergedError: the weights are infinite or NaN; nothing was written, and no checkpoint removed.
        """
        self._require_finite()
        self._saves_checkpoint = True
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self._saves_checkpoint = False

    def _require_finite(self) -> None:
        assert self.forge is not None
        self.forge.require_finite(cure_of_divergence(self.args.output_dir))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save as the trainer does, with the records of a permuted or rotated model, which its exports need."""
        if state_dict is not None:
            # Accelerate copies every tensor, so that a tied weight would be stored twice.
            for name, first in getattr(self.model, "all_tied_weights_keys", {}).items():
                if first in state_dict and name in state_dict:
                    state_dict[name] = state_dict[first]
        with saves_allowed(self.model):
            super()._save(output_dir, state_dict)
        name = self.model.config.name_or_path
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save and name and Path(name).is_dir():
            keep_basis(Path(name), folder)

    @property
    def _frozen(self) -> bool:
        return self.forge is not None and self.forge.step_count >= self.forge.schedule.freeze_step
