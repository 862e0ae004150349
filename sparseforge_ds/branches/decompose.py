"""Start of a branch with a learned P: a low-rank part of the weights that leaves the pattern little to remove.

    W = B P + S,    least sum of squares of what the pattern removes from S

Given the product, the pattern decides what is removed; given that, removed entries are the data of a low-rank
approximation, and kept ones are free, so that they are filled in by the product itself (hard-impute, Mazumder, Hastie
and Tibshirani 2010; for sparse plus low rank weights OATS, arXiv 2409.13652). Each round fills in

    T = B P + 2 (what is removed of S)

and takes one step of subspace iteration from the present product to the best approximation of T; the 2 relaxes it
beyond what is removed, which takes half of the rounds (3 and more diverges). Columns count alike: weighted by the norms
of their inputs they leave 3% to 4% less to remove of stories260K and books-6m, and want text before the run.

Shards work alone: a round multiplies what they hold, and two products of rank x inputs and rank x outputs are summed.
Shape suffixes: R rows and C columns of a weight as it is stored, K the rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseforge_ds.mask.kernels.groups import survivors
from sparseforge_ds.model.branch import branches
from sparseforge_ds.model.families import BRANCH, LOW_RANK
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.zero.halo import Halo
from sparseforge_ds.zero.shard import Shard, ShardLayout

ROUNDS = 20
"""Rounds of the search; twice as many leave 2% to 3% less to remove."""
WARM_UP = 3
"""Steps of subspace iteration on what the pattern removes of W itself, which the search starts from."""


@torch.no_grad()
def decompose_into_branches(model: nn.Module, weights: ShardedWeights) -> None:
    """Take the best low-rank part of every W into its branch, and switch the branches on. Collective.

    First W <- W + B P with B and P as they are, 0 in a new branch; then W <- W - B P with new ones. The masters of W
    are not written here: publish them, and push, afterwards. W gives up what the forward will see the branch add, in
    its precision. The largest memory is that of a weight's B and P and of a bounded chunk.
    """
    added = branches(model)
    layout = weights.layout
    for name in added:
        branch_names = [f"{weights.prunable[name].module}.{which}" for which in BRANCH]
        b_OK, p_KI = (
            layout.as_forward_dtype(branch_name, layout.gather_master(branch_name)) for branch_name in branch_names
        )
        _add(weights, name, b_OK, p_KI)
    halo = weights.halo.exchange(weights.dense, added)
    for name, branch in added.items():
        weight = weights.prunable[name]
        left_RK, right_CK = _search(weights, name, halo)
        factors = [_same(layout, factor) for factor in balanced_factors(left_RK, right_CK, weight.input_axis == -1)]
        branch_names = [f"{weight.module}.{which}" for which in BRANCH]
        for branch_name, factor in zip(branch_names, factors, strict=True):
            layout.write_master(branch_name, factor)
        b_OK, p_KI = map(layout.as_forward_dtype, branch_names, factors)
        _add(weights, name, -b_OK, p_KI)
        branch.enabled = True


def _add(weights: ShardedWeights, name: str, b_OK: Tensor, p_KI: Tensor) -> None:
    """Add B P to this rank's shard of W."""
    left_RK, right_CK = (b_OK, p_KI.t()) if weights.prunable[name].input_axis == -1 else (p_KI.t(), b_OK)
    for chunk in weights.chunks([name]):
        dense = weights.dense(chunk)
        dense += _product(left_RK, right_CK, chunk.start, chunk.stop).to(dense.device)


def _search(weights: ShardedWeights, name: str, halo: Halo) -> tuple[Tensor, Tensor]:
    """Return left (R, K) with orthonormal columns and right (C, K), whose product is the low-rank part."""
    rows, columns = weights.prunable[name].shape
    rank = weights.layout.shards[f"{weights.prunable[name].module}.{LOW_RANK}"].shape[1]
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    right_CK = torch.randn(columns, rank, generator=generator).to(weights.layout.device)
    left_RK = torch.zeros(rows, rank, device=weights.layout.device)
    removed = _Removed(weights, name, halo, left_RK, torch.zeros_like(right_CK))
    for _ in range(WARM_UP):
        left_RK = _orthonormal(weights.layout, removed.times(right_CK))
        right_CK = removed.transposed_times(left_RK)
    for _ in range(ROUNDS):
        removed = _Removed(weights, name, halo, left_RK, right_CK)
        new_RK = _orthonormal(weights.layout, left_RK @ (right_CK.t() @ right_CK) + 2 * removed.times(right_CK))
        right_CK = right_CK @ (left_RK.t() @ new_RK) + 2 * removed.transposed_times(new_RK)
        left_RK = new_RK
    return left_RK, right_CK


class _Removed:
    """Entries that the pattern removes of W less a product: an (R, C) matrix, on each rank those of its shard."""

    def __init__(self, weights: ShardedWeights, name: str, halo: Halo, left_RK: Tensor, right_CK: Tensor) -> None:
        self.weights = weights
        self.name = name
        self.halo = halo
        self.left_RK = left_RK
        self.right_CK = right_CK

    def times(self, right_CK: Tensor) -> Tensor:
        """Return (R, K), the product with a (C, K) matrix, summed over the ranks."""
        sum_RK = torch.zeros_like(self.left_RK)
        for rows, entries in self._parts():
            sum_RK[rows] += entries @ right_CK
        return self.weights.layout.sum_shards(sum_RK)

    def transposed_times(self, left_RK: Tensor) -> Tensor:
        """Return (C, K), the transposed product with an (R, K) matrix, summed over the ranks."""
        sum_CK = torch.zeros_like(self.right_CK)
        for rows, entries in self._parts():
            sum_CK += entries.t() @ left_RK[rows]
        return self.weights.layout.sum_shards(sum_CK)

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of a chunk and its entries in them, 0 where it has none."""
        columns = len(self.right_CK)
        for chunk in self.weights.chunks([self.name]):
            first = chunk.start // columns
            last = -(-chunk.stop // columns)
            flat = F.pad(self._removed(chunk), (chunk.start - first * columns, last * columns - chunk.stop))
            yield slice(first, last), flat.view(-1, columns)

    def _removed(self, chunk: Shard) -> Tensor:
        """Return (numel of the chunk,) what the pattern removes; 0 where it keeps."""
        weights = self.weights
        weight = weights.prunable[self.name]
        # The rest of W in whole groups.
        with_halo = weights.halo.with_halo(chunk, weights.dense(chunk), self.halo)
        span = weights.halo.span_with_halo(chunk)
        rest = with_halo.to(self.left_RK.device) - _product(self.left_RK, self.right_CK, span.start, span.stop)
        rest_GM = weights.pattern.to_groups(rest, weight.shape, weight.input_axis)
        # Kept entries count as 0.
        removed_GM = rest_GM.masked_fill(survivors(rest_GM.square(), weights.pattern), 0)
        return weights.from_groups(chunk, removed_GM)


def _product(left_RK: Tensor, right_CK: Tensor, start: int, stop: int) -> Tensor:
    """Return (stop - start,) elements of left @ right^T, which is stored row by row."""
    columns = len(right_CK)
    first = start // columns
    last = -(-stop // columns)
    return (left_RK[first:last] @ right_CK.t()).view(-1)[start - first * columns : stop - first * columns]


def _orthonormal(layout: ShardLayout, matrix: Tensor) -> Tensor:
    return _same(layout, torch.linalg.qr(matrix).Q)


def _same(layout: ShardLayout, matrix: Tensor) -> Tensor:
    """Return rank 0's matrix on all ranks, where last bits of a factorization may differ; contiguous, as NCCL asks."""
    matrix = matrix.contiguous()
    if layout.world_size > 1:
        layout.broadcast(matrix, 0)
    return matrix


def balanced_factors(left_RK: Tensor, right_CK: Tensor, input_last: bool) -> tuple[Tensor, Tensor]:
    """Return B (out, K) and P (K, in) of the product, with its singular values shared so that both learn at one rate.

    Where one is 0 but for rounding, P has a unit vector and B is 0, as a LoRA adapter starts: else neither would learn.
    """
    u_CK, s_K, v_KK = torch.linalg.svd(right_CK, full_matrices=False)
    vanishes_K = s_K <= 1e-6 * s_K.max()
    root_of_b_K = s_K.sqrt().masked_fill(vanishes_K, 0.0)
    root_of_p_K = s_K.sqrt().masked_fill(vanishes_K, 1.0)
    left_RK = left_RK @ v_KK.t()
    output_K, input_K = (left_RK, u_CK) if input_last else (u_CK, left_RK)
    return output_K * root_of_b_K, (input_K * root_of_p_K).t()
