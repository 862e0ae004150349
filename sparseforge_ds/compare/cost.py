"""What a method's model costs at inference, relative to the dense one: of each pruned matrix, in 16 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparseforge_ds.config import SparseForgeConfig


@dataclass(frozen=True)
class Cost:
    """Of a pruned matrix; 1 is dense."""

    bytes: float
    multiplications: float
    """For a token."""
    branch: bool = False
    """Whether a low-rank branch is in them."""


DENSE = Cost(1.0, 1.0)


def inference_cost(config: SparseForgeConfig) -> Cost:
    """Kept values and their places, and B of a low-rank branch, by the config's pattern and `low_rank`.

    Places take the fewest bits of naming the members that are kept, those that are not, or a bit for every member: for
    2:4 what packed24 stores. Products with zeros are counted as skipped, sums of inputs as free.
    """
    n, m = config.parsed_pattern.kept, config.parsed_pattern.members
    places = min(m, min(n, m - n) * math.ceil(math.log2(m)))
    branch = 0.0 if config.low_rank is None else 1 / config.low_rank.k
    return Cost((16 * n + places) / (16 * m) + branch, n / m + branch, bool(branch))
