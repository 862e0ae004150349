"""Shares of a mixture as turns: which source each window of a run is of.

Weights become whole numbers, the windows that each source has in a round of `sum(parts)` windows, so that shares are
exact and nothing depends on rounding. Every window has the same number of tokens, so these are shares of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_ROUND = 2**16
"""Windows of a round, about, where weights have many digits: shares are kept to one in so many."""


def whole_parts(names: Sequence[str], weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Weights as the smallest whole numbers with the same ratios, or as the nearest in a round of about 65,536.

    Raises:
        ValueError: a source would get nothing.
    """
    whole = [int(weight * math.lcm(*(each.denominator for each in weights))) for weight in weights]
    whole = [part // math.gcd(*whole) for part in whole]
    if sum(whole) > _ROUND:
        whole = [round(Fraction(part, sum(whole)) * _ROUND) for part in whole]
    if 0 in whole:
        i = whole.index(0)
        raise ValueError(
            f"--dataset {names[i]}={float(weights[i]):g}: less than one in {_ROUND:,} of all tokens; leave it out or "
            "give it more"
        )
    return tuple(whole)


class RoundRobin:
    """Smooth weighted round-robin, as web servers divide requests; it repeats with the round.

    At any moment every source has had its share of the turns, give or take less than two.

    Args:
        parts: turns of each source in a round.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        self._parts, credit = np.asarray(parts), np.zeros(len(parts), dtype=np.int64)
        self.order = np.zeros(sum(parts), dtype=np.int16)
        """(sum(parts),) whose turn it is, in one round."""
        for turn in range(len(self.order)):
            credit += self._parts
            self.order[turn] = credit.argmax()
            credit[self.order[turn]] -= len(self.order)
        had = self.order[:, None] == np.arange(len(parts))
        self._had = np.cumsum(had, axis=0, dtype=np.int32) - had  # before each turn of a round

    def place(self, sample: int) -> tuple[int, int]:
        """Which source the `sample`-th window of the run is of, and which of its windows that is."""
        source = int(self.order[sample % len(self.order)])
        return source, self.before(sample)[source]

    def before(self, sample: int) -> list[int]:
        """Windows that each source has had before the `sample`-th of the run."""
        rounds, turn = divmod(sample, len(self.order))
        return [int(count) for count in rounds * self._parts + self._had[turn]]
