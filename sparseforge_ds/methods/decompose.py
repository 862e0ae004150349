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

from sparseforge_ds.mask.pattern import top_n
from sparseforge_ds.methods.sharded_weights import ShardedWeights
from sparseforge_ds.model.branch import Branch, branches
from sparseforge_ds.model.family_table import LOW_RANK, PROJECTION
from sparseforge_ds.zero.halo import Halo
from sparseforge_ds.zero.shard import Shard

ROUNDS = 20
"""Twice as many leave 2% to 3% less to remove."""
WARM_UP = 3
"""Steps of subspace iteration on what the pattern removes of W itself, which the search starts from."""


@torch.no_grad()
def decompose_into_branches(model: nn.Module, on: ShardedWeights) -> None:
    """W <- W - B P with the B and P of every branch, which were 0, and the branches on. Collective.

    The masters of W are not written here: publish them, and push, afterwards. W gives up what the forward will see the
    branch add, in its precision. The largest memory is that of a weight's B and P and of a bounded chunk.
    """
    added = branches(model)
    halo = on.edges.exchange(on.reader(on.dense), added)
    for name, branch in added.items():
        left_RK, right_CK = _balanced(*_search(on, name, halo))
        input_last = on.weights[name].input_axis == -1
        b_OK, p_KI = (left_RK, right_CK.t()) if input_last else (right_CK, left_RK.t())
        b_OK, p_KI = _write(on, name, branch, LOW_RANK, b_OK), _write(on, name, branch, PROJECTION, p_KI)
        left_RK, right_CK = (b_OK, p_KI.t()) if input_last else (p_KI.t(), b_OK)
        for chunk in on.chunks([name]):
            dense = on.dense(chunk)
            dense -= _product(left_RK, right_CK, chunk.start, chunk.stop).to(dense.device)
        branch.enabled = True


def _search(on: ShardedWeights, name: str, halo: Halo) -> tuple[Tensor, Tensor]:
    """left (R, K) with orthonormal columns and right (C, K), on the layout's device, whose product is the part."""
    rows, columns = on.weights[name].shape
    rank = _rank(on, name)
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    right_CK = torch.randn(columns, rank, generator=generator).to(on.layout.device)
    left_RK = torch.zeros(rows, rank, device=on.layout.device)
    removed = _Removed(on, name, halo, left_RK, torch.zeros_like(right_CK))
    for _ in range(WARM_UP):
        left_RK = _orthonormal(removed.times(right_CK))
        right_CK = removed.transposed_times(left_RK)
    for _ in range(ROUNDS):
        removed = _Removed(on, name, halo, left_RK, right_CK)
        new_RK = _orthonormal(left_RK @ (right_CK.t() @ right_CK) + 2 * removed.times(right_CK))
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
        edges, weight, pattern = self.on.edges, self.on.weights[self.name], self.on.pattern
        wide, where = edges.widen(chunk, self.on.dense(chunk), self.halo), edges.widened(chunk)
        rest = wide.to(self.left_RK.device) - _product(self.left_RK, self.right_CK, where.start, where.stop)
        rest_GM = pattern.to_groups(rest, weight.shape, weight.input_axis)
        removed_GM = rest_GM.masked_fill(top_n(rest_GM.abs(), pattern.kept), 0)
        return edges.own(chunk, pattern.from_groups(removed_GM, weight.shape, weight.input_axis))


def _product(left_RK: Tensor, right_CK: Tensor, start: int, stop: int) -> Tensor:
    """(stop - start,) elements of left @ right^T, which is stored row by row."""
    columns = len(right_CK)
    first, last = start // columns, -(-stop // columns)
    return (left_RK[first:last] @ right_CK.t()).view(-1)[start - first * columns : stop - first * columns]


def _orthonormal(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix).Q


def _balanced(left_RK: Tensor, right_CK: Tensor) -> tuple[Tensor, Tensor]:
    """The same product, with the singular values shared between both, so that both learn at one rate."""
    u, s, v = torch.linalg.svd(right_CK, full_matrices=False)
    return left_RK @ v.t() * s.sqrt(), u * s.sqrt()


def _rank(on: ShardedWeights, name: str) -> int:
    return on.layout.shards[f"{on.weights[name].module}.{LOW_RANK}"].shape[1]


def _write(on: ShardedWeights, name: str, branch: Branch, which: str, value: Tensor) -> Tensor:
    """Set the masters of B or P, whole on every rank; returns in fp32 what the forward will see of it."""
    layout = on.layout
    own = layout.shards[f"{on.weights[name].module}.{which}"]
    master = own.of(layout.flats[own.flat].data)
    master.copy_(value.reshape(-1)[own.start : own.stop])
    return value.to(master.dtype).to(getattr(branch, which).dtype).float()
