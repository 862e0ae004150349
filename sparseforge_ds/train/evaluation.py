"""Perplexity of the model that is being trained, on text that it is not trained on; training does not notice.

Passes hold a fixed number of windows, each pass is one rank's, and sums are added exactly: equal weights give the same
number to the last bit on any ranks, micro-batch and ZeRO stage. Ranks that share sequences share a pass, each with its
part of the windows; their number is the same to rounding.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from sparseforge_ds.data.batches import MicroBatch, make_micro_batch
from sparseforge_ds.data.held_out import HeldOut, read_held_out
from sparseforge_ds.model.head import micro_batches_at_once
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.engine import TrainContext
from sparseforge_ds.train.random_state import random_state, set_random_state
from sparseforge_ds.train.spec import RunSpec

_LOG = logging.getLogger(__name__)


def open_held_out(spec: RunSpec, ranks: Ranks) -> HeldOut | None:
    """The windows of `--eval_dataset`, tokenised on rank 0; None without it.

    Raises:
        AgreedError: as `read_held_out`.
    """
    source = spec.held_out
    if source is None:
        return None
    vocabulary = int(spec.model.config.get_text_config().vocab_size)
    return ranks.on_first(lambda: read_held_out(source, spec.model.tokenizer, vocabulary, spec.arguments))


class Evaluation:
    """When the model is scored, what came out so far, and which checkpoint is the best by it.

    Args:
        context: the run.
        held_out: what is scored; None scores nothing.
    """

    def __init__(self, context: TrainContext, held_out: HeldOut | None) -> None:
        self.context = context
        self.held_out = held_out
        self.losses: dict[int, float] = {}
        """Mean negative log-likelihood of a token in nats, by the optimizer step after which it was measured."""

    def due(self, step: int) -> bool:
        """Whether the model is to be scored after `step` steps; a function of the step and of what was scored."""
        spec = self.context.spec
        arguments = spec.arguments
        every = arguments.eval_every, arguments.save_every if arguments.keep_best else 0
        wanted = step in (0, spec.steps) or any(steps and step % steps == 0 for steps in every)
        return wanted and self.held_out is not None and step not in self.losses

    def run(self, step: int) -> dict[str, float]:
        """Score the model as it is, and remember it. Collective.

        Returns:
            What the log says of it, tagged.
        """
        assert self.held_out is not None
        engine, began = self.context.engine, time.perf_counter()
        generators, training = random_state(), engine.module.training
        engine.eval()
        try:
            with torch.no_grad():
                sums, tokens = self._sums()
        finally:
            engine.train(training)
            set_random_state(generators)
        # fsum rounds once, so that the order does not count.
        self.losses[step] = loss = math.fsum(sums) / tokens
        perplexity, seconds = _perplexity(loss), time.perf_counter() - began
        _LOG.info(
            f"step {step}/{self.context.spec.steps}  perplexity {perplexity:.4f} on {self.held_out.name} "
            f"({loss:.5f} nats a token, {tokens:,} tokens, {seconds:.1f} s)"
        )
        return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/seconds": seconds}

    def ranking(self) -> dict[int, float] | None:
        """The losses that may make a checkpoint the best, by step; None without `--keep_best`.

        A soft mask does not count: the less is pruned yet, the lower its loss.
        """
        if not self.context.spec.arguments.keep_best:
            return None
        config = self.context.spec.config
        return {
            step: loss
            for step, loss in self.losses.items()
            if math.isfinite(loss) and (step >= config.release_step or config.mask_storage == "bool")
        }

    def result(self) -> dict[str, Any]:
        """The newest score, for `result.json`; empty without one."""
        if not self.losses or self.held_out is None:
            return {}
        step = max(self.losses)
        loss = self.losses[step]
        return {"evaluation": {"step": step, "loss": loss, "perplexity": _perplexity(loss), **self._text()}}

    def state_dict(self) -> dict[str, Any]:
        """The scores, and of which text they are; plain JSON types."""
        losses = {str(step): loss for step, loss in self.losses.items()}
        return {} if self.held_out is None else {"key": self.held_out.key, **self._text(), "losses": losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Scores of another text, which cannot be compared, are left behind.

        Raises:
            ValueError: it is damaged.
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
        assert self.held_out is not None
        windows, length = self.held_out.token_NS.shape
        return {"text": self.held_out.name, "sequences": windows, "seq_length": length}

    def _sums(self) -> tuple[list[float], int]:
        """Summed losses of all passes, and how many tokens were scored; the same on every rank."""
        assert self.held_out is not None
        objective, ranks = self.context.objective, self.context.ranks
        token_NS = self.held_out.token_NS
        # Whole logits are as large as a vocabulary for every token.
        at_once = 1 if objective.whole else micro_batches_at_once(token_NS.shape[1])
        passes = [
            make_micro_batch(token_NS[first : first + at_once], 1.0) for first in range(0, len(token_NS), at_once)
        ]
        layout, mine = self.context.batches.layout, []
        parts, part = layout.sequence_parallel, layout.token_slice(token_NS.shape[1])
        for first in range(0, len(passes), ranks.world_size // parts):
            number = first + layout.group
            whole = passes[min(number, len(passes) - 1)]  # weights are gathered by all ranks together
            found = self._sum(whole if parts == 1 else whole.take_tokens(part, parts)) / parts
            mine += [found] if number < len(passes) else []
        scored = sum(int((each.label_BS[:, 1:] >= 0).sum()) for each in passes)
        return [one for share in ranks.gather(mine) for one in share], max(1, scored)

    def _sum(self, batch: MicroBatch) -> float:
        return float(self.context.objective.cross_entropy(batch.to(self.context.device)))


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
