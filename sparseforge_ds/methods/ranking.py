"""Curvature and the scores made of it (design eqs. 2 to 4), for rules that rank by a measured importance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.estimate import (
    Estimator,
    FisherSums,
    RunningSums,
    Shards,
    SumsEstimator,
    estimator_of,
    sums_of,
)
from sparseforge_ds.estimate.axis_sums import AxisSums
from sparseforge_ds.mask.curvature import accumulate, token_rate
from sparseforge_ds.mask.factored import rank_one, shares, vanishes
from sparseforge_ds.mask.importance import (
    MOMENTS,
    Curvature,
    RankOne,
    magnitude_moments,
    scalings,
    score_moments,
    standardized_score,
)
from sparseforge_ds.mask.runs import runs
from sparseforge_ds.methods.ground import ForgeError, Ground
from sparseforge_ds.model.measurable import refuse_unmeasurable
from sparseforge_ds.zero.edges import Piece
from sparseforge_ds.zero.moments import Matrices
from sparseforge_ds.zero.probe import Closure, Probe, ProbeBatches, batches_of
from sparseforge_ds.zero.shard import Shard


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

    def of(self, run: Piece | Shard, elements: Tensor | None) -> Iterator[tuple[slice, Curvature, Tensor]]:
        """(elements of the run, their H, scaling) for every matrix that a run of a weight's elements touches.

        `elements`: H of the run where it is not a product.
        """
        rows = self.matrices.rows[run.name]
        size = self.matrices.size(run.name)
        for row in rows[run.start // size : -(-run.stop // size)]:
            first = (row - rows.start) * size
            start, stop = max(run.start, first), min(run.stop, first + size)
            inside = slice(start - run.start, stop - run.start)
            curvature: Curvature = None if elements is None else elements[inside]
            if self.factors:
                curvature = RankOne(*self.factors[row], start - first)
            yield inside, None if row in self.by_magnitude else curvature, self.scaling[row]


class Ranking:
    """The running mean of the curvature of every weight, and standardized scores."""

    def __init__(self, ground: Ground, probe: Probe) -> None:
        """Build the estimator that the config names.

        Raises:
            ValueError: it cannot work on some prunable weight.
        """
        self.on = ground
        self.probe = probe
        self.lost_refreshes = 0
        """Refreshes that overflowed in fp16 since this object was made; the masks then move by the older curvature."""
        self.estimator: Estimator | None = None
        """Of elements, which are optimizer state."""
        self.sums: SumsEstimator | None = None
        self.running: RunningSums | None = None
        """What is kept where scores are made of sums."""
        self._hearing = ExitStack()
        self._metrics: dict[str, float] = {}
        """Of the sums that the newest scores are made of."""
        config = ground.config
        if config.keeps_curvature:
            module = ground.engine.module
            refuse_unmeasurable(module, ground.weights.values(), config)
            layers = {weight.name: module.get_submodule(weight.module) for weight in ground.weights.values()}
            linear = {name: layer for name, layer in layers.items() if isinstance(layer, (nn.Linear, Conv1D))}
            fused = {w.module: module.get_submodule(w.module) for w in ground.routed if len(w.shape) == 3}
            self.shards = Shards(probe, ground.matrices, ground.edges, linear, ground.load, fused)
            if config.keeps_sums:
                self.sums = sums_of(self.shards, config)
                self.running = RunningSums(ground.matrices, ground.shards)
            else:
                self.estimator = estimator_of(self.shards, config)

    @property
    def measures(self) -> bool:
        """Whether scores need a curvature."""
        return self.estimator is not None or self.sums is not None

    @property
    def ready(self) -> bool:
        """Whether there is something to score by."""
        return not self.measures or self.on.refreshes > 0

    def listen(self, due: bool) -> None:
        """Hear the passes of the training step that begins, or hear none: whatever was heard before is forgotten."""
        self._hearing.close()
        if due and self.on.config.listens:
            assert isinstance(self.sums, FisherSums)
            self.sums.begin()
            self._hearing.enter_context(self.sums.listening())

    @torch.no_grad()
    def refresh(self, probe: Closure | ProbeBatches | None) -> None:
        """Take a new sample of the curvature into the running mean. Collective.

        Raises:
            ValueError: it takes passes of its own, and there is no probe.
            ForgeError: a layer was not heard in the passes.
        """
        on, part = self.on, self.on.config.curvature
        if not self.measures:
            return
        if on.config.listens:
            self._hearing.close()
            self._take_sums()
            return
        if probe is None:
            raise ValueError(
                f'importance "{on.config.importance}" is measured in passes of its own here: '
                "call forge.step(probe=lambda: engine(**batch).loss)"
            )
        batches = batches_of(probe)
        probes = part.probes if on.refreshes else part.first_probes
        if self.sums is not None:
            with torch.enable_grad():
                applied = self.sums.refresh(batches, on.step, probes)
            if applied:
                self._take_sums()
            else:
                self.lost_refreshes += 1
        elif on.refreshes:
            self._refresh_elements(batches, probes)
        else:
            self._refresh_first(batches, probes)

    def _take_sums(self) -> None:
        on = self.on
        assert self.sums is not None and self.running is not None
        sums, counts = self.sums.finish()
        silent = [
            on.matrices.names[matrix]
            for matrix, count in enumerate(counts)
            if not count and on.load.of_matrix[matrix] is None
        ]
        if silent:
            raise ForgeError(
                f"no usable curvature for {len(silent)} of {len(counts)} matrices at step {on.step}: "
                f"{', '.join(silent[:5])}{' ...' if len(silent) > 5 else ''}. Their layers took no part in the loss, "
                "or were compiled (torch.compile), where they cannot be heard; use all of the model as it is, or "
                "exclude these weights"
            )
        rates = on.load.fade(self._rate)
        of_matrix = [1 - on.config.curvature.decay if row is None else rates[row] for row in on.load.of_matrix]
        self.running.take(sums, counts, of_matrix)
        on.refreshes += 1

    def _refresh_elements(self, batches: ProbeBatches, probes: int) -> None:
        on = self.on
        assert self.estimator is not None
        sample = self.shards.zeros()
        with torch.enable_grad():
            applied = self.estimator.refresh(batches, on.step, probes, sample)
        if not applied:
            self.lost_refreshes += 1
            return  # keep the average as it is
        rates = on.load.fade(self._rate)
        for name, new in sample.items():
            average = on.of(on.shards[name], "curvature")
            if name in on.load.rows:
                self._accumulate_experts(name, average, new, rates)
                continue
            on.health.add_refresh(average, new)
            accumulate(average, new, on.config.curvature.decay)
        on.refreshes += 1

    def _refresh_first(self, batches: ProbeBatches, probes: int) -> None:
        """The running mean is 0, and the sample is formed in its place."""
        on, part = self.on, self.on.config.curvature
        assert self.estimator is not None
        averages = {name: on.of(shard, "curvature") for name, shard in on.shards.items()}
        with torch.enable_grad():
            applied = self.estimator.refresh(batches, on.step, probes, averages)
        if not applied:
            self.lost_refreshes += 1
            for average in averages.values():
                average.zero_()
            return
        rates = on.load.fade(self._rate)
        for name, average in averages.items():
            if name in on.load.rows:
                for one in on.matrices.parts[name]:
                    row = on.load.of_matrix[one.row]
                    assert row is not None
                    if not rates[row]:  # else 1: the first average is the sample
                        average[one.start : one.stop].zero_()
                continue
            for run in runs(average):
                sample = average[run].clone()
                average[run].zero_()
                accumulate(average[run], sample, part.decay)
        on.refreshes += 1

    def _rate(self, tokens: float, recent: float) -> tuple[float, float]:
        return token_rate(tokens, recent, self.on.config.curvature.decay)

    def _accumulate_experts(self, name: str, average: Tensor, sample: Tensor, rates: list[float]) -> None:
        """Average by tokens; an expert that saw none keeps what it has."""
        for part in self.on.matrices.parts[name]:
            row = self.on.load.of_matrix[part.row]
            assert row is not None
            if rates[row]:
                inside = slice(part.start, part.stop)
                self.on.health.add_refresh(average[inside], sample[inside])
                average[inside].lerp_(sample[inside], rates[row])

    def scored(self) -> Iterator[tuple[Shard, Tensor]]:
        """(piece, (G, M) s~ of its groups) for every piece of this rank's shards. Collective, before the first.

        Raises:
            ForgeError: some matrix has no curvature to speak of.
        """
        on, scoring = self.on, self.measure()

        def score(piece: Piece | Shard) -> Tensor:
            dense = on.of(on.shards[piece.name], "dense")[piece.start - on.shards[piece.name].start :]
            found = [
                standardized_score(dense[inside], curvature, scaling)
                for inside, curvature, scaling in scoring.of(piece, self._elements(piece))
            ]
            return found[0] if len(found) == 1 else torch.cat(found)

        missing = on.edges.exchange(score)
        for piece in on.pieces():
            yield piece, on.to_groups(piece, score(piece), missing)

    def measure(self) -> Scoring:
        """What the scores of all elements are made of. Collective.

        Raises:
            ForgeError: some matrix has no curvature to speak of.
        """
        on = self.on
        sums = None
        if self.running is not None:
            sums = self.running.whole().to(on.layout.flats[0].device)
            corrections = [on.correction(name) for name, rows in on.matrices.rows.items() for _ in rows]
            self._metrics = self.running.metrics(sums, corrections)
        elif on.config.factored:
            sums = AxisSums(on.matrices, on.shards, on.layout.flats[0].device)
            sums.add_shards(lambda shard: on.of(shard, "curvature"))
        scoring = Scoring(on.matrices)
        if sums is not None:
            scoring.factors = [shares(*sums.of(row)) for row in range(len(on.matrices.names))]
        moments = on.matrices.table(MOMENTS).to(on.layout.flats[0].device)
        scoring.scaling = moments  # of the right shape, until it is known
        for piece in on.pieces():
            dense = on.of(piece, "dense")
            for inside, curvature, of_matrix in scoring.of(piece, self._elements(piece)):
                of_matrix += score_moments(dense[inside], curvature)
        moments = on.matrices.reduce(moments.to(on.layout.device))
        scoring.by_magnitude = self._require_curvature(moments[:, 1].tolist(), sums)
        if scoring.by_magnitude:
            rows = torch.tensor(sorted(scoring.by_magnitude), device=moments.device)
            moments[rows] = magnitude_moments(moments[rows])
        # With optimizer offload the shards are on the host: one copy for all matrices, not one each.
        scoring.scaling = scalings(moments, on.config.curvature.damping).to(on.layout.flats[0].device)
        return scoring

    def _elements(self, piece: Piece | Shard) -> Tensor | None:
        """Elements of H where scores are made of them."""
        if not self.on.config.keeps_curvature or self.on.config.factored:
            return None
        shard = self.on.shards[piece.name]
        return self.on.of(shard, "curvature")[piece.start - shard.start : piece.stop - shard.start]

    def curvatures(self) -> Iterator[tuple[Shard, Tensor | None]]:
        """(piece, running mean of H of its elements, without bias correction) for every piece of this rank's shards.

        Of sums, it is the product that scores take. Collective, before the first.
        """
        on = self.on
        sums = None if self.running is None else self.running.whole().to(on.layout.flats[0].device)
        for piece in on.pieces():
            if sums is None:
                yield piece, None if self.estimator is None else on.of(piece, "curvature")
                continue
            shard, found = on.shards[piece.name], []
            for part in on.matrices.parts[piece.name]:
                start = max(part.start, piece.start - shard.start)
                stop = min(part.stop, piece.stop - shard.start)
                if start < stop:
                    first = sums.first(piece.name, part) - part.start
                    found.append(rank_one(*shares(*sums.of(part.row)), first + start, first + stop))
            yield piece, torch.cat(found)

    def report(self) -> dict[str, float]:
        """Metrics of the masks accounted for since the last report, and of the curvature. Collective."""
        metrics = self.on.health.report(self.estimator is not None) | self._metrics
        if self.on.load.names:
            metrics["experts/unseen"] = float(len(self.on.load.unseen))
        if self.lost_refreshes:
            metrics["curvature/lost_refreshes"] = float(self.lost_refreshes)
        return metrics

    def require_refreshed(self) -> None:
        """Before a mask is frozen: raises where every refresh was lost."""
        if not self.ready:
            names = list(self.on.weights)
            raise ForgeError(
                f"the mask is due to freeze at step {self.on.step}, but the curvature of {names[0]} and "
                f"{len(names) - 1} others was never refreshed: every probe overflowed; "
                "use bf16, or lower fp16.initial_scale_power"
            )

    def _require_curvature(self, totals: list[float], sums: AxisSums | None) -> set[int]:
        """Stop when some matrix has no curvature to speak of; `totals` are those of max(H, 0), H as scores take it.

        Returns:
            Matrices of experts without any, where other experts of their layer have one: no token has reached them.
        """
        unseen, part = self.on.load.without(totals), self.on.config.curvature
        bad = [row for row, total in enumerate(totals) if not 0 < total < math.inf and row not in unseen]
        if not bad:
            return unseen
        vanished = [] if sums is None else [row for row in bad if vanishes(*sums.of(row))]
        absent = [row for row in bad if row not in vanished]
        why = (  # more probes would not help those without any curvature: they come first
            "Their layers took no part in the loss, or it is not finite; use all of the model in every step and probe, "
            "or exclude these weights"
            if absent
            else "All of their row sums, or all of their column sums, are <= 0, which leaves no product of them: the "
            f"estimate is signed, and its noise too large; raise curvature.first_probes = {part.first_probes} or "
            f'curvature.probes = {part.probes}, or use importance "fisher"'
        )
        names = [self.on.matrices.names[row] for row in absent or vanished]
        raise ForgeError(
            f"no usable curvature for {len(names)} of {len(totals)} matrices at step {self.on.step}: "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. {why}"
        )
