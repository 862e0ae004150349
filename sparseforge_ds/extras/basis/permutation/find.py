"""Search for the permutation of a model: the order of one dimension after another, from the weights that read it.

Only prunable weights count, each relative to its own mean score. Weights are read one at a time. If many weights read a
dimension, like the residual stream, a sample of their rows is kept.
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
from sparseforge_ds.extras.basis.permutation.order_search import best_order, kept_score
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.mask.pattern import NM, Pattern, require_removing


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search: pattern, channels that may move, sampled outputs, and seed."""

    pattern: Pattern
    dimensions: Literal["mlp", "mlp+heads", "all"] = "all"
    """Channels that may move. mlp: inner channels of every MLP and expert. mlp+heads: also the values of every
    key-value head, and the latents of latent attention. all: also the residual stream, in one order for all layers."""
    rows: int = 2048
    """Maximum of outputs, over the weights that read a dimension, that are scored; of more, a sample is taken."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, NM):
            raise ValueError(
                f"permute: {self.pattern} is no n:m pattern, and only there do channels share groups; use one like 2:4"
            )
        require_removing(self.pattern)


def check_pattern(pattern: Pattern, by_name: Mapping[str, Dimension], weights: Iterable[SparseWeight]) -> None:
    """Raise ValueError unless weights read some dimension, and every group lies within one block of its channels."""
    axes = {weight.name: weight.input_axis for weight in weights}
    contracted = [
        dimension
        for dimension in by_name.values()
        if any(axes.get(axis.tensor) == axis.axis for axis in dimension.axes)
    ]
    if not contracted:
        raise ValueError(
            f"permute: none of the {len(axes)} weights that the pattern prunes, such as {next(iter(axes))}, reads "
            "channels that may move, so every order keeps as much; exclude fewer, or permute more dimensions"
        )
    for dimension in contracted:
        if dimension.channels % pattern.members:
            raise ValueError(
                f"permute: {dimension.name} has blocks of {dimension.channels} channels, no multiple of "
                f"{pattern.members}, so groups of {pattern} would cross blocks; permute fewer dimensions"
            )


def find_permutation(
    read: Callable[[str], Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Iterable[SparseWeight],
    model_type: str,
    config: Any,
    settings: SearchSettings,
    squares: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Permutation:
    """Find the order of every dimension in which the weights that read it keep the most score.

    Args:
        read: returns a tensor by its name.
        shapes: shapes of all tensors, as in `dimensions`.
        weights: the weights to prune, under the names of `shapes`.
        model_type: the family, as in `dimensions`.
        config: transformers' config of the text model.
        settings: pattern and extent of the search.
        squares: mean square of every input of a weight, (in,) or (experts, in), for Wanda's score |W| sqrt(mean x^2);
            None: the score W^2, which measured better than |W|.
        device: device of the search.

    Returns:
        The permutation. Its facts tell the share of the score that the pattern keeps before and after, for the sampled
        rows.

    Raises:
        ValueError: as `dimensions` and `check_pattern`, and for weights that are in the pattern already.
    """
    started = time.monotonic()
    weights = list(weights)
    pattern = settings.pattern
    by_name = dimensions(model_type, config, shapes, settings.dimensions)
    check_pattern(pattern, by_name, weights)
    assert isinstance(pattern, NM)
    # One dimension after another: orders of different dimensions do not depend on each other.
    input_axis = {weight.name: weight.input_axis for weight in weights}
    index: dict[str, Tensor] = {}
    totals = dict.fromkeys(["mlp", "heads", "residual"], torch.zeros(3, dtype=torch.float64))
    for number, (name, dimension) in enumerate(tqdm(by_name.items(), unit=" dimensions", disable=None)):
        seed = settings.seed + number
        original_BC = torch.arange(dimension.channels).expand(dimension.blocks, dimension.channels)
        axes = [axis for axis in dimension.axes if input_axis.get(axis.tensor) == axis.axis]
        if not axes:  # no weight to prune reads it
            index[name] = original_BC.contiguous()
            continue
        generator = torch.Generator().manual_seed(seed)
        score_BCR = _scores(dimension, axes, read, settings.rows, squares, generator, device)
        order_BC = best_order(score_BCR, pattern, seed)
        before = kept_score(score_BCR, original_BC.to(device), pattern).sum().cpu()
        after = kept_score(score_BCR, order_BC.to(device), pattern).sum().cpu()
        totals[dimension.part] = totals[dimension.part] + torch.stack([score_BCR.double().sum().cpu(), before, after])
        index[name] = order_BC.cpu()
    # A pattern that removes nothing means pruned weights.
    sums = torch.stack(list(totals.values())).sum(0)
    if sums[0] > 0 and sums[0] - sums[1] <= 1e-9 * sums[0]:
        raise ValueError(
            f"permute: the weights are {pattern} already, so no order of channels keeps more; start from the dense "
            "model"
        )
    facts = {
        "pattern": str(pattern),
        "score": "magnitude" if squares is None else "activations",
        "rows": settings.rows,
        "seed": settings.seed,
        "kept_score": {
            part: {"before": round(float(before / total), 6), "after": round(float(after / total), 6)}
            for part, (total, before, after) in totals.items()
            if total > 0
        },
        "seconds": round(time.monotonic() - started, 1),
    }
    return Permutation(settings.dimensions, index, facts)


def _scores(
    dimension: Dimension,
    axes: list[Axis],
    read: Callable[[str], Tensor],
    rows: int,
    squares: Mapping[str, Tensor] | None,
    generator: torch.Generator,
    device: torch.device | str,
) -> Tensor:
    """Return (blocks, channels, rows) scores of the weights that read a dimension, for a sample of their rows.

    Args:
        dimension: the dimension.
        axes: its axes in the weights to prune.
        read: returns a tensor by its name.
        rows: maximum of rows.
        squares: mean square of every input, or None, as in `find_permutation`.
        generator: source of the sample.
        device: device of the scores.
    """
    # Each weight gives the same share of its rows.
    row_counts: Counter[int | None] = Counter()
    for axis in axes:
        row_counts[axis.block] += _rows(axis)
    share = min(1.0, rows / max(row_counts.values()))
    parts: dict[int | None, list[Tensor]] = {}
    for axis in axes:
        # The score of every element, relative to the weight's mean.
        value = read(axis.tensor).to(device)
        if squares is None:
            score = value.float().square()
        else:
            root = squares[axis.tensor].to(device).sqrt()
            score = value.float().abs() * root.unsqueeze(-1 if axis.axis == -2 else -2)
        if not score.isfinite().all():
            raise ValueError(f"permute: {axis.tensor}, or its inputs, are not finite; give a model of finite weights")
        score = score / score.mean().clamp(min=torch.finfo(torch.float32).tiny)
        flat_LR = score.movedim(axis.axis, 1 if score.dim() == 3 else 0).reshape(-1, score.numel() // axis.length)
        # Sample rows, which are numbered copy by copy.
        chosen = torch.randperm(_rows(axis), generator=generator)[: max(1, round(share * _rows(axis)))]
        copy = chosen // flat_LR.shape[1]
        row = chosen % flat_LR.shape[1]
        positions_SBC = axis.positions[copy].to(device)
        sampled_BCS = flat_LR[positions_SBC.permute(1, 2, 0), row.to(device)]
        parts.setdefault(axis.block, []).append(sampled_BCS)
    # Experts that are stored one by one become blocks, padded to the same number of rows.
    if None in parts:
        return torch.cat(parts[None], dim=2)
    blocks = {block: torch.cat(scores, dim=2)[0] for block, scores in parts.items()}
    size = max(score.shape[-1] for score in blocks.values())
    result_BCR = torch.zeros(dimension.blocks, dimension.channels, size, device=device)
    for block, score_CR in blocks.items():
        assert block is not None
        result_BCR[block, :, : score_CR.shape[-1]] = score_CR
    return result_BCR


def _rows(axis: Axis) -> int:
    """Count the rows that read a channel, over all copies of an axis."""
    return math.prod(axis.shape) // axis.length * len(axis.positions)
