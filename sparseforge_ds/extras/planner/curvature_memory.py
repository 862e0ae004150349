"""Memory of measuring the curvature on a device, in the training step or in probe passes."""

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
from sparseforge_ds.train.memory_settings import MemorySettings


def training_step_memory(model: Architecture, settings: MemorySettings) -> Kinds:
    """Return the bytes of measuring in a training step: the sums, and squares of some of a layer's tokens."""
    squares = [
        measured(partial(add_fisher_sums, *_tokens(settings, *shape), 1.0, *(_sums(size) for size in shape)))
        for _, *shape in set(model.matrices)
    ]
    return {"row and column sums": 8 * model.rows_and_columns, "squares": max(squares, default=0)}


def probe_memory(model: Architecture, settings: MemorySettings, shard: int) -> Kinds:
    """Return the bytes of a curvature refresh besides its passes; scores and gates come later, and take less."""
    forge = settings.forge
    kinds: Kinds = {}
    if forge.keeps_elements and not settings.optimizer_on_host:
        kinds["new curvature"] = 4 * local(model, settings, 1, only_masked=True)
    if forge.importance == "fisher" and forge.curvature.per_token:
        if forge.keeps_sums:
            kinds |= training_step_memory(model, settings)
        else:
            kinds["Fisher matrix"] = max(_fisher(model, settings, *shape) for shape in set(model.matrices))
    if forge.factored:
        kinds["row and column sums"] = 8 * model.rows_and_columns
    if forge.importance == "hutchinson" and forge.curvature.per_token:
        kinds["displaced outputs"] = _displaced(model, settings)
    elif forge.importance == "hutchinson" and not settings.optimizer_on_host:
        kinds["random signs"] = measured(lambda: rademacher(1, 0, min(shard, CHUNK), torch.device("meta")))
    return kinds


def _tokens(settings: MemorySettings, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Make a layer's output gradients (T, out) and inputs (T, in) on the meta device."""
    tokens = settings.tokens_at_once
    grad_TO = torch.empty(tokens, outputs, dtype=settings.dtype, device="meta")
    input_TI = torch.empty(tokens, inputs, dtype=settings.dtype, device="meta")
    return grad_TO, input_TI


def _sums(size: int) -> Tensor:
    """Make the sums of an axis on the meta device."""
    return torch.empty(size, dtype=torch.float64, device="meta")


def _displaced(model: Architecture, settings: MemorySettings) -> int:
    """Return the bytes of displacing a layer's outputs and of using their gradients, and of the sums of all layers."""
    tokens = settings.tokens_at_once
    largest = 0
    for _, outputs, inputs in set(model.matrices):
        grad_TO, _ = _tokens(settings, outputs, inputs)
        sign = measured(partial(rademacher_rows, 1, 0, tokens, outputs, grad_TO))
        largest = max(largest, sign + max(2 * settings.low * grad_TO.numel(), 4 * tokens * (outputs + inputs)))
    return largest + 4 * 3 * tokens * len(model.matrices)


def _fisher(model: Architecture, settings: MemorySettings, experts: int, outputs: int, inputs: int) -> int:
    """Return the bytes of a weight's full-size matrix of summed squares, with its operands and its reduction."""
    together = min(experts, experts_at_once(outputs, inputs))
    size = 4 * outputs * inputs * together
    formed = measured(partial(token_fisher, *_tokens(settings, outputs, inputs), 1.0))
    if experts > 1:
        formed += size  # experts are added one at a time, and one may see all tokens
    transposed = size if model.input_first else 0
    # If experts are summed in portions, a rank's part is a view of the sums.
    reduced = settings.stage == 3 and settings.ranks > 1 and together == experts
    received = math.ceil(size / settings.ranks) if reduced else 0
    return max(formed, size + transposed + received)
