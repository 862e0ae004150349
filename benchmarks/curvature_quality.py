"""Quality of a curvature estimate: ranks inside groups, survivors, and the perplexity with them.

Legend of shape suffixes: G groups, M members.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.mask.factored import add_sums, rank_one, shares
from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels.groups import top_n
from sparseforge_ds.mask.kernels.scores import score_moments, standardized_score
from sparseforge_ds.mask.pattern import NM, rank_in_group
from sparseforge_ds.model.families import PrunableWeight

Diagonal = dict[str, Tensor]
"""(numel,) fp32 by weight name, in the order of the weight's elements."""

PATTERN = NM(2, 4)
DAMPING = 1e-4


def factored(estimate: Diagonal, weights: list[PrunableWeight]) -> Diagonal:
    """Return the product of row and column sums of every weight, as scores take it with `curvature.factored`."""
    result = {}
    for weight in weights:
        rows, columns = weight.shape
        row_R = torch.zeros(rows, dtype=torch.float64)
        column_C = torch.zeros(columns, dtype=torch.float64)
        add_sums(estimate[weight.name], 0, row_R, column_C)
        factors = shares(torch.cat([row_R, column_C]), torch.tensor([weight.shape]))
        share_R, column_C = factors.split(weight.shape)
        result[weight.name] = rank_one(share_R, column_C, 0, rows * columns)
    return result


def shrunk(estimate: Diagonal, weights: list[PrunableWeight]) -> Diagonal:
    """Half way to the product, in units of the scatter around it: less trust in elements the more they scatter.

    The weight of the elements is a / (a + b), a the mean square of the product and b that of what is left of it.
    """
    result = {}
    for name, product in factored(estimate, weights).items():
        rest = estimate[name] - product
        signal = product.square().mean()
        noise = rest.square().mean()
        result[name] = product + rest * (signal / (signal + noise).clamp(min=torch.finfo(torch.float32).tiny))
    return result


@dataclass(frozen=True)
class Quality:
    """One estimate against a reference and on held-out text."""

    correlation: float
    """Mean of Spearman's rank correlation with the reference inside groups."""
    same_survivors: float
    """Share of the survivors of a group that the reference names too."""
    perplexity: float
    """Perplexity of the model with only the survivors on held-out windows, without retraining."""


class Judge:
    """A dense model, held-out text and a reference for its curvature."""

    def __init__(self, model: Any, weights: list[PrunableWeight], heldout_NS: Tensor, batch: int) -> None:
        self.model = model
        self.weights = weights
        self.heldout_NS = heldout_NS
        self.batch = batch
        self.dense = {weight.name: model.get_parameter(weight.name).detach().clone() for weight in weights}
        self.reference: Diagonal = {}

    def judge(self, estimate: Diagonal) -> Quality:
        """Compare with `reference`, and prune by it."""
        estimated = self.survivors(estimate)
        exact = self.survivors(self.reference)
        same = [(estimated[name] & exact[name]).sum().item() for name in estimated]
        kept = sum(mask.sum().item() for mask in exact.values())
        return Quality(
            correlation=rank_correlation(self.groups(estimate), self.groups(self.reference)),
            same_survivors=sum(same) / kept,
            perplexity=self.perplexity(estimated),
        )

    def survivors(self, estimate: Diagonal) -> dict[str, Tensor]:
        """(numel,) bool by weight name: the best of every group by (max(H, 0) + eps) W^2."""
        result = {}
        for weight in self.weights:
            dense = self.dense[weight.name].view(-1)
            curvature = estimate[weight.name]
            scaling = scalings(score_moments(dense, curvature)[None], DAMPING)[0]
            score_GM = self._groups(weight, standardized_score(dense, curvature, scaling))
            chosen = PATTERN.from_groups(top_n(score_GM, PATTERN.kept_count), weight.shape, weight.input_axis)
            result[weight.name] = chosen
        return result

    def groups(self, estimate: Diagonal) -> list[Tensor]:
        """(G, M) of every weight."""
        return [self._groups(weight, estimate[weight.name]) for weight in self.weights]

    def _groups(self, weight: PrunableWeight, values: Tensor) -> Tensor:
        return PATTERN.to_groups(values, weight.shape, weight.input_axis)

    @torch.no_grad()
    def perplexity(self, survivors: dict[str, Tensor] | None = None) -> float:
        """Return the perplexity on the held-out windows with the given survivors; None: of the dense model."""
        for name, mask in (survivors or {}).items():
            self.model.get_parameter(name).copy_(self.dense[name] * mask.view_as(self.dense[name]))
        losses = [
            float(self.model(input_ids=part_BS, labels=part_BS).loss) * len(part_BS)
            for part_BS in self.heldout_NS.split(self.batch)
        ]
        for name in survivors or {}:
            self.model.get_parameter(name).copy_(self.dense[name])
        return math.exp(min(sum(losses) / len(self.heldout_NS), 700.0))


def rank_correlation(left: list[Tensor], right: list[Tensor]) -> float:
    """Return Spearman's correlation, averaged over the groups (G, M) of all matrices."""
    total = 0.0
    groups = 0
    for mine_GM, theirs_GM in zip(left, right, strict=True):
        distance_G = (rank_in_group(mine_GM).int() - rank_in_group(theirs_GM).int()).square().sum(1)
        members = mine_GM.shape[1]
        total += float((1 - 6 * distance_G / (members * (members**2 - 1))).sum())
        groups += len(mine_GM)
    return total / groups
