"""Several sources of text with weights: what `--dataset A=0.7 B=0.3` means.

Weights are shares of the tokens that the run reads. They become whole numbers, the windows that each source has in a
round of `sum(parts)` windows, so that shares are exact and nothing depends on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from sparseforge_ds.config.arguments import SampleBy
from sparseforge_ds.data.documents import STREAM, Documents, Stream, find_documents
from sparseforge_ds.data.formats import is_plain_text
from sparseforge_ds.data.hub import HubStream

_ROUND = 2**16
"""Windows of a round, at most: shares are kept to one in so many."""


@dataclass(frozen=True)
class Mixture:
    """At least two sources, and how many windows of a round each of them has."""

    sources: tuple[Documents | Stream, ...]
    parts: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the banner calls it."""
        return f"mixture of {len(self.sources)} sources"

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the tokens of every source; they add up to 1."""
        return tuple(part / sum(self.parts) for part in self.parts)


def find_text(
    dataset: Sequence[str], text_field: str, split: str = "train", sample_by: SampleBy = "document"
) -> Documents | Stream | Mixture:
    """The text of a run: one source, or a mixture of several.

    Args:
        dataset: the values of `--dataset`, each a source or source=weight.
        text_field: field of a record that holds the text.
        split: split of a folder or hub dataset, or several, joined by +.
        sample_by: what is a document of a .txt file.

    Raises:
        ValueError: a source or file cannot be used or comes twice, a weight is missing or no number above 0, or there
            is no .txt file to divide.
    """
    pairs = [_split(value) for value in dataset]
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--dataset {twice[0]}: is named {names.count(twice[0])} times; name it once, with one weight")
    unweighted = [name for name, weight in pairs if weight is None]
    if unweighted and len(unweighted) < len(pairs):
        raise ValueError(
            f"--dataset {unweighted[0]}: has no weight, others have; give all or none, like {unweighted[0]}=0.3 "
            "(without any, all have the same)"
        )
    parts = whole_parts(names, [Fraction(1) if weight is None else weight for _, weight in pairs])
    sources = tuple(find_documents(name, text_field, split, sample_by) for name in names)
    _check_files(sources)
    if sample_by != "document" and not any(map(_may_have_plain_text, sources)):
        raise ValueError(
            f"--sample_by {sample_by}: it divides .txt files, and --dataset {' '.join(names)} has none; leave it out"
        )
    return sources[0] if len(sources) == 1 else Mixture(sources, parts)


def file_lines(source: Documents | Stream) -> list[str]:
    """Which files a source reads, and what a .txt file is to it; nothing of one that has no files here."""
    files = getattr(source, "files", None)
    if files is None:
        return []
    lines = [files.line()]
    if source.facts["--sample_by"] == "document" and any(map(is_plain_text, files.names)):
        lines.append("a .txt file is one document; --sample_by paragraph or line divides it")
    return lines


def whole_parts(names: Sequence[str], weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Weights as the smallest whole numbers with the same ratios, or the nearest that add up to 65,536.

    Raises:
        ValueError: a source would get nothing.
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    total = sum(whole) // math.gcd(*whole)
    if total <= _ROUND:
        return tuple(part // math.gcd(*whole) for part in whole)
    exact = [Fraction(part, sum(whole)) * _ROUND for part in whole]
    parts = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_rest[: _ROUND - sum(parts)]:
        parts[i] += 1
    if 0 in parts:
        i = parts.index(0)
        raise ValueError(
            f"--dataset {names[i]}={float(weights[i]):g}: less than one in {_ROUND:,} of all tokens; leave it out or "
            "give it more"
        )
    return tuple(parts)


def _check_files(sources: Sequence[Documents | Stream]) -> None:
    owners: dict[Path, str] = {}
    for source in sources:
        files = getattr(source, "files", None)  # a hub dataset has none here
        for path in {path.resolve() for path in files.paths} if files is not None else ():
            if path in owners:
                raise ValueError(
                    f"--dataset {owners[path]} and {source.name}: both read {path}; name it once, with one weight"
                )
            owners[path] = source.name


def _may_have_plain_text(source: Documents | Stream) -> bool:
    files = getattr(source, "files", None)
    return isinstance(source, HubStream) if files is None else any(map(is_plain_text, files.names))


def _split(value: str) -> tuple[str, Fraction | None]:
    """Source and weight. What exists under the whole name has no weight: folders may be called date=2024."""
    name, sign, weight = value.rpartition("=")
    if not sign or Path(value.removeprefix(STREAM)).exists():
        return value, None
    try:
        number = Fraction(weight)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if number <= 0 or not name:
        raise ValueError(f"--dataset {value}: {weight!r} is no weight; use SOURCE=NUMBER with a number > 0, like 0.3")
    return name, number
