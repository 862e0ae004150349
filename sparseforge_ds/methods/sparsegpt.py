"""A starting mask, and weights to go with it, by SparseGPT (arXiv 2301.00774; `mask.reconstruct` has the equations).

One decoder block after another: calibration batches run through the model as it is pruned so far, every layer of
the block collects X^T X, and each weight is gathered to one rank, decided there and handed back. One weight a rank at
a time is whole, and the X^T X of one block exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import ReconstructionConfig
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.reconstruct import reconstruct
from sparseforge_ds.methods.sharded_weights import ShardedWeights
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.model.shared_weights import refuse_shared
from sparseforge_ds.zero.layer_hooks import layer_inputs
from sparseforge_ds.zero.probe import Closure, Probe, ProbeBatches
from sparseforge_ds.zero.restore import together
from sparseforge_ds.zero.shard import Shard


class SparseGPT:
    """Prunes a whole model, block by block."""

    def __init__(self, weights: ShardedWeights, probe: Probe) -> None:
        """Find the layers. Raises ValueError as `weights_of_blocks`."""
        self.on = weights
        self.probe = probe
        self.part = weights.config.reconstruction or ReconstructionConfig()
        assert isinstance(weights.pattern, NM)
        self.pattern = weights.pattern
        self.blocks = weights_of_blocks(weights.engine.module, weights.weights.values())

    @torch.no_grad()
    def choose(self, batches: ProbeBatches, count: int, write_masters: Callable[[], None]) -> None:
        """Set mask and dense weights of everything, by calibration batches that are run for every block. Collective."""
        on = self.on
        passes = [closure for batch in range(count) for closure in batches.passes(batch)]
        for names in self.blocks.values():
            gram = self._collect(names, passes)
            self._require_finite(gram)
            ranks = on.layout.world_size
            for first in range(0, len(names), ranks):
                each = names[first : first + ranks]
                whole = {name: self._gather(name, gram.pop(name), owner) for owner, name in enumerate(each)}
                solved = together(on.layout, partial(self._solve, whole))
                for owner, name in enumerate(each):
                    self._hand_back(name, solved if owner == on.layout.rank else None, owner)
            write_masters()
            on.layout.push()

    def _collect(self, names: list[str], passes: Sequence[Closure]) -> dict[str, Tensor]:
        """(in, in) fp32 sum of x x^T over this rank's tokens, by weight."""
        on = self.on
        modules = {name: on.engine.module.get_submodule(on.weights[name].module) for name in names}
        gram = {}
        for name in names:
            inputs = on.weights[name].shape[on.weights[name].input_axis]
            gram[name] = torch.zeros(inputs, inputs, device=on.layout.device)

        def add(name: str, input_TI: Tensor) -> None:
            input_TI = input_TI.float()
            gram[name].addmm_(input_TI.t(), input_TI)

        with layer_inputs(modules, add):
            for closure in passes:
                self.probe.loss(closure)
        return gram

    def _require_finite(self, gram: dict[str, Tensor]) -> None:
        """Collective. Raises ValueError on all ranks."""
        bad = torch.stack([~gram_II.isfinite().all() for gram_II in gram.values()]).double()
        self.on.layout.all_reduce(bad)
        if broken := [name for name, finite in zip(gram, (bad == 0).tolist(), strict=True) if not finite]:
            raise ValueError(
                f'importance "sparsegpt": the calibration inputs of {broken[0]} and {len(broken) - 1} others of its '
                "block are not finite; use bf16 or fp32, or a model without infinite weights"
            )

    def _gather(self, name: str, gram_II: Tensor, owner: int) -> tuple[Tensor, Tensor] | None:
        """The whole dense weight, flat, and the summed gram on the owner."""
        on = self.on
        on.layout.reduce(gram_II, owner)
        shard = on.shards[name]
        mine = on.dense(shard).to(on.layout.device)
        if on.layout.replicated or on.layout.world_size == 1:
            return (mine, gram_II) if on.layout.rank == owner else None
        if on.layout.rank != owner:
            if shard.numel:
                on.layout.send(mine.contiguous(), owner)
            return None
        whole = torch.empty(on.weights[name].numel, device=on.layout.device)
        for holder, (start, stop) in enumerate(on.edges.ranges[name]):
            if holder == owner:
                whole[start:stop] = mine
            elif stop > start:
                on.layout.receive(whole[start:stop], holder)
        return whole, gram_II

    def _solve(self, whole: dict[str, tuple[Tensor, Tensor] | None]) -> Tensor | None:
        """(2, numel) fp32: weights and mask of the one that this rank has, if any."""
        name, found = next(((name, found) for name, found in whole.items() if found is not None), ("", None))
        if found is None:
            return None
        flat, gram_II = found
        weight, part = self.on.weights[name], self.part
        transposed = weight.input_axis == -2
        weight_OI = flat.view(weight.shape).t() if transposed else flat.view(weight.shape)
        pattern = self.pattern.n, self.pattern.m
        try:
            updated_OI, kept_OI = reconstruct(weight_OI.contiguous(), gram_II, *pattern, part.damping, part.block)
        except torch.linalg.LinAlgError:
            raise ValueError(
                f'importance "sparsegpt": the inputs of {name} do not span its columns, and reconstruction.damping = '
                f"{part.damping:g} is too little to make up for it; use 0.01, or more calibration text"
            ) from None
        both = torch.stack([updated_OI, kept_OI.float()])
        return (both.transpose(1, 2) if transposed else both).reshape(2, -1)

    def _hand_back(self, name: str, solved: Tensor | None, owner: int) -> None:
        """Write what the owner decided to all shards of the weight."""
        on = self.on
        shard = on.shards[name]
        if on.layout.replicated or on.layout.world_size == 1:
            both = torch.empty(2, shard.numel, device=on.layout.device) if solved is None else solved
            if on.layout.world_size > 1:
                on.layout.broadcast(both, owner)
            self._take(shard, both)
        elif solved is not None:
            for holder, (start, stop) in enumerate(on.edges.ranges[name]):
                if holder == owner:
                    self._take(shard, solved[:, start:stop])
                elif stop > start:
                    on.layout.send(solved[:, start:stop].contiguous(), holder)
        elif shard.numel:
            both = torch.empty(2, shard.numel, device=on.layout.device)
            on.layout.receive(both, owner)
            self._take(shard, both)

    def _take(self, shard: Shard, both: Tensor) -> None:
        if self.part.update_weights:
            self.on.dense(shard).copy_(both[0])
        self.on.state.write_mask(shard, both[1])


def weights_of_blocks(model: nn.Module, weights: Collection[PrunableWeight]) -> dict[str, list[str]]:
    """Names of the weights of each decoder block. Raises ValueError where one belongs to no linear layer, as those of
    fused experts, or to several."""
    refuse_shared(model, weights, "be measured", '"importance": "magnitude"')
    blocks: dict[str, list[str]] = {}
    for weight in weights:
        layer = model.get_submodule(weight.module)
        if not isinstance(layer, (nn.Linear, Conv1D)):
            raise ValueError(
                'importance "sparsegpt" needs the inputs of a linear layer for every prunable weight, which '
                f'{weight.name} ({type(layer).__name__}) has not; use "wanda", or keep it dense with "exclude": '
                f'["{weight.name}"]'
            )
        blocks.setdefault(_block(weight.module), []).append(weight.name)
    return blocks


def _block(module: str) -> str:
    """The decoder block of a layer: its name up to the first number."""
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])
