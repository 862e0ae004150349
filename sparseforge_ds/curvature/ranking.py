"""Standardized scores (eqs. 3 and 4), for methods that rank by a measured importance."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.curvature.running_curvature import NO_GRADIENT, RunningCurvature
from sparseforge_ds.curvature.tiled_shards import TiledShards
from sparseforge_ds.mask.factored import vanishes
from sparseforge_ds.mask.importance import MOMENTS, magnitude_moments
from sparseforge_ds.mask.kernels.scores import Curvature, RankOne, scalings, score_moments, standardized_score
from sparseforge_ds.sharded_weights import DivergedError
from sparseforge_ds.zero.forge_error import ForgeError
from sparseforge_ds.zero.halo import Span
from sparseforge_ds.zero.matrices import Matrices
from sparseforge_ds.zero.shard import Shard

_LOG = logging.getLogger(__name__)


class ScoreInputs:
    """Curvature and scaling of every matrix: what scores of its elements are made of."""

    def __init__(self, matrices: Matrices, factors: AxisSums | None) -> None:
        self.matrices = matrices
        self.factors = factors
        """Factors of the curvature of every matrix (`AxisSums.factors`), where it is a product."""
        self.scaling = matrices.table(3)
        """(matrices, 3) fp64, see `scalings`; zeros until the moments are known."""
        self.by_magnitude: set[int] = set()
        """Matrices without a curvature."""

    def per_matrix(self, span: Span | Shard, elements: Tensor | None) -> Iterator[tuple[slice, Curvature, int]]:
        """Yield (elements of the span, their H, row of the matrix) for every matrix that a span of a weight touches.

        Args:
            span: consecutive elements of a weight.
            elements: H of the span; None if H is a product, or scores go by magnitude.
        """
        for part in self.matrices.slices_of(span):
            curvature: Curvature = None if elements is None else elements[part.inside]
            if self.factors is not None:
                curvature = RankOne(*self.factors.matrix_sums(part.row), part.first)
            yield part.inside, None if part.row in self.by_magnitude else curvature, part.row


class Ranking:
    """Scores by the running mean of the curvature, or by magnitude."""

    def __init__(self, curvature: RunningCurvature) -> None:
        self.weights = curvature.weights
        self.curvature = curvature
        self._metrics: dict[str, float] = {}
        """Metrics of the sums that the newest scores are made of, until they are reported."""
        self._idle: set[int] = set()
        """Matrices that no input or no gradient reached, at the last scores."""

    def scored(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield (chunk, (G, M) s~ of its groups) for every chunk of this rank's shards. Collective before the first.

        Raises:
            ForgeError: some matrix has no usable curvature.
        """
        weights = self.weights
        inputs = self.score_inputs()

        def score(shard: Shard) -> Tensor:
            dense = weights.dense(shard)
            parts = [
                standardized_score(dense[inside], curvature, inputs.scaling[row])
                for inside, curvature, row in inputs.per_matrix(shard, self._elements(shard))
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        halo = weights.halo.exchange(score)
        for chunk in weights.chunks():
            yield chunk, weights.to_groups(chunk, score(chunk), halo)

    def score_inputs(self, magnitude_without_gradient: bool = False, tiled: TiledShards | None = None) -> ScoreInputs:
        """Return what the scores of all elements are made of. Collective.

        Args:
            magnitude_without_gradient: score all matrices by magnitude where the loss had no gradient in any of them.
            tiled: shards that are read a partition at a time.

        Raises:
            ForgeError: some matrix has no usable curvature.
        """
        weights = self.weights
        sums = self.curvature.gather()
        # Copy all factors at once to the device of the shards, which is the host under optimizer offload.
        shard_device = weights.layout.flats[0].device
        factors = None if sums is None else sums.factors(shard_device)
        # Sum the moments of every matrix over its parts on this rank, and then over ranks.
        if tiled is None:
            moments = torch.zeros(len(weights.matrices.names), MOMENTS, dtype=torch.float64, device=shard_device)
        else:
            moments = tiled.moments(factors)
        inputs = ScoreInputs(weights.matrices, factors)
        for chunk in weights.chunks(None if tiled is None else tiled.rest):
            dense = weights.dense(chunk)
            for inside, curvature, row in inputs.per_matrix(chunk, self._elements(chunk)):
                moments[row] += score_moments(dense[inside], curvature)
        moments = weights.layout.sum_shards(moments.to(weights.layout.device))
        # Stop, or score by magnitude, where a matrix has no curvature.
        totals, had_tokens, squares = self._read(moments[:, 1], moments[:, 3], sums)
        without_gradient = not any(totals) and all(had_tokens) and (sums is None or not sums.values.any())
        self.curvature.without_gradient = without_gradient
        if magnitude_without_gradient and without_gradient:
            self.curvature.note_without_gradient()
            inputs.by_magnitude = set(range(len(totals)))
        else:
            inputs.by_magnitude = self._require_curvature(totals, had_tokens, squares, sums)
        if inputs.by_magnitude:
            rows = torch.tensor(sorted(inputs.by_magnitude), device=moments.device)
            moments[rows] = magnitude_moments(moments[rows])
        # eq. 4: mean and standard deviation of each matrix
        inputs.scaling = scalings(moments, weights.config.curvature.damping).to(shard_device)
        return inputs

    def _elements(self, shard: Shard) -> Tensor | None:
        """Return H of a shard or a part of one where scores are made of elements."""
        if not self.weights.config.keeps_curvature or self.weights.config.factored:
            return None
        return self.weights.state_view(shard, "curvature")

    def _read(
        self, totals: Tensor, squares: Tensor, sums: AxisSums | None
    ) -> tuple[list[float], list[float], list[float]]:
        """Copy all numbers that an update needs to the host at once, and return those of `_require_curvature`."""
        running = self.curvature.running
        load = self.curvature.expert_load
        parts = [totals, ~self.curvature.unseen_matrices, load.numbers(), squares]
        if running is not None:
            assert sums is not None
            corrections = load.spread(torch.ones_like(load.counted), self.curvature.bias_correction)
            parts.append(running.numbers(sums, corrections))
        numbers = torch.cat([part.double().to(totals.device) for part in parts]).tolist()
        lists = []
        for part in parts:
            lists.append(numbers[: len(part)])
            numbers = numbers[len(part) :]
        load.read(lists[2])
        if running is not None:
            self._metrics = running.metrics(lists[4])
        return lists[0], lists[1], lists[3]

    def report(self) -> dict[str, float]:
        """Return metrics of the masks accounted for since the last report, and of the curvature if scored since then.

        Collective.
        """
        weights = self.weights
        has_elements = self.curvature.estimator is not None
        if has_elements and not weights.state.released:
            for chunk in weights.chunks():
                correction = self.curvature.correction(chunk.name)
                weights.metrics.add_curvature(weights.state_view(chunk, "curvature"), correction)
        metrics = weights.metrics.report(has_elements) | self._metrics
        self._metrics = {}  # a resumed run has none before its next scores
        if self.curvature.expert_load.names:
            metrics["experts/unseen"] = float(len(self.curvature.expert_load.unseen))
        if self.curvature.lost_refreshes:
            metrics["curvature/lost_refreshes"] = float(self.curvature.lost_refreshes)
        return metrics

    def _require_curvature(
        self, totals: list[float], had_tokens: list[float], squares: list[float], sums: AxisSums | None
    ) -> set[int]:
        """Raise ForgeError where some matrix has no usable curvature; return those scored by magnitude.

        A matrix of zeros needs none: all of its scores are equal.

        Args:
            totals: sum of max(H, 0) of every matrix, H as scores take it.
            had_tokens: 0 for matrices of layers that had no token in some refresh, else 1.
            squares: sum of W^2 of every matrix.
            sums: row and column sums that scores are made of.

        Returns:
            Rows to score by magnitude: experts that no token has reached, if other experts of their layer have a
            curvature, and matrices that had tokens, but inputs or gradients of exactly 0.
        """
        if not all(map(math.isfinite, totals)):
            raise DivergedError(
                f"the curvature is infinite or NaN at step {self.weights.step}: the run has diverged; lower the "
                "learning rate, and continue from a checkpoint of before"
            )
        # A curvature that is missing is explained by an expert without tokens, by signed noise, or by zeros.
        unseen = self.curvature.expert_load.without(totals)
        settings = self.weights.config.curvature
        unusable = [
            row
            for row, total in enumerate(totals)
            if not had_tokens[row] or (not 0 < total < math.inf and row not in unseen and squares[row])
        ]
        vanished = (
            [] if sums is None else [row for row in unusable if had_tokens[row] and vanishes(*sums.matrix_sums(row))]
        )
        idle: set[int] = set()
        if self.curvature.running is not None:  # other estimators do not say which layers had tokens
            idle = {row for row in unusable if had_tokens[row] and totals[row] == 0 and row not in vanished}
        if not any(totals):  # without any gradient, no matrix is special
            idle = set()
        self._tell_idle(idle)
        unexplained = [row for row in unusable if row not in idle]
        if not unexplained:
            return unseen | idle
        # The rest is an error, and the most useful cause is named.
        absent = [row for row in unexplained if row not in vanished]
        if self.curvature.without_gradient:
            why = NO_GRADIENT
        elif absent:  # more probes would not help those without any curvature: they come first
            why = (
                "Their layers took no part in the loss; use all of the model in every step and probe, or exclude these "
                "weights"
            )
        else:
            why = (
                "All of their row sums, or all of their column sums, are <= 0: the estimate is signed, and too noisy; "
                f"raise curvature.first_probes = {settings.first_probes} or "
                f'curvature.probes = {settings.probes}, or use importance "fisher"'
            )
        names = [self.weights.matrices.names[row] for row in absent or vanished]
        raise ForgeError(
            f"no usable curvature for {len(names)} of {len(totals)} matrices at step {self.weights.step}: "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. {why}"
        )

    def _tell_idle(self, rows: set[int]) -> None:
        """Warn once about matrices without any gradient or input, as next to a layer of zeros."""
        if rows - self._idle and self.weights.layout.rank == 0:
            names = [self.weights.matrices.names[row] for row in sorted(rows)]
            _LOG.warning(
                "no input or no gradient reaches %d of %d matrices at step %d, as next to a layer of zeros (%s%s): "
                "their masks keep the largest weights until one does",
                len(rows),
                len(self.weights.matrices.names),
                self.weights.step,
                ", ".join(names[:5]),
                " ..." if len(names) > 5 else "",
            )
        self._idle = rows
