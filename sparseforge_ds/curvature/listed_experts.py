"""Squared gradients per token of experts in lists of modules, each of which a rank calls only if it has tokens for it.

Ranks therefore differ in what their backward passes, and nothing can be reduced while one is inside of a layer's
experts. What they see is summed on the rank, whole, and reduced when the backward has left the block around the list:
it does so on all ranks, in the same order. One layer's experts are held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sparseforge_ds.curvature.context import Diagonal, EstimatorContext
from sparseforge_ds.mask.curvature import token_fisher
from sparseforge_ds.zero.layer_hooks import block_gradients
from sparseforge_ds.zero.probe import reduce_to_shard


class ListedExperts:
    """The experts in lists of one model."""

    def __init__(self, shards: EstimatorContext) -> None:
        self.on = shards
        model = shards.layout.engine.module
        self._blocks = {layer: model.get_submodule(layer.rpartition(".")[0]) for layer in shards.lists}
        self._layer = {name: layer for layer, names in shards.lists.items() for name in names}
        self._tokens: dict[str, int] = {}
        self._seen: dict[str, Tensor] = {}
        """(out, in) fp32 sums of this rank, by weight name."""

    @contextmanager
    def collected(self, total: Diagonal) -> Iterator[None]:
        """While active, what `add` is told in a backward pass is reduced, and added to `total`. Collective.

        `total` is then a sum over the tokens of all ranks, of which `ExpertLoad` knows the number.

        Raises:
            ValueError: the gradient of an expert does not pass through the block around its list.
        """
        left = dict.fromkeys(self._blocks, False)
        self._seen.clear()

        def leave(layer: str) -> None:
            left[layer] = True
            self._reduce(layer, total)

        with block_gradients(self._blocks, self._tokens.__setitem__, leave):
            yield
        for layer in left:
            if not left[layer]:  # nothing before the block is trained, so no gradient leaves it
                self._reduce(layer, total)
        for name in self._seen:
            raise ValueError(
                f"{name}: its input does not come from that of {type(self._blocks[self._layer[name]]).__name__}, so "
                'its gradients cannot be summed there; use "curvature": {"per_token": false}'
            )

    def add(self, name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
        """Take in what one call of an expert's linear layer saw and received."""
        on = self.on
        if name in on.listed:
            on.load.add(on.load.rows[name], grad_TO.shape[0])
        # The loss is a mean over the tokens that enter the block.
        scale = on.probe.backward_scale / self._tokens[self._layer[name]]
        full = token_fisher(grad_TO, input_TI, scale)
        self._seen[name] = self._seen[name].add_(full) if name in self._seen else full

    def _reduce(self, layer: str, total: Diagonal) -> None:
        on = self.on
        for name in on.lists[layer]:
            full = self._seen.pop(name, None)
            if full is None:
                flat = torch.zeros(on.shards[name].shape, device=on.layout.device).view(-1)
            else:
                flat = (full.t() if name in on.input_first else full).reshape(-1)
            _, mine = reduce_to_shard(on.layout, on.shards[name], on.ranges[name], flat)
            total[name].add_(mine.to(total[name].device))
