"""Labels drawn from the model itself, for the Gauss-Newton estimate (Sophia's estimator, arXiv 2305.14342)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from sparseforge_ds.estimate.shards import Shards
from sparseforge_ds.mask.curvature import counter_key, sample_labels
from sparseforge_ds.zero.probe import Closure
from sparseforge_ds.zero.taps import captured_output


class SampledLabels:
    """Turns passes into passes whose loss is the cross-entropy of labels that the model draws."""

    def __init__(self, shards: Shards, seed: int) -> None:
        """Find the logits.

        Raises:
            ValueError: the model names no output embeddings.
        """
        self.layout = shards.layout
        self.seed = seed
        model: Any = shards.layout.engine.module
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is None:
            raise ValueError(
                f'importance "gauss_newton" draws labels from the logits, but {type(model).__name__} names no '
                'output embeddings (get_output_embeddings); use "fisher"'
            )
        self.head: nn.Module = head

    def drawn(self, passes: Sequence[Closure], step: int, probe: int) -> list[Closure]:
        """The passes of a probe, with the draw of that step and probe."""
        key = counter_key(self.seed, step, probe, "labels")
        return [self._drawn(closure, key, number) for number, closure in enumerate(passes)]

    def _drawn(self, closure: Closure, key: int, number: int) -> Closure:
        def sampled() -> Tensor:
            with captured_output(self.head) as outputs:
                closure()
            logits = outputs[-1].flatten(0, -2)
            # By the place in the batch, so that the draw does not depend on how a batch is divided.
            first = (number * self.layout.world_size + self.layout.rank) * logits.shape[0]
            return F.cross_entropy(logits.float(), sample_labels(logits, key, first))

        return sampled
