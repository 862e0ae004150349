"""Coverage of a model: the share that is under a mask, the rest by name, and the wording that all commands share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

_SHOWN = 12
"""Most patterns of names in one message."""


@dataclass(frozen=True)
class Coverage:
    """Elements of a model under a mask, beside those of its linear weights and of all parameters.

    Linear weights are all matrices between the embeddings and the output head: those of attention, MLPs, experts and
    routers, fused or not, in the family table or not.
    """

    masked: int
    """Elements under a mask."""
    linear: int
    """Elements of all linear weights."""
    total: int
    """Elements of all parameters; tied ones count once."""
    weights: int
    """Number of weights under a mask."""
    dense: dict[str, int] = field(hash=False)
    """Elements of the linear weights that stay dense, by pattern of their names, the most first."""

    def __str__(self) -> str:
        return describe_share(self.masked, self.linear, self.total)

    def lines(self, but: Collection[str] = ()) -> list[str]:
        """Describe the linear weights that stay dense: a line for each pattern of names that is not in `but`."""
        lines = [
            f"{pattern} ({count:,} elements, {percent(count, self.linear)} of the linear weights)"
            for pattern, count in self.dense.items()
            if pattern not in but
        ]
        return shorten_lines(lines)


def describe_share(masked: int, linear: int, total: int) -> str:
    """Describe the share of elements under a mask; the arguments are the fields of `Coverage`."""
    where = "of the linear weights between embedding and head"
    return f"{percent(masked, linear)} {where} and {percent(masked, total)} of all parameters under a mask"


def percent(part: int, total: int) -> str:
    """Format a share to one decimal, rounded down, so that 100.0% means all."""
    return f"{1000 * part // total / 10:.1f}%"


def shorten_lines(lines: list[str]) -> list[str]:
    """Keep the first lines about patterns of names, and add the number of the others."""
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more patterns"] if len(lines) > _SHOWN else [])
