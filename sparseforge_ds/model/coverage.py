"""How much of a model is under a mask, what is not, and the words in which all commands report it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

_SHOWN = 12


@dataclass(frozen=True)
class Coverage:
    """How much of a model is under a mask, in elements.

    Its linear weights are all matrices that stand between the embeddings and the output head: of attention, MLPs,
    experts and routers, fused or not, whether the family table knows them or not.
    """

    masked: int
    linear: int
    total: int
    """Elements of all parameters; tied ones count once."""
    weights: int
    dense: dict[str, int] = field(hash=False)
    """Elements of the linear weights that stay dense, by pattern of their names, the most first."""

    @property
    def of_linear(self) -> float:
        """Percent of the linear weights that is under a mask."""
        return 100.0 * self.masked / self.linear

    @property
    def of_all(self) -> float:
        """Percent of all elements that is under a mask."""
        return 100.0 * self.masked / self.total

    def __str__(self) -> str:
        return describe_share(self.masked, self.linear, self.total)

    def lines(self, but: Collection[str] = ()) -> list[str]:
        """What stays dense of the linear weights, a line for every pattern of names that is not in `but`."""
        lines = [
            f"{pattern} ({count:,} elements, {percent(count, self.linear)} of the linear weights)"
            for pattern, count in self.dense.items()
            if pattern not in but
        ]
        return shorten_lines(lines)


def describe_share(masked: int, linear: int, total: int) -> str:
    """Elements under a mask, of all linear weights and of all parameters, in words."""
    where = "of the linear weights between embedding and head"
    return f"{percent(masked, linear)} {where} and {percent(masked, total)} of all parameters under a mask"


def percent(part: int, whole: int) -> str:
    """A share to one decimal, rounded down: 100.0% is all."""
    return f"{1000 * part // whole / 10:.1f}%"


def shorten_lines(lines: list[str]) -> list[str]:
    """The first lines about patterns of names, and how many more there are."""
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more patterns"] if len(lines) > _SHOWN else [])
