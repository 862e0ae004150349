"""A branch with a learned P at its start: a low-rank part of the weights that leaves the pattern little to remove.

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

from sparseforge_ds.mask.kernels.groups import top_n
from sparseforge_ds.methods.branch_masters import forget_moments, seen, whole, write
from sparseforge_ds.methods.sharded_weights import ShardedWeights
from sparseforge_ds.model.branch import Branch, branches
from sparseforge_ds.model.families import BRANCH, LOW_RANK
from sparseforge_ds.zero.halo import Halo
from sparseforge_ds.zero.shard import Shard, ShardLayout

ROUNDS = 20
"""Twice as many leave 2% to 3% less to remove."""
WARM_UP = 3
"""Steps of subspace iteration on what the pattern removes of W itself, which the search starts from."""


@torch.no_grad()
def decompose_into_branches(model: nn.Module, on: ShardedWeights) -> None:
    """W <- W + B P with the B and P of every branch as they are, 0 in a new one, then W <- W - B P with new ones, and
    the branches on. Collective.

    The masters of W are not written here: publish them, and push, afterwards. W gives up what the forward will see the
    branch add, in its precision. The largest memory is that of a weight's B and P and of a bounded chunk.
    """
    added, layout = branches(model), on.layout
    forget_moments(layout, [on.weights[name] for name in added])
    for name, branch in added.items():
        _add(on, name, *(_seen(on, name, branch, which, whole(layout, on.weights[name], which)) for which in BRANCH))
    halo = on.halo.exchange(on.reader(on.dense), added)
    for name, branch in added.items():
        weight = on.weights[name]
        left_RK, right_CK = _search(on, name, halo)
        value = dict(zip(BRANCH, _balanced(left_RK, right_CK, weight.input_axis == -1), strict=True))
        value = {which: _same(layout, matrix) for which, matrix in value.items()}
        for which, matrix in value.items():
            write(layout, weight, which, matrix)
        b_OK, p_KI = (_seen(on, name, branch, which, matrix) for which, matrix in value.items())
        _add(on, name, -b_OK, p_KI)
        branch.enabled = True


def _seen(on: ShardedWeights, name: str, branch: Branch, which: str, value: Tensor) -> Tensor:
    return seen(on.layout, on.weights[name], which, branch, value)


def _add(on: ShardedWeights, name: str, b_OK: Tensor, p_KI: Tensor) -> None:
    """W <- W + B P, of this rank's shard."""
    left_RK, right_CK = (b_OK, p_KI.t()) if on.weights[name].input_axis == -1 else (p_KI.t(), b_OK)
    for chunk in on.chunks([name]):
        dense = on.dense(chunk)
        dense += _product(left_RK, right_CK, chunk.start, chunk.stop).to(dense.device)


def _search(on: ShardedWeights, name: str, halo: Halo) -> tuple[Tensor, Tensor]:
    """left (R, K) with orthonormal columns and right (C, K), on the layout's device, whose product is the part."""
    rows, columns = on.weights[name].shape
    rank = on.layout.shards[f"{on.weights[name].module}.{LOW_RANK}"].shape[1]
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    right_CK = torch.randn(columns, rank, generator=generator).to(on.layout.device)
    left_RK = torch.zeros(rows, rank, device=on.layout.device)
    removed = _Removed(on, name, halo, left_RK, torch.zeros_like(right_CK))
    for _ in range(WARM_UP):
        left_RK = _orthonormal(on.layout, removed.times(right_CK))
        right_CK = removed.transposed_times(left_RK)
    for _ in range(ROUNDS):
        removed = _Removed(on, name, halo, left_RK, right_CK)
        new_RK = _orthonormal(on.layout, left_RK @ (right_CK.t() @ right_CK) + 2 * removed.times(right_CK))
        right_CK = right_CK @ (left_RK.t() @ new_RK) + 2 * removed.transposed_times(new_RK)
        left_RK = new_RK
    return left_RK, right_CK


class _Removed:
    """What the pattern removes of W less a product, a (R, C) matrix of which this rank has the entries of its shard."""

    def __init__(self, on: ShardedWeights, name: str, halo: Halo, left_RK: Tensor, right_CK: Tensor) -> None:
        self.on = on
        self.name = name
        self.halo = halo
        self.left_RK = left_RK
        self.right_CK = right_CK

    def times(self, right_CK: Tensor) -> Tensor:
        """(R, K), summed over the ranks."""
        sum_RK = torch.zeros_like(self.left_RK)
        for rows, part in self._parts():
            sum_RK[rows] += part @ right_CK
        return self.on.layout.sum_shards(sum_RK)

    def transposed_times(self, left_RK: Tensor) -> Tensor:
        """(C, K), summed over the ranks."""
        sum_CK = torch.zeros_like(self.right_CK)
        for rows, part in self._parts():
            sum_CK += part.t() @ left_RK[rows]
        return self.on.layout.sum_shards(sum_CK)

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a chunk and its entries in them, 0 where it has none."""
        columns = len(self.right_CK)
        for chunk in self.on.chunks([self.name]):
            first, last = chunk.start // columns, -(-chunk.stop // columns)
            flat = F.pad(self._of(chunk), (chunk.start - first * columns, last * columns - chunk.stop))
            yield slice(first, last), flat.view(-1, columns)

    def _of(self, chunk: Shard) -> Tensor:
        """(numel of the chunk,) what the pattern removes; 0 where it keeps."""
        edges, weight, pattern = self.on.halo, self.on.weights[self.name], self.on.pattern
        wide, where = edges.with_halo(chunk, self.on.dense(chunk), self.halo), edges.span_with_halo(chunk)
        rest = wide.to(self.left_RK.device) - _product(self.left_RK, self.right_CK, where.start, where.stop)
        rest_GM = pattern.to_groups(rest, weight.shape, weight.input_axis)
        removed_GM = rest_GM.masked_fill(top_n(rest_GM.abs(), pattern.kept), 0)
        return edges.without_halo(chunk, pattern.from_groups(removed_GM, weight.shape, weight.input_axis))


def _product(left_RK: Tensor, right_CK: Tensor, start: int, stop: int) -> Tensor:
    """(stop - start,) elements of left @ right^T, which is stored row by row."""
    columns = len(right_CK)
    first, last = start // columns, -(-stop // columns)
    return (left_RK[first:last] @ right_CK.t()).view(-1)[start - first * columns : stop - first * columns]


def _orthonormal(layout: ShardLayout, matrix: Tensor) -> Tensor:
    return _same(layout, torch.linalg.qr(matrix).Q)


def _same(layout: ShardLayout, matrix: Tensor) -> Tensor:
    """The same on all ranks, where the last bits of a factorization may differ, and contiguous, as NCCL asks."""
    matrix = matrix.contiguous()
    if layout.world_size > 1:
        layout.broadcast(matrix, 0)
    return matrix


def _balanced(left_RK: Tensor, right_CK: Tensor, input_last: bool) -> tuple[Tensor, Tensor]:
    """B (out, K) and P (K, in) of the product, with its singular values shared between both, so that both learn at one
    rate. Where one is 0 but for rounding, P has a unit vector and B is 0, as a LoRA adapter starts: else neither would
    learn."""
    u_CK, s_K, v_KK = torch.linalg.svd(right_CK, full_matrices=False)
    vanishes_K = s_K <= 1e-6 * s_K.max()
    root_K, of_p_K = s_K.sqrt().masked_fill(vanishes_K, 0.0), s_K.sqrt().masked_fill(vanishes_K, 1.0)
    left_RK = left_RK @ v_KK.t()
    return (left_RK * root_K, (u_CK * of_p_K).t()) if input_last else (u_CK * root_K, (left_RK * of_p_K).t())
