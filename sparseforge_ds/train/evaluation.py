"""Perplexity of the model in training, on text that it is not trained on; the training itself does not change.

A pass holds a fixed number of windows and belongs to one rank, and sums are added exactly. So equal weights give the
same perplexity to the last bit on any number of ranks, micro-batch and ZeRO stage. Ranks that share sequences share a
pass, each with its part of the windows; then the perplexity is the same to rounding.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from sparseforge_ds.data.batches import make_micro_batch
from sparseforge_ds.data.held_out import HeldOut, read_held_out
from sparseforge_ds.model.head import micro_batches_at_once
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.engine import TrainContext
from sparseforge_ds.train.random_state import random_state, set_random_state
from sparseforge_ds.train.spec import RunSpec

_LOG = logging.getLogger(__name__)


def open_held_out(spec: RunSpec, ranks: Ranks) -> HeldOut | None:
    """Return the windows of `--eval_dataset`, tokenized on rank 0; None without it.

    Raises:
        AgreedError: the text cannot be read, or does not suit the model.
    """
    source = spec.held_out
    if source is None:
        return None
    vocabulary = int(spec.model.config.get_text_config().vocab_size)
    return ranks.on_first(lambda: read_held_out(source, spec.model.tokenizer, vocabulary, spec.arguments))


class Evaluation:
    """Scores of the model on held-out text: when they are due, and their values so far.

    Args:
        context: the run.
        held_out: the text; None scores nothing.
    """

    def __init__(self, context: TrainContext, held_out: HeldOut | None) -> None:
        self.context = context
        self.held_out = held_out
        self.losses: dict[int, float] = {}
        """Mean negative log-likelihood of a token in nats, by optimizer step."""

    def due(self, step: int) -> bool:
        """Return whether the model is to be scored after `step` steps, and has not been."""
        spec = self.context.spec
        arguments = spec.arguments
        intervals = arguments.eval_every, arguments.save_every if arguments.keep_best else 0
        wanted = step in (0, spec.steps) or any(steps and step % steps == 0 for steps in intervals)
        return wanted and self.held_out is not None and step not in self.losses

    def score(self, step: int) -> dict[str, float]:
        """Score the model as it is, and remember the loss. Collective.

        Returns:
            Metrics for the log, by tag.
        """
        assert self.held_out is not None
        engine = self.context.engine
        start_time = time.perf_counter()
        # Leave no trace: generators and the training mode are put back.
        generators = random_state()
        was_training = engine.module.training
        engine.eval()
        try:
            with torch.no_grad():
                sums, tokens = self._sums()
        finally:
            engine.train(was_training)
            set_random_state(generators)
        # fsum rounds once, so that the order of the sums does not matter.
        loss = math.fsum(sums) / tokens
        self.losses[step] = loss
        perplexity = _perplexity(loss)
        seconds = time.perf_counter() - start_time
        _LOG.info(
            f"step {step}/{self.context.spec.steps}  perplexity {perplexity:.4f} on {self.held_out.name} "
            f"({loss:.5f} nats a token, {tokens:,} tokens, {seconds:.1f} s)"
        )
        return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/seconds": seconds}

    def ranking(self) -> dict[int, float] | None:
        """Return the losses that may make a checkpoint the best, by step; None without `--keep_best`.

        Losses of a network that is not what would be exported do not count: the less is pruned yet, the lower they are.
        """
        if not self.context.spec.arguments.keep_best:
            return None
        config = self.context.spec.config
        return {step: loss for step, loss in self.losses.items() if math.isfinite(loss) and config.is_comparable(step)}

    def result(self) -> dict[str, Any]:
        """Return the newest score, for `result.json`; empty without one."""
        if not self.losses or self.held_out is None:
            return {}
        step = max(self.losses)
        loss = self.losses[step]
        return {"evaluation": {"step": step, "loss": loss, "perplexity": _perplexity(loss), **self._text()}}

    def state_dict(self) -> dict[str, Any]:
        """Return the scores and the identity of their text; plain JSON types."""
        losses = {str(step): loss for step, loss in self.losses.items()}
        return {} if self.held_out is None else {"key": self.held_out.key, **self._text(), "losses": losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scores of `state`, unless they are of another text and cannot be compared.

        Raises:
            ValueError: the state is damaged.
        """
        if self.held_out is None or not state:
            return
        try:
            if state["key"] == self.held_out.key:
                self.losses = {int(step): float(loss) for step, loss in state["losses"].items()}
            else:
                _LOG.info(f"--eval_dataset: other text than before ({state['text']}); what was scored does not count")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"--resume: its evaluations cannot be read ({error!r:.200}); use another one") from None

    def _text(self) -> dict[str, Any]:
        """Return name and size of the held-out text."""
        assert self.held_out is not None
        windows, length = self.held_out.token_NS.shape
        return {"text": self.held_out.name, "sequences": windows, "seq_length": length}

    def _sums(self) -> tuple[list[float], int]:
        """Return the summed losses of all passes, and the number of tokens scored; the same on every rank."""
        assert self.held_out is not None
        objective = self.context.objective
        ranks = self.context.ranks
        layout = self.context.batches.layout
        token_NS = self.held_out.token_NS

        # Cut the text into passes. Whole logits, as large as a vocabulary for every token, allow one window a pass.
        windows = 1 if objective.whole else micro_batches_at_once(token_NS.shape[1])
        passes = [
            make_micro_batch(token_NS[first : first + windows], 1.0) for first in range(0, len(token_NS), windows)
        ]

        # Take turns. All ranks gather weights together, so a rank without a pass repeats the last one, and drops it.
        parts = layout.sequence_parallel
        part = layout.token_slice(token_NS.shape[1])
        sums: list[float] = []
        for first in range(0, len(passes), ranks.world_size // parts):
            number = first + layout.data_parallel_rank
            batch = passes[min(number, len(passes) - 1)]
            batch = batch if parts == 1 else batch.take_tokens(part, parts)
            loss = float(objective.cross_entropy(batch.to(self.context.device))) / parts
            if number < len(passes):
                sums.append(loss)

        tokens = sum(int((batch.label_BS[:, 1:] >= 0).sum()) for batch in passes)
        return [loss for share in ranks.gather(sums) for loss in share], max(1, tokens)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
