"""Finding the permutation of a model: the order of one dimension after another, from the weights that read it.

Only prunable weights count, each relative to its own mean score. Weights are read one at a time; of a dimension that
many read, like the residual stream, a sample of the rows is kept.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.extras.basis.permutation.channels import Axis, Dimension, dimensions
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.extras.basis.permutation.search import best_order, kept_score
from sparseforge_ds.mask.pattern import NM, Pattern


@dataclass(frozen=True)
class SearchSettings:
    """Pattern of a search, channels that it may move, outputs that it scores, and its seed."""

    pattern: Pattern
    dimensions: Literal["mlp", "mlp+heads", "all"] = "all"
    """mlp: the inner dimension of every MLP and of every expert; mlp+heads: also the values of every key-value head,
    and the latents of latent attention; all: also the residual stream, in one order for all layers."""
    rows: int = 2048
    """The most outputs of the weights that read a dimension; where there are more, this many are sampled."""
    seed: int = 0


def check_pattern(pattern: Pattern, found: Mapping[str, Dimension], weights: Iterable[SparseWeight]) -> None:
    """Raise ValueError where groups are not those of neighbouring channels of one block."""
    if not isinstance(pattern, NM):
        raise ValueError(
            f"permute: channels share groups in n:m patterns only, not in {pattern}; use a pattern like 2:4"
        )
    axes = {weight.name: weight.input_axis for weight in weights}
    for held in found.values():
        read = any(axes.get(axis.tensor) == axis.axis for axis in held.axes)
        if read and held.channels % pattern.members:
            raise ValueError(
                f"permute: {held.name} has blocks of {held.channels} channels, no multiple of {pattern.members}, so "
                f"that groups of {pattern} lie across two of them; permute fewer dimensions"
            )


def find_permutation(
    read: Callable[[str], Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Iterable[SparseWeight],
    model_type: str,
    of_model: Any,
    settings: SearchSettings,
    squares: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Permutation:
    """The order of every dimension in which the weights that read it keep the most score.

    Raises as `dimensions` and `check_pattern`, and ValueError for weights that are in the pattern already.

    Args:
        shapes, model_type: as in `dimensions`.
        weights: those that will be in the pattern, under the names of `shapes`.
        of_model: transformers' config of the text model.
        squares: mean square of every input of a weight, (in,) or (experts, in); the score is then Wanda's,
            |W| sqrt(mean x^2), else W^2 (which measured better than |W|).

    Returns:
        The permutation; its facts say what share of the score the pattern keeps before and after, of the sampled rows.
    """
    started = time.monotonic()
    weights = list(weights)
    pattern, seed = settings.pattern, settings.seed
    found = dimensions(model_type, of_model, shapes, settings.dimensions)
    check_pattern(pattern, found, weights)
    assert isinstance(pattern, NM)
    input_axis = {weight.name: weight.input_axis for weight in weights}
    index: dict[str, Tensor] = {}
    totals = dict.fromkeys(["mlp", "heads", "residual"], torch.zeros(3, dtype=torch.float64))
    for number, (name, held) in enumerate(tqdm(found.items(), unit=" dimensions", disable=None)):
        plain_BC = torch.arange(held.channels).expand(held.blocks, held.channels)
        axes = [axis for axis in held.axes if input_axis.get(axis.tensor) == axis.axis]
        if not axes:
            index[name] = plain_BC.contiguous()
            continue
        generator = torch.Generator().manual_seed(seed + number)
        score_BCR = _scores(held, axes, read, settings.rows, squares, generator, device)
        order_BC = best_order(score_BCR, pattern, seed + number)
        before, after = (kept_score(score_BCR, i.to(device), pattern).sum().cpu() for i in (plain_BC, order_BC))
        totals[held.part] = totals[held.part] + torch.stack([score_BCR.double().sum().cpu(), before, after])
        index[name] = order_BC.cpu()
    sums = torch.stack(list(totals.values())).sum(0)
    if sums[0] > 0 and sums[0] - sums[1] <= 1e-9 * sums[0]:
        raise ValueError(
            f"permute: the weights are {pattern} already, so that no order of channels keeps more; start from the "
            "dense model"
        )
    facts = {
        "pattern": str(pattern),
        "score": "magnitude" if squares is None else "activations",
        "rows": settings.rows,
        "seed": seed,
        "kept": {
            part: {"before": round(float(before / total), 6), "after": round(float(after / total), 6)}
            for part, (total, before, after) in totals.items()
            if total > 0
        },
        "seconds": round(time.monotonic() - started, 1),
    }
    return Permutation(settings.dimensions, index, facts)


def _scores(
    held: Dimension,
    axes: list[Axis],
    read: Callable[[str], Tensor],
    rows: int,
    squares: Mapping[str, Tensor] | None,
    generator: torch.Generator,
    device: torch.device | str,
) -> Tensor:
    """(blocks, channels, rows) scores of the dimension in the weights that read it, or in a sample of their rows."""
    there: Counter[int | None] = Counter()
    for axis in axes:
        there[axis.block] += _rows(axis)
    share = min(1.0, rows / max(there.values()))
    parts: dict[int | None, list[Tensor]] = {}
    for axis in axes:
        value = read(axis.tensor).to(device)
        if squares is None:
            score = value.float().square()
        else:
            root = squares[axis.tensor].to(device).sqrt()
            score = value.float().abs() * root.unsqueeze(-1 if axis.axis == -2 else -2)
        if not score.isfinite().all():
            raise ValueError(f"permute: {axis.tensor}, or what it is multiplied by, is not finite; give a sound model")
        score = score / score.mean().clamp(min=torch.finfo(torch.float32).tiny)
        flat_LR = score.movedim(axis.axis, 1 if score.dim() == 3 else 0).reshape(-1, score.numel() // axis.length)
        chosen = torch.randperm(_rows(axis), generator=generator)[: max(1, round(share * _rows(axis)))]
        # (copies, blocks, channels, rows of a copy), whose rows are numbered copy by copy
        copy, row = chosen // flat_LR.shape[1], chosen % flat_LR.shape[1]
        positions_SBC = axis.positions[copy].to(device)
        sampled_BCS = flat_LR[positions_SBC.permute(1, 2, 0), row.to(device)]
        parts.setdefault(axis.block, []).append(sampled_BCS)
    if None in parts:
        return torch.cat(parts[None], dim=2)
    blocks = {block: torch.cat(scores, dim=2)[0] for block, scores in parts.items()}
    size = max(score.shape[-1] for score in blocks.values())
    result_BCR = torch.zeros(held.blocks, held.channels, size, device=device)
    for block, score_CR in blocks.items():
        assert block is not None
        result_BCR[block, :, : score_CR.shape[-1]] = score_CR
    return result_BCR


def _rows(axis: Axis) -> int:
    """Rows that read a channel in all copies of an axis."""
    return math.prod(axis.shape) // axis.length * len(axis.positions)
