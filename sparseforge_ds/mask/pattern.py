"""Sparsity patterns: how the elements of a weight matrix are divided into groups, and how many of a group survive.

Legend of shape suffixes: G groups, M members of a group, N kept members.

A matrix is seen as (out, in) when the input axis is last and (in, out) when it is first (GPT-2's Conv1D). The members
of a group are neighbours along the *input* axis, because that is the axis which sparse tensor cores contract.

A *period* is the smallest run of consecutive flat elements that contains whole groups only. A shard
that starts and stops on a multiple of it can be gated without talking to any other rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

import torch
from torch import Tensor


@dataclass(frozen=True)
class _InputGroups:
    """Groups of `m` consecutive inputs, of which `n` survive."""

    n: int
    m: int

    @property
    def kept_count(self) -> int:
        """Members of a group that survive."""
        return self.n

    @property
    def members(self) -> int:
        """Members of a group."""
        return self.m

    def misfit(self, shape: tuple[int, ...], input_axis: int) -> str | None:
        """Return why `shape` cannot carry this pattern, or None when it can."""
        inputs = shape[input_axis]
        if inputs % self.m:
            return f"its input axis has {inputs} elements, not a multiple of {self.m}"
        return None

    def period(self, shape: tuple[int, ...], input_axis: int) -> int:
        """Return the elements of a period: m, or those of m rows when the input axis comes first."""
        return self.m if input_axis % len(shape) == len(shape) - 1 else self.m * shape[-1]

    def to_groups(self, flat: Tensor, shape: tuple[int, ...], input_axis: int) -> Tensor:
        """View whole periods as groups.

        Args:
            flat: (periods * period,) consecutive elements, a multiple of the period.
            shape: shape of the full weight.
            input_axis: the axis that the matmul contracts.

        Returns:
            (G, M), a view where the input axis is last and a copy otherwise.
        """
        if input_axis % len(shape) == len(shape) - 1:
            return flat.view(-1, self.m)
        return flat.view(-1, self.m, shape[-1]).transpose(1, 2).reshape(-1, self.m)

    def from_groups(self, group_GM: Tensor, shape: tuple[int, ...], input_axis: int) -> Tensor:
        """Undo `to_groups`: (G, M) -> (G * M,) in flat order."""
        if input_axis % len(shape) == len(shape) - 1:
            return group_GM.reshape(-1)
        return group_GM.view(-1, shape[-1], self.m).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class NM(_InputGroups):
    """Pattern of `n` kept in every `m` consecutive inputs (2:4 is `NM(2, 4)`); all are kept where n is m."""

    def __post_init__(self) -> None:
        if not 0 < self.n <= self.m:
            raise ValueError(f"pattern {self}: an n:m pattern needs 0 < n < m, for example 2:4")

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def pooled(self, value_GM: Tensor) -> Tensor:
        """Return the values by which members are compared: here their own."""
        return value_GM


@dataclass(frozen=True)
class Pairs(_InputGroups):
    """Pattern of `n` kept in every `m` consecutive inputs, in pairs of neighbours: 4:8 in pairs is `Pairs(4, 8)`.

    The sparse FP4 cores of Blackwell GPUs take it (CUTLASS, `sm1xx_sparse_config.inl`).
    """

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m or self.n % 2 or self.m % 2:
            raise ValueError(f"pattern {self}: pairs need even n and m, and 0 < n < m, for example 4:8 pairs")

    def __str__(self) -> str:
        return f"{self.n}:{self.m} pairs"

    def pooled(self, value_GM: Tensor) -> Tensor:
        """Return the values by which members are compared: the sum over a pair, for each of the two.

        Ties go to the lower index, so that the top N are whole pairs.
        """
        pairs = value_GM.reshape(len(value_GM), -1, 2)
        return pairs.sum(dim=2, dtype=value_GM.dtype).repeat_interleave(2, dim=1)


@dataclass(frozen=True)
class Block:
    """Pattern that keeps a `density` share of every `size` x `size` tile (the paper's block-16: `Block(16, 0.5)`)."""

    size: int
    density: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 2 or not 0.0 < self.density < 1.0:
            raise ValueError(f"pattern {self}: a block pattern needs size >= 2 and 0 < density < 1, like block16")
        is_whole = abs(self.density * self.size**2 - self.kept_count) <= 1e-9 * self.size**2
        if not is_whole or not 0 < self.kept_count < self.members:
            raise ValueError(
                f"pattern {self}: density * size^2 must be a whole number of entries, from 1 to {self.members - 1}"
            )

    def __str__(self) -> str:
        # All digits, and no exponent: `parse_pattern` reads it back.
        return f"block{self.size}:{Decimal(repr(self.density)):f}"

    @property
    def kept_count(self) -> int:
        """Members of a tile that survive."""
        return round(self.density * self.size**2)

    @property
    def members(self) -> int:
        """Members of a tile."""
        return self.size**2

    def misfit(self, shape: tuple[int, ...], input_axis: int) -> str | None:
        """Return why `shape` cannot carry this pattern, or None when it can."""
        rows, columns = shape[-2:]
        if rows % self.size or columns % self.size:
            return f"its matrix is {rows} x {columns}, not a multiple of {self.size} x {self.size}"
        return None

    def period(self, shape: tuple[int, ...], input_axis: int) -> int:
        """Return the elements of a period: those of a band of `size` rows."""
        return self.size * shape[-1]

    def to_groups(self, flat: Tensor, shape: tuple[int, ...], input_axis: int) -> Tensor:
        """Copy (bands * size * columns,) to (G, M): tiles are strided."""
        size = self.size
        columns = shape[-1]
        return flat.view(-1, size, columns // size, size).transpose(1, 2).reshape(-1, size * size)

    def from_groups(self, group_GM: Tensor, shape: tuple[int, ...], input_axis: int) -> Tensor:
        """Undo `to_groups`: (G, M) -> (G * M,) in flat order."""
        size = self.size
        columns = shape[-1]
        return group_GM.view(-1, columns // size, size, size).transpose(1, 2).reshape(-1)

    def pooled(self, value_GM: Tensor) -> Tensor:
        """Return the values by which members are compared: here their own."""
        return value_GM


Pattern = NM | Pairs | Block


def parse_pattern(text: str) -> Pattern:
    """Turn '2:4', '4:8 pairs', 'block16' or 'block16:0.5' into a pattern. The only place where patterns are text."""
    if match := re.fullmatch(r"(\d+):(\d+)( pairs)?", text):
        return (Pairs if match[3] else NM)(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"block(\d+)(?::(0?\.\d+))?", text):
        return Block(int(match[1]), float(match[2] or 0.5))
    raise ValueError(
        f"unknown pattern {text!r}: write n:m (like 2:4), n:m pairs (like 4:8 pairs) or "
        "block<size> (like block16 or block16:0.5)"
    )


def require_removing(pattern: Pattern) -> Pattern:
    """Return `pattern` unchanged; raise ValueError if it keeps everything, like 4:4."""
    if pattern.kept_count == pattern.members:
        raise ValueError(f"pattern {pattern} keeps everything; a pattern n:m needs n < m, for example 2:4")
    return pattern


def rank_in_group(group_GM: Tensor) -> Tensor:
    """Count how many members of its group beat each member; ties go to the lower index.

    A row is a permutation of 0..M-1, so that every layout and every rank decide alike. `kernels.groups` is faster.

    Args:
        group_GM: (G, M) finite values.

    Returns:
        (G, M) int64; `< n` is the group's top n.
    """
    G, M = group_GM.shape
    order_GM = torch.sort(group_GM, dim=1, descending=True, stable=True).indices
    rank_GM = torch.arange(M, device=group_GM.device).expand(G, M)
    return torch.empty_like(order_GM).scatter_(1, order_GM, rank_GM)


def top_n(group_GM: Tensor, n: int) -> Tensor:
    """Return (G, M) bool with exactly `n` True in every row: its `n` largest, ties to the lower index (eq. 6)."""
    return rank_in_group(group_GM) < n
