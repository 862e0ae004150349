"""What measuring the curvature takes on a device: in the training step itself, or beside a pass of its own."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from sparseforge_ds.mask.curvature import token_fisher
from sparseforge_ds.mask.kernels.chunks import CHUNK
from sparseforge_ds.mask.kernels.fisher import add_fisher_sums, experts_at_once
from sparseforge_ds.mask.random_numbers import rademacher, rademacher_rows
from sparseforge_ds.model.architecture import Architecture
from sparseforge_ds.model.peak_memory import measured
from sparseforge_ds.train.lasting_memory import Kinds, local
from sparseforge_ds.train.memory_settings import Settings


def heard(model: Architecture, settings: Settings) -> Kinds:
    """What listening to a training step needs: the sums, and squares of some of a layer's tokens."""
    squares = [
        measured(partial(add_fisher_sums, *_tokens(settings, *shape), 1.0, *(_sums(size) for size in shape)))
        for _, *shape in set(model.matrices)
    ]
    return {"row and column sums": 8 * model.rows_and_columns, "squares": max(squares, default=0)}


def probe(model: Architecture, settings: Settings, shard: int) -> Kinds:
    """What a refresh of the curvature needs besides a pass; scores and gates come later, and take less."""
    forge = settings.forge
    kinds: Kinds = {}
    if forge.keeps_elements and not settings.optimizer_on_host:
        kinds["new curvature"] = 4 * local(model, settings, 1, only_masked=True)
    if forge.importance == "fisher" and forge.curvature.per_token:
        if forge.keeps_sums:
            kinds |= heard(model, settings)
        else:
            kinds["Fisher matrix"] = max(_fisher(model, settings, *shape) for shape in set(model.matrices))
    if forge.factored:
        kinds["row and column sums"] = 8 * model.rows_and_columns
    if forge.importance == "hutchinson" and forge.curvature.per_token:
        kinds["displaced outputs"] = _displaced(model, settings)
    elif forge.importance == "hutchinson" and not settings.optimizer_on_host:
        kinds["random signs"] = measured(lambda: rademacher(1, 0, min(shard, CHUNK), torch.device("meta")))
    return kinds


def _tokens(settings: Settings, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """A layer's gradient of outputs and its inputs, (T, out) and (T, in), without numbers."""
    tokens = settings.tokens_at_once
    grad_TO, input_TI = (torch.empty(tokens, n, dtype=settings.dtype, device="meta") for n in (outputs, inputs))
    return grad_TO, input_TI


def _sums(size: int) -> Tensor:
    """Room for the sums of an axis, without numbers."""
    return torch.empty(size, dtype=torch.float64, device="meta")


def _displaced(model: Architecture, settings: Settings) -> int:
    """The most that displacing a layer's outputs, or using their gradients, needs, and what is kept of all layers."""
    tokens, most = settings.tokens_at_once, 0
    for _, outputs, inputs in set(model.matrices):
        grad_TO, _ = _tokens(settings, outputs, inputs)
        sign = measured(partial(rademacher_rows, 1, 0, tokens, outputs, grad_TO))
        most = max(most, sign + max(2 * settings.low * grad_TO.numel(), 4 * tokens * (outputs + inputs)))
    return most + 4 * 3 * tokens * len(model.matrices)


def _fisher(model: Architecture, settings: Settings, experts: int, outputs: int, inputs: int) -> int:
    """What a weight's full-size matrix of summed squares, its operands, and its way to the shards need."""
    together = min(experts, experts_at_once(outputs, inputs))
    size = 4 * outputs * inputs * together
    formed = measured(partial(token_fisher, *_tokens(settings, outputs, inputs), 1.0))
    if experts > 1:
        formed += size  # an expert at a time, of which one may see all tokens
    turned = size if model.input_first else 0
    # Of some experts at a time, a rank's part is a view of what was summed.
    sent = settings.stage == 3 and settings.ranks > 1 and together == experts
    received = math.ceil(size / settings.ranks) if sent else 0
    return max(formed, size + turned + received)
