"""Memory, tokens and FLOPs of a block-wise start, before the first step."""

from __future__ import annotations

import re
from collections import Counter

from sparseforge_ds.extras.planner.flops import head_flops
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.model.architecture import Architecture
from sparseforge_ds.train.lasting_memory import Kinds, local
from sparseforge_ds.train.memory_settings import MemorySettings

_OF_A_WEIGHT = 21
"""Bytes of a weight: W, its gradient and two moments in fp32, a byte that tells if it is trained, and its mask."""
_OF_A_SOFT_WEIGHT = 12
"""Bytes of a weight whose mask is soft inside its block, besides: W, m and m_eff in fp32."""
_OF_AN_UPDATED_WEIGHT = 11
"""Bytes of a weight while its soft mask is updated, at the time when the block's gradients are gone."""
_ACTIVATIONS = 128
"""Approximate bytes of one block's activations for each token and channel, as in `sparseforge prune`."""
_ON_DEVICE = 1 << 30
"""Bytes of both streams that always fit on a GPU; more of them may wait on the host."""
_NUMBERED = re.compile(r"(.+?\.\d+)\.")


def start_tokens(settings: MemorySettings) -> int:
    """Return the tokens that every block reads, over all ranks; 0 without such a start."""
    forge = settings.forge
    if forge.start is not None:
        tokens = forge.start.tokens_of(forge.max_steps * settings.tokens_per_step)
        # Whole steps are read, of a sequence at least for every rank.
        ranks = settings.ranks // settings.sequence_parallel
        size, count = forge.start.micro_batches(tokens, settings.seq_length, ranks, settings.micro_batch)
        of_step = size * count * ranks * settings.seq_length
        return -(-tokens // of_step) * of_step
    if not forge.starts_by_block:
        return 0
    sequences = forge.curvature.sequences
    batch = settings.tokens_per_step if sequences is None else sequences * settings.seq_length
    return forge.curvature.first_probes * batch


def start_flops(model: Architecture, settings: MemorySettings, forward: float) -> float:
    """Return the FLOPs of all ranks, for `forward` FLOPs of a token's forward pass.

    The dense model runs once, and every block about four times; each pass of training takes the work of three more.
    """
    forge = settings.forge
    tokens = start_tokens(settings)
    passes = 0
    if forge.start is not None:
        wanted = forge.start.tokens_of(forge.max_steps * settings.tokens_per_step)
        passes = forge.start.passes(wanted, settings.seq_length, settings.ranks // settings.sequence_parallel)
    blocks = forward - head_flops(model)
    return tokens * (forward + blocks * (4 + 3 * passes))


def start_memory(model: Architecture, settings: MemorySettings) -> Kinds:
    """Return the bytes of the largest block on a device, when the optimizer has no state yet."""
    blocks: Counter[str] = Counter()
    for parameter in model.parameters:
        if match := _NUMBERED.match(parameter.name):
            blocks[match[1]] += parameter.numel
    inputs = [inputs for _, _, inputs in model.matrices]
    block = max(blocks.values(), default=0)
    # X^T X of every input of a block, and the workspace in which one is inverted; diagonals are negligible. SparseGPT
    # has no masks for fused experts and tiles.
    mask = "sparsegpt" if settings.forge.start is None else settings.forge.start.mask
    has_fused = any(experts > 1 for experts, _, _ in model.matrices)
    needs_moments = (
        mask == "sparsegpt" or mask is None and isinstance(settings.forge.parsed_pattern, NM) and not has_fused
    )
    moments = 4 * sum(size**2 for size in inputs) // max(len(blocks), 1) + 8 * max(inputs) ** 2
    is_soft = settings.forge.start is not None and settings.forge.start.soft > 0 and settings.forge.start.epochs > 0
    soft = 0
    if is_soft:
        largest = max(experts * outputs * inputs for experts, outputs, inputs in model.matrices)
        soft = _OF_A_SOFT_WEIGHT * block + max(0, _OF_AN_UPDATED_WEIGHT * largest - 4 * block)
    own = 0 if settings.optimizer_on_host else 8 * local(model, settings, 1, only_masked=True)
    return {
        "a whole block": _OF_A_WEIGHT * block + soft,
        "second moments": moments if needs_moments else 0,
        "activations": _ACTIVATIONS * settings.tokens_at_once * model.hidden,
        "streams": min(streams(model, settings), _ON_DEVICE),
        "moments that come later": -own,
    }


def streams(model: Architecture, settings: MemorySettings) -> int:
    """Return the bytes of a rank's dense and pruned hidden states."""
    return 2 * start_tokens(settings) // settings.ranks * model.hidden * settings.low


def streams_on_host(model: Architecture, settings: MemorySettings) -> int:
    """Return the bytes of the streams that may wait on the host."""
    size = streams(model, settings)
    return size if size > _ON_DEVICE else 0
