"""Linear weights that nobody has decided about: no row of the family table, and none of the user's globs names them.

A little of that stays dense and is said on the screen. More than `TOLERANCE` of the linear weights is an error, before
a weight is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

TOLERANCE = 0.02
"""Share of the elements of linear weights that may be uncovered."""

_SHOWN = 12


@dataclass(frozen=True)
class Uncovered:
    """The undecided weights of one model."""

    model_type: str
    shapes: dict[str, tuple[int, ...]]
    """Full shape of each, by name."""
    linear: int
    """Elements of all linear weights that the table does not keep dense, these included."""
    known: tuple[str, ...]
    """Families that the table has."""
    layers: Collection[str] = ()
    """The linear layers of a family that it does not have, which `include` can prune."""

    @property
    def share(self) -> float:
        """Of the elements of linear weights."""
        return sum(map(math.prod, self.shapes.values())) / max(1, self.linear)

    def lines(self) -> list[str]:
        """A line for every pattern of names, with how many weights there are, their elements and share."""
        groups: dict[str, list[tuple[int, ...]]] = {}
        for name, shape in self.shapes.items():
            groups.setdefault(name_pattern(name), []).append(shape)
        sizes = {pattern: sum(map(math.prod, shapes)) for pattern, shapes in groups.items()}
        return [
            f"{pattern} ({len(shapes)} of shape {shapes[0]}{' and others' * (len(set(shapes)) > 1)}, "
            f"{sizes[pattern]:,} elements, {sizes[pattern] / max(1, self.linear):.1%})"
            for pattern, shapes in sorted(groups.items(), key=lambda item: -sizes[item[0]])
        ]

    def check(self) -> None:
        """Raise where it is too much.

        Raises:
            ValueError: more than `TOLERANCE`.
        """
        if self.share <= TOLERANCE:
            return
        lines = self.lines()
        more = f"; and {len(lines) - _SHOWN} more patterns" if len(lines) > _SHOWN else ""
        known = self.model_type in self.known
        why = "no row" if known else f"no rows for {self.model_type!r} (it has {', '.join(self.known)})"
        patterns = [line.partition(" (")[0] for line in lines]
        first = patterns[0]
        layers = {name_pattern(name) for name in self.layers}
        layer = next((pattern for pattern in patterns if pattern in layers), None)
        prune = f'prune linear layers by naming them, like "include": ["{layer}"] in the block; ' if layer else ""
        raise ValueError(
            f"{self.share:.1%} of the linear weights of this {self.model_type} model are not covered: the family table "
            f"has {why} for {'; '.join(lines[:_SHOWN])}{more}. To go on, {prune}name what is to stay dense with "
            f"--allow_dense '{first}' (\"allow_dense\" in the sparseforge block), or add rows to "
            "sparseforge_ds/model/family_table.py"
        )


def name_pattern(name: str) -> str:
    """A weight's name with every number in it left open."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
