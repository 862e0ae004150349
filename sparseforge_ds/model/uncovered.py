"""Linear weights that nobody has decided about: neither a row of the family table nor a glob of the user names them.

A few of them stay dense, and the screen says so. More than `TOLERANCE` of all linear weights is an error, before any
weight is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass

from sparseforge_ds.model.coverage import percent, shorten_lines
from sparseforge_ds.model.rules import name_pattern

TOLERANCE = 0.02
"""Share of the elements of linear weights that may be uncovered."""


@dataclass(frozen=True)
class Uncovered:
    """Undecided weights of one model."""

    model_type: str
    shapes: dict[str, tuple[int, ...]]
    """Shape of each undecided weight, by name."""
    linear: int
    """Elements of all linear weights that the table does not keep dense, with the undecided ones."""
    layers: Collection[str] | None = None
    """Weights that `include` could prune and the pattern fits, in a family without rows; None in one with rows."""
    include: tuple[str, ...] = ()
    """The user's globs."""
    allow_dense: tuple[str, ...] = ()
    """The user's globs, without the unneeded ones."""
    unneeded: tuple[str, ...] = ()
    """Lines about globs of `allow_dense` that name nothing undecided."""

    @property
    def share(self) -> float:
        """Share of the elements of linear weights that is undecided."""
        return self._elements / max(1, self.linear)

    @property
    def _elements(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def lines(self) -> list[str]:
        """Describe the undecided weights: a line for every pattern of names, with count, elements and share."""
        shapes_of_pattern: dict[str, list[tuple[int, ...]]] = {}
        for name, shape in self.shapes.items():
            shapes_of_pattern.setdefault(name_pattern(name), []).append(shape)
        sizes = {pattern: sum(map(math.prod, shapes)) for pattern, shapes in shapes_of_pattern.items()}
        return [
            f"{pattern} ({len(shapes)} of shape {shapes[0]}{' and others' * (len(set(shapes)) > 1)}, "
            f"{sizes[pattern]:,} elements, {percent(sizes[pattern], self.linear)})"
            for pattern, shapes in sorted(shapes_of_pattern.items(), key=lambda item: -sizes[item[0]])
        ]

    def check(self) -> None:
        """Raise ValueError if more than `TOLERANCE` of the linear weights is undecided."""
        if self.share <= TOLERANCE:
            return
        advice, block = (self._advice_with_rows(), "") if self.layers is None else self._advice_without_rows()
        raise ValueError(
            f"{percent(self._elements, self.linear)} of the linear weights of this {self.model_type} model are not "
            f"covered: {advice}" + "".join(f"; allow_dense {line}" for line in self.unneeded) + block
        )

    def _advice_with_rows(self) -> str:
        """Say which weights a family's rows leave out, and how to decide about them."""
        lines = self.lines()
        patterns = [line.partition(" (")[0] for line in lines]
        return (
            f"the family table has no row for {'; '.join(shorten_lines(lines))}. To keep them dense, write into the "
            f"sparseforge block: {self._allowing(patterns)} (or give --allow_dense); to prune them, give the family "
            "rows by sparseforge_ds.register_family"
        )

    def proposal(self) -> tuple[list[str], list[str]]:
        """Propose globs that decide about all undecided weights of a family without rows.

        Everything in numbered layers that can be pruned is proposed, but for routers. Nothing is if `include` is set.

        Returns:
            Globs of the weights to prune, and globs of those to keep dense.
        """
        assert self.layers is not None
        able = [name for name in self.layers if name in self.shapes and name_pattern(name) != name]
        chosen = [] if self.include else [name for name in able if not _is_delicate(name)]
        # A pattern of names stands for all its weights: if one of them cannot be pruned, none is.
        rest = dict.fromkeys(name_pattern(name) for name in self.shapes if name not in chosen)
        pruned = dict.fromkeys(name_pattern(name) for name in chosen)
        return [pattern for pattern in pruned if pattern not in rest], list(rest)

    def _advice_without_rows(self) -> tuple[str, str]:
        """Return advice for a family without rows, and the JSON to paste, each key on a line of its own."""
        pruned, rest = self.proposal()
        block = [f'"include": {json.dumps(pruned)}'] if pruned else []
        block += [self._allowing(rest)] if rest else []
        elements = sum(math.prod(shape) for name, shape in self.shapes.items() if name_pattern(name) in pruned)
        effect = "keep the undecided weights dense"
        if pruned:
            share = percent(elements, self.linear)
            effect = f"prune {share} of the linear weights; move to allow_dense what should stay dense"
        advice = (
            f"the family table has no rows for {self.model_type!r}. Give --any_family, or paste what it stands for "
            f"into the sparseforge block. These globs {effect}"
        )
        return advice, "\n" + ",\n".join(block)

    def _allowing(self, patterns: list[str]) -> str:
        """Return the line `"allow_dense": [...]` with these patterns added."""
        return f'"allow_dense": {json.dumps(list(dict.fromkeys((*self.allow_dense, *patterns))))}'


_DECAYS = {"in_proj_a", "in_proj_b", "in_proj_ba"}
"""Names of the projections of linear attention that decide how fast its state fades and how much enters it."""


def _is_delicate(name: str) -> bool:
    """Return True for layers that are small and delicate: routers, gates over whole outputs, decays of a state.

    An indexer, which chooses the tokens that attention sees, is one, and has no gradient.
    """
    *above, layer, _ = name.split(".")
    if layer in _DECAYS or layer.endswith("_gate"):
        return True
    return not {"gate", "router", "indexer"}.isdisjoint((*above, layer))
