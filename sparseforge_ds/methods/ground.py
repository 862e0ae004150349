"""What every rule works on: this rank's shards of the prunable weights, their groups, their states and the progress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.health import Health
from sparseforge_ds.mask.pattern import top_n
from sparseforge_ds.model.families import PrunableWeight, prunable_weights
from sparseforge_ds.zero.edges import Edges, Missing, Piece
from sparseforge_ds.zero.expert_load import ExpertLoad
from sparseforge_ds.zero.moments import Matrices
from sparseforge_ds.zero.publish import Publication
from sparseforge_ds.zero.shard import Layout, Shard


class ForgeError(RuntimeError):
    """The run cannot go on as it is: a call is missing, or a mask would be formed without its curvature."""


class Ground:
    """One engine's shards, and how far its run has come."""

    publication: Publication
    """Set by the owner: it publishes by a rule, which is built on this."""

    def __init__(self, engine: DeepSpeedEngine, config: SparseForgeConfig) -> None:
        """Read the layout of an engine. Collective.

        Raises:
            ValueError: the model or the optimizer's param groups do not fit the config.
        """
        self.engine = engine
        self.config = config
        self.schedule = config.resolved_schedule
        self.pattern = config.parsed_pattern
        self.weights: dict[str, PrunableWeight] = {w.name: w for w in prunable_weights(engine.module, config)}
        self.step = 0
        """Optimizer steps that were applied."""
        self.refreshes = 0
        """Curvature refreshes so far, for the bias correction."""
        self.layout = Layout(engine)
        self.shards = self.layout.wholly(self.weights)
        self.layout.check(self.shards)
        spans = {name: self.pattern.span(weight.shape, weight.input_axis) for name, weight in self.weights.items()}
        self.edges = Edges(self.layout, self.shards, spans)
        self.matrices = Matrices(self.layout, self.shards, {n: w.matrices for n, w in self.weights.items()})
        # A magnitude needs no tokens, and counts none.
        self.routed = [
            weight for weight in self.weights.values() if weight.experts and config.importance != "magnitude"
        ]
        self.load = ExpertLoad(self.matrices, {w.name: (*w.place, w.experts) for w in self.routed})
        self.health = Health(self.matrices, self.pattern)

    def require_adam(self, method: str) -> None:
        """Refuse an optimizer that is not Adam or AdamW, whose moments the method uses.

        Raises:
            ValueError: it is another one.
        """
        inner = self.layout.inner
        for group in inner.param_groups:
            if not {"betas", "eps", "weight_decay"} <= set(group) or group.get("amsgrad"):
                raise ValueError(
                    f'method "{method}" works on the moments of Adam, which {type(inner).__name__} does not keep; '
                    'use "optimizer": {"type": "AdamW"} in the DeepSpeed JSON'
                )

    def pieces(self, names: Collection[str] | None = None) -> Iterator[Shard]:
        """All shards of this rank, or those of the named weights, a bounded piece at a time."""
        for name in self.shards if names is None else names:
            yield from self.edges.pieces[name]

    def of(self, shard: Shard, key: str) -> Tensor:
        """(numel of the shard,) view of a state. Look it up at every use: a checkpoint load replaces it."""
        return self.publication.of(shard, key)

    def exchange(self, key: str, names: Collection[str] | None = None) -> Missing:
        """What cut groups lack of a state, of all weights or of the named ones. Collective."""
        return self.edges.exchange(self.reader(lambda shard: self.of(shard, key)), names)

    def reader(self, values: Callable[[Shard], Tensor]) -> Callable[[Piece], Tensor]:
        """How `Edges.exchange` reads pieces of (numel of the shard,) values."""

        def read(piece: Piece) -> Tensor:
            shard = self.shards[piece.name]
            return values(shard)[piece.start - shard.start : piece.stop - shard.start]

        return read

    def to_groups(self, shard: Shard, values: Tensor, missing: Missing) -> Tensor:
        """(numel of the shard,) -> (G, M), all groups that the shard has a member of, cut ones included."""
        weight = self.weights[shard.name]
        return self.pattern.to_groups(self.edges.widen(shard, values, missing), weight.shape, weight.input_axis)

    def from_groups(self, shard: Shard, group_GM: Tensor) -> Tensor:
        """(G, M) -> (numel of the shard,), the shard's own members."""
        weight = self.weights[shard.name]
        return self.edges.own(shard, self.pattern.from_groups(group_GM, weight.shape, weight.input_axis))

    def top(self, shard: Shard, values: Tensor, missing: Missing) -> Tensor:
        """(numel of the shard,) bool: the top N of the values in every group."""
        return self.from_groups(shard, top_n(self.to_groups(shard, values, missing), self.pattern.kept))

    def dense_and_curvature(self, shard: Shard) -> tuple[Tensor, Tensor | None]:
        """Both as (numel of the shard,) views; None where no curvature is kept by elements."""
        return self.of(shard, "dense"), self.of(shard, "curvature") if self.config.keeps_elements else None

    def correction(self, name: str) -> float:
        """By which the running mean of a weight's curvature is to be divided; experts' means have no bias."""
        return 1.0 if name in self.load.rows else 1 - self.config.curvature.decay ** max(self.refreshes, 1)

    def add_update(self, shard: Shard, mask: Tensor, target: Tensor) -> None:
        """Account for a shard's new mask in the metrics."""
        _, curvature = self.dense_and_curvature(shard)
        self.health.add_update(self.weights[shard.name], shard, mask, target, curvature, self.correction(shard.name))

    def add_moved(self, shard: Shard, mask: Tensor, target: Tensor, kept: Tensor, disagrees: Tensor) -> Tensor:
        """Account for a shard's new mask; returns the packed bits of what is `kept`. See `Health.add_moved`."""
        _, curvature = self.dense_and_curvature(shard)
        self.health.add_curvature(curvature, self.correction(shard.name))
        return self.health.add_moved(self.weights[shard.name], shard, mask, target, kept, disagrees)

    @torch.no_grad()
    def account(self) -> None:
        """Account for all masks in the metrics; what is kept is the target."""
        for piece in self.pieces():
            mask = self.of(piece, "mask")
            self.add_update(piece, mask, mask != 0)
