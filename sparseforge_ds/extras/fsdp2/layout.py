"""The shards of a model under FSDP2: each rank holds consecutive rows of every weight."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from sparseforge_ds.zero.shard import MaskGradient, Shard, ShardLayout


class Fsdp2Layout(ShardLayout):
    """Layout of DTensors that are divided along dimension 0, whose local tensors are the masters."""

    def _data_parallel_group(self) -> Any:
        return self.optimizer.mesh.get_group()

    def _read(self) -> None:
        for param_group in self.optimizer.weights:
            for weight, master in param_group:
                # FSDP2 divides rows as torch.chunk does: all ranks but the last ones have the same number.
                length = math.ceil(weight.shape[0] / self.world_size) * math.prod(weight.shape[1:])
                start = min(self.rank * length, weight.numel())
                self._add(weight, tuple(weight.shape), start, start + master.numel(), len(self.flats), 0)
                self.flats.append(master)
        self.param_group_of_flat = [
            index for index, param_group in enumerate(self.optimizer.weights) for _ in param_group
        ]
        self._compute_dtype = self._find_compute_dtype()

    def _low_precision_of(self, shard: Shard) -> Tensor:
        part: Tensor = self.low_precision[shard.name].to_local().detach().reshape(-1)
        return part

    @property
    @override
    def compute_dtype(self) -> torch.dtype:
        return self._compute_dtype

    def _find_compute_dtype(self) -> torch.dtype:
        """Return the dtype in which FSDP2 gathers the weights under a mask."""
        # A weight belongs to the nearest sharded module around it, whose policy no public name gives.
        sharded = {
            name: module for name, module in self.engine.module.named_modules() if isinstance(module, FSDPModule)
        }
        dtypes = set()
        for weight in self.marked:
            owner = weight.rpartition(".")[0]
            while owner and owner not in sharded:
                owner = owner.rpartition(".")[0]
            if owner not in sharded:
                raise ValueError(f"{weight}: no module around it was given to fully_shard; shard the whole model")
            dtypes.add(sharded[owner]._get_fsdp_state()._mp_policy.param_dtype or super().compute_dtype)
        if len(dtypes) > 1:
            raise ValueError(
                f"fully_shard was given {' and '.join(sorted(map(str, dtypes)))} as MixedPrecisionPolicy.param_dtype "
                "of modules whose weights are pruned; give one for all of these"
            )
        return dtypes.pop() if dtypes else super().compute_dtype

    @override
    def mask_gradients(self, mask: MaskGradient) -> None:
        for name, shard in self.shards.items():
            if (gradient := self.low_precision[name].grad) is not None:
                mask(shard.flat, 0, gradient.to_local().view(-1))

    @torch.no_grad()
    @override
    def push(self) -> None:
        """Drop weights that FSDP2 has gathered: masters are the local tensors that the next forward gathers."""
        for module in self.engine.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    def untrained(self) -> dict[str, tuple[int, int, Tensor]]:
        raise ValueError(
            "weights outside the optimizer cannot be read under FSDP2 yet; a block-wise start, and a "
            "restored checkpoint, need DeepSpeed"
        )
