"""Rotation of a dense model into the basis in which a pattern removes the least score, with a check of its function."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.basis.rotation.moments import measure_moments
from sparseforge_ds.extras.basis.rotation.rotation_search import RotationSearch
from sparseforge_ds.extras.basis.rotation.stream import RESIDUAL, find_stream, untie
from sparseforge_ds.extras.basis.rotation.transform import rotate_model, rotations_sha256
from sparseforge_ds.mask.pattern import NM, Pattern, require_removing
from sparseforge_ds.model.basis import FORMAT
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.model.sound_weights import first_not_finite

_KL = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Largest KL divergence in nats a token between the model before and after, by the dtype that both are rounded to."""


def require_nm(pattern: Pattern) -> NM:
    """Return an n:m pattern unchanged; raise ValueError for any other, and for one that keeps everything."""
    if not isinstance(pattern, NM):
        raise ValueError(f"rotate: {pattern} is no n:m pattern, and the search needs one; use one like 2:4")
    require_removing(pattern)
    return pattern


def rotate(model: PreTrainedModel, batches: Sequence[Tensor], config: SparseForgeConfig, steps: int) -> dict[str, Any]:
    """Rotate a model's residual stream and the values of its heads, in place, and untie its head.

    Args:
        model: the dense model.
        batches: (B, S) token ids; a forward and a backward pass each.
        config: block with the pattern, the seed, and the weights to prune.
        steps: steps of the search.

    Returns:
        Plain JSON: settings of the search, its gain, and the error of the rotated model.

    Raises:
        ValueError: `find_stream` or `measure` refuses the model, the pattern is not n:m, or the rotated model computes
            something else; the model is of no use then.
    """
    started = time.monotonic()
    pattern = require_nm(config.parsed_pattern)
    # The function to keep.
    before_SV = _next_tokens(model, batches[0])
    if not before_SV.isfinite().all():
        bad = first_not_finite(model)
        raise ValueError(
            f"rotate: the {model.config.model_type!r} model computes NaN; "
            + (f"{bad} is not finite, give a sound model" if bad else "give one whose sums stay in its dtype")
        )
    # The weights that the rotation is for.
    untied = untie(model)
    stream = find_stream(model, batches[0])
    weights = prunable_weights(model, config)
    if not any(list(stream.axes(weight.name)) for weight in weights):
        raise ValueError(
            f"rotate: none of the {len(weights)} weights that the pattern prunes, such as {weights[0].name}, has an "
            "axis that is rotated; exclude fewer, or permute instead"
        )
    # Search by measured moments, and rotate.
    scored = measure_moments(model, stream, weights, batches, config.seed)
    parameters = dict(model.named_parameters())
    search = RotationSearch(lambda name: parameters[name].detach(), stream, scored, pattern, config.seed)
    result = search.run(steps)
    rotate_model(model, stream, result.rotations)
    # Compare the function on the first batch.
    after_SV = _next_tokens(model, batches[0])
    kl = float(F.kl_div(after_SV, before_SV, log_target=True, reduction="none").sum(-1).mean().abs())
    if not kl <= _KL[model.dtype]:
        raise ValueError(
            f"rotate: the rotated {model.config.model_type!r} model computes something else (KL divergence {kl:.2e} "
            f"nats, at most {_KL[model.dtype]} is rounding in {model.dtype}); permute it instead, and report this"
        )
    return {
        "format": FORMAT,
        "sha256": rotations_sha256(result.rotations),
        "pattern": str(pattern),
        "seed": config.seed,
        "tokens": sum(batch.numel() for batch in batches),
        "steps": steps,
        "removed": round(result.removed, 6),
        "rotated": {"residual": stream.rotated[RESIDUAL].channels, "heads": len(stream.rotated) - 1},
        "untied": untied,
        "kl": kl,
        "seconds": round(time.monotonic() - started, 1),
    }


@torch.no_grad()
def _next_tokens(model: PreTrainedModel, tokens_BS: Tensor) -> Tensor:
    """Return (B, S, V) log-probabilities in fp32."""
    return model(input_ids=tokens_BS.to(model.device), use_cache=False).logits.float().log_softmax(-1)
