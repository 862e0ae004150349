"""Which pattern does a matrix of unknown origin satisfy, and along which axis? One pass, no guess about the model.

Looked for, the strictest first: 1:8, 1:4, 2:8, 1:2, 2:4, 4:8 along the last axis (in features of nn.Linear) and along
the last but one (GPT-2's Conv1D), then block16. A matrix that is none of these is dense, whatever zeros it has.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.checkpoint.folder import read_json
from sparseforge_ds.export.bits import chunk_size, members_left, nonzero
from sparseforge_ds.export.stored import StoredWeights
from sparseforge_ds.export.workers import each
from sparseforge_ds.mask.pattern import NM, Block, Pattern

PATTERNS: tuple[Pattern, ...] = (NM(1, 8), NM(1, 4), NM(2, 8), NM(1, 2), NM(2, 4), NM(4, 8), Block(16))
"""The strictest first."""

_LAYER = re.compile(r"\.\d+\.")
_ROWS = 16


@dataclass(frozen=True)
class Held:
    """A pattern, and the axis along which its groups lie."""

    pattern: Pattern
    axis: int

    def __str__(self) -> str:
        return str(self.pattern) if isinstance(self.pattern, Block) else f"{self.pattern} along axis {self.axis}"


@dataclass(frozen=True)
class MatrixFound:
    """One matrix, or the matrices of all experts."""

    name: str
    shape: tuple[int, ...]
    held: tuple[Held, ...]
    """All patterns that it satisfies, the strictest first; empty for a dense one."""
    zero: bool
    """Nothing in it: it satisfies everything and says nothing."""

    @property
    def in_layer(self) -> bool:
        """Of a numbered layer: what is pruned, if anything is; embeddings and heads are not."""
        return _LAYER.search(self.name) is not None

    def __str__(self) -> str:
        return "zero" if self.zero else str(self.held[0]) if self.held else "dense"


@dataclass(frozen=True)
class PatternsFound:
    """All matrices of a folder."""

    matrices: list[MatrixFound]

    @property
    def common(self) -> Held | None:
        """The strictest pattern, along one axis, that all matrices of numbered layers satisfy."""
        looked_at = [matrix for matrix in self.matrices if matrix.in_layer and not matrix.zero]
        if not looked_at:
            return None
        return next((held for held in looked_at[0].held if all(held in other.held for other in looked_at)), None)

    @property
    def ok(self) -> bool:
        """Whether there is such a pattern."""
        return self.common is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        common = self.common
        rows = [
            {
                "name": m.name,
                "shape": list(m.shape),
                "in_layer": m.in_layer,
                "found": str(m),
                "held": [*map(str, m.held)],
            }
            for m in self.matrices
        ]
        return {"ok": self.ok, "pattern": None if common is None else str(common), "matrices": rows}


def layer_matrices(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Matrices (or matrices of all experts) of numbered layers: what is pruned, if anything is."""
    return [name for name, shape in shapes.items() if len(shape) in (2, 3) and _LAYER.search(name)]


def find_patterns(folder: str | Path, workers: int = 1, progress: bool = False) -> PatternsFound:
    """Look at every floating-point matrix of a Hugging Face folder.

    Raises:
        ValueError: the folder cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a model")
    weights = StoredWeights(folder, read_json(folder / "config.json"))
    specs = {n: s for n, s in weights.specs.items() if len(s.shape) in (2, 3) and s.dtype.is_floating_point}
    total = sum(spec.nbytes for spec in specs.values())
    bar = tqdm(total=total, unit="B", unit_scale=True, disable=not progress, file=sys.stderr)

    def look(name: str) -> MatrixFound:
        shape = specs[name].shape
        found = look_at(weights.stream(name, _band(shape)), shape, name)
        bar.update(specs[name].nbytes)
        return found

    with bar:
        return PatternsFound(each(look, specs, workers))


def look_at(chunks: Iterable[Tensor], shape: tuple[int, ...], name: str) -> MatrixFound:
    """The patterns of one (rows, columns) matrix, or of (experts, rows, columns) together.

    Args:
        chunks: its consecutive elements, each of `_band(shape)`. No more are asked for than can change the answer.
    """
    rows, columns = shape[-2:]
    held = [
        Held(pattern, axis)
        for pattern in PATTERNS
        for axis in ((-1, -2) if isinstance(pattern, NM) else (-1,))
        if math.prod(shape) and pattern.misfit((rows, columns), axis) is None
    ]
    zero = True
    for chunk in chunks:
        left, _ = nonzero(chunk)
        zero = zero and not bool(left.any())
        band = tuple(left.view(-1, columns).shape)
        held = [one for one in held if int(members_left(left, one.pattern, band, one.axis).max()) <= one.pattern.kept]
        if not held and not zero:
            break
    return MatrixFound(name, shape, tuple(held), zero)


def _band(shape: tuple[int, ...]) -> int:
    """About `CHUNK` elements: rows that hold whole groups of every pattern, along both axes."""
    return max(1, chunk_size(_ROWS * shape[-1]))
