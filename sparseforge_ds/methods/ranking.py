"""Standardized scores (design eqs. 3 and 4), for methods that rank by a measured importance."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.mask.factored import vanishes
from sparseforge_ds.mask.importance import MOMENTS, magnitude_moments, scalings
from sparseforge_ds.mask.kernels.scores import Curvature, RankOne, score_moments, standardized_score
from sparseforge_ds.methods.curvature_mean import NO_GRADIENT, CurvatureMean
from sparseforge_ds.methods.sharded_weights import DivergedError, ForgeError
from sparseforge_ds.zero.halo import Span
from sparseforge_ds.zero.matrices import Matrices
from sparseforge_ds.zero.shard import Shard

_LOG = logging.getLogger(__name__)


class Scoring:
    """What scores are made of, matrix by matrix."""

    def __init__(self, matrices: Matrices) -> None:
        self.matrices = matrices
        self.scaling: Tensor = matrices.table(3)
        """(matrices, 3) fp64, see `scalings`."""
        self.factors: list[tuple[Tensor, Tensor]] = []
        """Of the curvature of every matrix, where it is a product."""
        self.by_magnitude: set[int] = set()
        """Matrices without a curvature."""

    def of(self, chunk: Span | Shard, elements: Tensor | None) -> Iterator[tuple[slice, Curvature, Tensor]]:
        """(elements of the run, their H, scaling) for every matrix that a run of a weight's elements touches.
        `elements`: H of the run where it is not a product."""
        rows = self.matrices.rows[chunk.name]
        size = self.matrices.size(chunk.name)
        for row in rows[chunk.start // size : -(-chunk.stop // size)]:
            first = (row - rows.start) * size
            start, stop = max(chunk.start, first), min(chunk.stop, first + size)
            inside = slice(start - chunk.start, stop - chunk.start)
            curvature: Curvature = None if elements is None else elements[inside]
            if self.factors:
                curvature = RankOne(*self.factors[row], start - first)
            yield inside, None if row in self.by_magnitude else curvature, self.scaling[row]


class Ranking:
    """Scores by the running mean of the curvature, or by magnitude."""

    def __init__(self, mean: CurvatureMean) -> None:
        self.on = mean.on
        self.mean = mean
        self._metrics: dict[str, float] = {}
        """Of the sums that the newest scores are made of, until they are reported."""
        self._idle: set[int] = set()
        """Matrices that nothing reached, at the last scores."""

    def scored(self) -> Iterator[tuple[Shard, Tensor]]:
        """(chunk, (G, M) s~ of its groups) for every chunk of this rank's shards. Collective, before the first. Raises
        ForgeError where some matrix has no usable curvature."""
        on, scoring = self.on, self.scoring()

        def score(chunk: Span | Shard) -> Tensor:
            dense = on.dense(on.shards[chunk.name])[chunk.start - on.shards[chunk.name].start :]
            found = [
                standardized_score(dense[inside], curvature, scaling)
                for inside, curvature, scaling in scoring.of(chunk, self._elements(chunk))
            ]
            return found[0] if len(found) == 1 else torch.cat(found)

        halo = on.halo.exchange(score)
        for chunk in on.chunks():
            yield chunk, on.to_groups(chunk, score(chunk), halo)

    def scoring(self, magnitude_without_gradient: bool = False) -> Scoring:
        """Return what the scores of all elements are made of. Collective.

        Args:
            magnitude_without_gradient: score all matrices by magnitude where the loss had no gradient in any of them.

        Raises:
            ForgeError: some matrix has no usable curvature.
        """
        on, sums = self.on, self.mean.whole()
        home = on.layout.flats[0].device  # with optimizer offload the host: one copy for all matrices, not one each
        scoring = Scoring(on.matrices)
        if sums is not None:
            scoring.factors = sums.factors(home)
        moments = torch.zeros(len(on.matrices.names), MOMENTS, dtype=torch.float64, device=home)
        scoring.scaling = moments  # of the right shape, until it is known
        for chunk in on.chunks():
            dense = on.dense(chunk)
            for inside, curvature, of_matrix in scoring.of(chunk, self._elements(chunk)):
                of_matrix += score_moments(dense[inside], curvature)
        moments = on.layout.sum_shards(moments.to(on.layout.device))
        totals, heard, squares = self._read(moments[:, 1], moments[:, 3], sums)
        self.mean.without_gradient = not any(totals) and all(heard) and (sums is None or not sums.values.any())
        if magnitude_without_gradient and self.mean.without_gradient:
            self.mean.note_without_gradient()
            scoring.by_magnitude = set(range(len(totals)))
        else:
            scoring.by_magnitude = self._require_curvature(totals, heard, squares, sums)
        if scoring.by_magnitude:
            rows = torch.tensor(sorted(scoring.by_magnitude), device=moments.device)
            moments[rows] = magnitude_moments(moments[rows])
        scoring.scaling = scalings(moments, on.config.curvature.damping).to(home)
        return scoring

    def _elements(self, chunk: Span | Shard) -> Tensor | None:
        """Elements of H where scores are made of them."""
        if not self.on.config.keeps_curvature or self.on.config.factored:
            return None
        shard = self.on.shards[chunk.name]
        return self.on.of(shard, "curvature")[chunk.start - shard.start : chunk.stop - shard.start]

    def _read(
        self, totals: Tensor, squares: Tensor, sums: AxisSums | None
    ) -> tuple[list[float], list[float], list[float]]:
        """Copy what an update must know to the host at once; return the numbers that `_require_curvature` takes."""
        on, running = self.on, self.mean.running
        parts = [totals, ~self.mean.unheard, on.load.numbers(), squares]
        if running is not None:
            assert sums is not None
            without_bias = on.load.spread(torch.ones_like(on.load.counted), on.bias_correction)
            parts.append(running.numbers(sums, without_bias))
        read = torch.cat([part.double().to(totals.device) for part in parts]).tolist()
        of_parts = []
        for part in parts:
            of_parts.append(read[: len(part)])
            read = read[len(part) :]
        on.load.read(of_parts[2])
        if running is not None:
            self._metrics = running.metrics(of_parts[4])
        return of_parts[0], of_parts[1], of_parts[3]

    def report(self) -> dict[str, float]:
        """Metrics of the masks accounted for since the last report, and of the curvature where scores were made of it
        since then. Collective."""
        metrics = self.on.health.report(self.mean.estimator is not None) | self._metrics
        self._metrics = {}  # a resumed run has none before its next scores
        if self.on.load.names:
            metrics["experts/unseen"] = float(len(self.on.load.unseen))
        if self.mean.lost_refreshes:
            metrics["curvature/lost_refreshes"] = float(self.mean.lost_refreshes)
        return metrics

    def _require_curvature(
        self, totals: list[float], heard: list[float], squares: list[float], sums: AxisSums | None
    ) -> set[int]:
        """Stop when some matrix has no usable curvature.

        A matrix of zeros needs none: all of its scores are equal.

        Args:
            totals: of max(H, 0) of every matrix, H as scores take it.
            heard: 0 for matrices of layers that were not heard in some refresh, else 1.
            squares: of W, the sum of every matrix.
            sums: that scores are made of.

        Returns:
            Matrices that are scored by magnitude: experts without any curvature, where other experts of their layer
            have one, since no token has reached them; and those that were heard, with inputs or gradients of exactly 0.
        """
        if not all(map(math.isfinite, totals)):
            raise DivergedError(
                f"the curvature is infinite or NaN at step {self.on.step}: the run has diverged; lower the learning "
                "rate, and continue from a checkpoint of before"
            )
        unseen, part = self.on.load.without(totals), self.on.config.curvature
        bad = [
            row
            for row, total in enumerate(totals)
            if not heard[row] or (not 0 < total < math.inf and row not in unseen and squares[row])
        ]
        vanished = [] if sums is None else [row for row in bad if heard[row] and vanishes(*sums.of(row))]
        idle: set[int] = set()
        if self.mean.running is not None or self.on.config.importance == "wanda":  # others may not have been heard
            idle = {row for row in bad if heard[row] and totals[row] == 0 and row not in vanished}
        if not any(totals):  # of a loss without any gradient nothing is known
            idle = set()
        self._tell_idle(idle)
        bad = [row for row in bad if row not in idle]
        if not bad:
            return unseen | idle
        absent = [row for row in bad if row not in vanished]
        if self.mean.without_gradient:
            why = NO_GRADIENT
        elif absent:  # more probes would not help those without any curvature: they come first
            why = (
                "Their layers took no part in the loss; use all of the model in every step and probe, or exclude these "
                "weights"
            )
        else:
            why = (
                "All of their row sums, or all of their column sums, are <= 0, which leaves no product of them: the "
                f"estimate is signed, and its noise too large; raise curvature.first_probes = {part.first_probes} or "
                f'curvature.probes = {part.probes}, or use importance "fisher"'
            )
        names = [self.on.matrices.names[row] for row in absent or vanished]
        raise ForgeError(
            f"no usable curvature for {len(names)} of {len(totals)} matrices at step {self.on.step}: "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. {why}"
        )

    def _tell_idle(self, rows: set[int]) -> None:
        """Say once which matrices have no gradient, or no input, as beside a layer of zeros."""
        if rows - self._idle and self.on.layout.rank == 0:
            names = [self.on.matrices.names[row] for row in sorted(rows)]
            _LOG.warning(
                "no input or no gradient reaches %d of %d matrices at step %d, as beside a layer of zeros (%s%s): "
                "their masks keep the largest weights until one does",
                len(rows),
                len(self.on.matrices.names),
                self.on.step,
                ", ".join(names[:5]),
                " ..." if len(names) > 5 else "",
            )
        self._idle = rows
