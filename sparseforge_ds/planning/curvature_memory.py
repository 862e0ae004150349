"""What measuring the curvature takes on a device: in the training step itself, or beside a pass of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from sparseforge_ds.mask.curvature import add_fisher_sums, experts_at_once, rademacher, rademacher_rows, token_fisher
from sparseforge_ds.mask.runs import PIECE
from sparseforge_ds.planning.architecture import Architecture
from sparseforge_ds.planning.live import Live
from sparseforge_ds.planning.settings import Settings
from sparseforge_ds.planning.states import Kinds, local


def heard(model: Architecture, settings: Settings) -> Kinds:
    """What listening to a training step needs: the sums, and squares of some of a layer's tokens."""
    tokens = settings.micro_batch * settings.seq_length
    most = 0
    for shape in set(model.masked_shapes):
        outputs, inputs = reversed(shape[-2:]) if model.input_first else shape[-2:]
        grad_TO = torch.empty(tokens, outputs, dtype=settings.dtype, device="meta")
        input_TI = torch.empty(tokens, inputs, dtype=settings.dtype, device="meta")
        sums = [torch.empty(size, dtype=torch.float64, device="meta") for size in (outputs, inputs)]
        most = max(most, measured(partial(add_fisher_sums, grad_TO, input_TI, 1.0, *sums)))
    return {"row and column sums": 8 * model.rows_and_columns, "squares": most}


def probe(model: Architecture, settings: Settings, shard: int) -> Kinds:
    """What a refresh of the curvature needs besides a pass; scores and gates come later, and take less."""
    forge, tokens = settings.forge, settings.micro_batch * settings.seq_length
    kinds: Kinds = {}
    if forge.keeps_elements and not settings.optimizer_on_host:
        kinds["new curvature"] = 4 * local(model, settings, 1, only_masked=True)
    if forge.importance in ("fisher", "gauss_newton") and forge.curvature.per_token:
        if forge.keeps_sums:
            kinds |= heard(model, settings)
        else:
            kinds["Fisher matrix"] = _fisher(model, settings, tokens)
    if forge.importance == "gauss_newton":
        # Labels are sampled, and their cross-entropy is taken, from fp32 logits of all tokens at once.
        kinds["sampled labels"] = 3 * 4 * tokens * model.vocabulary
    if forge.importance == "hutchinson" and forge.curvature.per_token:
        kinds["displaced outputs"] = _displaced(model, settings, tokens)
    if forge.factored:
        kinds["row and column sums"] = 8 * model.rows_and_columns
    if settings.displaces_weights and not settings.optimizer_on_host:
        kinds["random signs"] = measured(lambda: rademacher(1, 0, min(shard, PIECE), torch.device("meta")))
    return kinds


def _displaced(model: Architecture, settings: Settings, tokens: int) -> int:
    """The most that displacing a layer's outputs, or using their gradients, needs, and what is kept of all layers."""
    most = 0
    for shape in set(model.masked_shapes):
        outputs, inputs = reversed(shape[-2:]) if model.input_first else shape[-2:]
        grad_TO = torch.empty(tokens, outputs, dtype=settings.dtype, device="meta")
        sign = measured(partial(rademacher_rows, 1, 0, tokens, outputs, grad_TO))
        used = 4 * tokens * (outputs + inputs)
        most = max(most, sign + max(2 * settings.low * grad_TO.numel(), used))
    return most + 4 * 3 * tokens * len(model.masked_shapes)


def _fisher(model: Architecture, settings: Settings, tokens: int) -> int:
    """The most that a weight's full-size matrix of summed squares, its operands, and its way to the shards need."""
    return max((_fisher_of(shape, model, settings, tokens) for shape in set(model.masked_shapes)), default=0)


def _fisher_of(shape: tuple[int, ...], model: Architecture, settings: Settings, tokens: int) -> int:
    outputs, inputs = shape[-2:]
    if model.input_first:
        outputs, inputs = inputs, outputs
    size = 4 * outputs * inputs * min(math.prod(shape[:-2]), experts_at_once(outputs, inputs))
    grad_TO = torch.empty(tokens, outputs, dtype=settings.dtype, device="meta")
    input_TI = torch.empty(tokens, inputs, dtype=settings.dtype, device="meta")
    formed = measured(lambda: token_fisher(grad_TO, input_TI, 1.0))
    if len(shape) > 2:
        formed += size  # an expert at a time, of which one may see all tokens
    turned = size if model.input_first else 0
    whole = size == 4 * math.prod(shape)  # else a rank's part is a view of what was summed
    received = math.ceil(size / settings.ranks) if settings.stage == 3 and settings.ranks > 1 and whole else 0
    return max(formed, size + turned + received)


def measured(function: Callable[[], object]) -> int:
    """Bytes at the peak of a computation on the meta device."""
    with Live() as live:
        function()
    return live.peak
