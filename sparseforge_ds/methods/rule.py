"""What a method is: a small rule on the shards that all methods share.

A rule says which mask a shard is published with, what happens at an update and when it freezes; one that needs it also
changes gradients before the optimizer's step or weights after it; `config.state_keys` names its states. Sharding,
cut groups, publication, checkpoints and metrics are none of its business.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseforge_ds.mask.quench import publish
from sparseforge_ds.methods.ground import Ground
from sparseforge_ds.methods.ranking import Ranking
from sparseforge_ds.zero.probe import Closure, ProbeBatches
from sparseforge_ds.zero.shard import Shard


class Rule:
    """The parts of a method, each with what it is where a method has nothing of its own."""

    moved = True
    """Whether the last `update` with metrics changed what is published; not if the optimizer's step did it."""
    trains_the_rest = True
    """Whether weights that are not prunable are trained."""

    def __init__(self, ground: Ground, ranking: Ranking) -> None:
        self.on = ground
        self.ranking = ranking

    @property
    def starts(self) -> bool:
        """Whether `start` must come before the first step."""
        return True

    @property
    def remembers(self) -> bool:
        """Whether publishing the step that begins needs W as it is now, by `Publication.before`."""
        return False

    def start(self, probe: Closure | ProbeBatches | None) -> None:
        """Before the first step of a fresh run. Collective."""

    def update(self, step: int, probe: Closure | ProbeBatches | None) -> dict[str, float] | None:
        """After optimizer step `step`: whatever is due. Collective.

        Returns:
            Metrics of the masks where they were updated, None where they were not.
        """
        return None

    def resume(self) -> None:
        """After states were read from a checkpoint. Collective."""

    def harden(self) -> None:
        """On all ranks before shards are published as `hard`."""

    def publish(self, shard: Shard, dense: Tensor, mask: Tensor, out: Tensor, step: int, hard: bool) -> None:
        """Write m_eff W after optimizer step `step` to `out`; all are (numel of the shard,).

        `hard`: as it would be if the mask were frozen now.
        """
        publish(dense, mask, out)

    def before_step(self, index: int, gradient: Tensor, group: dict[str, Any]) -> Tensor | None:
        """The gradient that the optimizer is to step the dense weights of a master partition with.

        Args:
            index: of the partition.
            gradient: averaged, unscaled and clipped, laid out like it; may be changed in place.
            group: the optimizer's param group, with its learning rate.

        Returns:
            None when the optimizer is to leave them alone.
        """
        return gradient

    def after_step(self, index: int, group: dict[str, Any]) -> None:
        """After the optimizer's step of a partition, before it is published. May be collective."""
