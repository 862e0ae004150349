"""Linear weights that nobody has decided about: no row of the family table, and none of the user's globs names them.

A little of that stays dense and is said on the screen. More than `TOLERANCE` of the linear weights is an error, before
a weight is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass

from sparseforge_ds.model.coverage import shorten_lines
from sparseforge_ds.model.rules import name_pattern

TOLERANCE = 0.02
"""Share of the elements of linear weights that may be uncovered."""


@dataclass(frozen=True)
class Uncovered:
    """The undecided weights of one model."""

    model_type: str
    shapes: dict[str, tuple[int, ...]]
    linear: int
    """Elements of all linear weights that the table does not keep dense, these included."""
    layers: Collection[str] | None = None
    """Of a family that the table does not have, what `include` can prune, as far as the pattern fits it."""
    include: tuple[str, ...] = ()
    allow_dense: tuple[str, ...] = ()
    """What it, or `--allow_dense`, allows already, as far as that names something undecided."""
    unneeded: tuple[str, ...] = ()
    """Lines about globs of `allow_dense` that name nothing undecided."""

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
        """Raise where it is too much. More than `TOLERANCE` is."""
        if self.share <= TOLERANCE:
            return
        raise ValueError(
            f"{self.share:.1%} of the linear weights of this {self.model_type} model are not covered: "
            + (self._no_rows() if self.layers is not None else self._no_row())
            + "".join(f"; allow_dense {line}" for line in self.unneeded)
        )

    def _no_row(self) -> str:
        lines = self.lines()
        patterns = [line.partition(" (")[0] for line in lines]
        return (
            f"the family table has no row for {'; '.join(shorten_lines(lines))}. To keep them dense, write into the "
            f"sparseforge block: {self._allowing(patterns)} (or give --allow_dense); to prune them, give the family "
            "rows by sparseforge_ds.register_family"
        )

    def proposal(self) -> tuple[list[str], list[str]]:
        """Globs that decide about all of it in a family that the table does not have: to prune, and to keep dense.

        Of numbered layers, everything is pruned that can be, but routers; nothing where `include` has chosen already.
        """
        assert self.layers is not None
        able = [name for name in self.layers if name in self.shapes and name_pattern(name) != name]
        chosen = [] if self.include else [name for name in able if not _routes(name)]
        # A pattern of names stands for all its weights: where one of them cannot be pruned, none is.
        rest = dict.fromkeys(name_pattern(name) for name in self.shapes if name not in chosen)
        pruned = dict.fromkeys(name_pattern(name) for name in chosen)
        return [pattern for pattern in pruned if pattern not in rest], list(rest)

    def _no_rows(self) -> str:
        pruned, rest = self.proposal()
        block = [f'"include": {json.dumps(pruned)}'] if pruned else []
        block += [self._allowing(rest)] if rest else []
        elements = sum(math.prod(shape) for name, shape in self.shapes.items() if name_pattern(name) in pruned)
        what = "keep the others dense"
        if pruned:
            what = f"prune {elements / max(1, self.linear):.1%} of them, less what you move to allow_dense"
        return (
            f"the family table has no rows for {self.model_type!r}. Give --any_family, or paste what it stands for "
            f"into the sparseforge block to {what}: " + ", ".join(block)
        )

    def _allowing(self, patterns: list[str]) -> str:
        return f'"allow_dense": {json.dumps(list(dict.fromkeys((*self.allow_dense, *patterns))))}'


_DECAYS = {"in_proj_a", "in_proj_b", "in_proj_ba"}
"""What linear attention calls the projections that say how fast its state fades and how much enters it."""


def _routes(name: str) -> bool:
    """Whether a layer is a router or a part of one, a gate over whole outputs, or decides how a state fades: those are
    small and delicate. An indexer, which chooses the tokens that attention sees, has no gradient besides."""
    *above, layer, _ = name.split(".")
    if layer in _DECAYS or layer.endswith("_gate"):
        return True
    return not {"gate", "router", "indexer"}.isdisjoint((*above, layer))
