"""Shares of a mixture as turns: the source that each window of a run comes from.

Shares become whole numbers of windows, which each source has in a round. So they are exact, and nothing depends on
rounding. All windows have the same number of tokens, so these are shares of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_ROUND = 2**16
"""Largest number of windows in a round, about. Shares with many digits are rounded to one in so many."""


def integer_shares(values: Sequence[str], shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the smallest whole numbers with the ratios of `shares`, or the nearest that add up to about 65,536.

    Args:
        values: values of `--dataset`, for the error.
        shares: shares in them.

    Raises:
        ValueError: a source would get nothing.
    """
    denominator = math.lcm(*(share.denominator for share in shares))
    integers = [int(share * denominator) for share in shares]
    integers = [integer // math.gcd(*integers) for integer in integers]
    if sum(integers) > _ROUND:
        integers = [round(Fraction(integer, sum(integers)) * _ROUND) for integer in integers]
    if 0 in integers:
        value = values[integers.index(0)]
        raise ValueError(f"--dataset {value}: less than one in {_ROUND:,} of all tokens; leave it out or give it more")
    return tuple(integers)


class RoundRobin:
    """Smooth weighted round-robin over sources, as web servers divide requests; it repeats with the round.

    After any number of turns each source has had its share of them, give or take less than two.

    Args:
        turns: turns of each source in a round.
    """

    def __init__(self, turns: Sequence[int]) -> None:
        self._turns = np.asarray(turns)
        self.order = np.zeros(sum(turns), dtype=np.int16)
        """(sum(turns),) source of each turn of a round."""
        # Every source gains its turns as credit; the one with the most has the turn, and pays for a round.
        credit = np.zeros(len(turns), dtype=np.int64)
        for turn in range(len(self.order)):
            credit += self._turns
            self.order[turn] = credit.argmax()
            credit[self.order[turn]] -= len(self.order)
        has_turn = self.order[:, None] == np.arange(len(turns))
        self._turns_before = np.cumsum(has_turn, axis=0, dtype=np.int32) - has_turn
        """(turns, sources) turns that a source has had before each turn of a round."""

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the source of the run's window `sample`, and the index of the window within that source."""
        source = int(self.order[sample % len(self.order)])
        return source, self.counts_before(sample)[source]

    def counts_before(self, sample: int) -> list[int]:
        """Return the windows that each source has had before the run's window `sample`."""
        rounds, turn = divmod(sample, len(self.order))
        return [int(count) for count in rounds * self._turns + self._turns_before[turn]]
