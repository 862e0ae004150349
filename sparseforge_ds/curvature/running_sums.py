"""The running mean of row and column sums: what is kept of the curvature where scores are made of sums.

A running mean of sums is the sum of the running mean, so a matrix with R rows and C columns needs R + C numbers instead
of R C. All matrices' numbers are one vector, of which every rank keeps a slice: a sample is reduced to the slices, and
an update gathers the whole.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.zero.matrices import Matrices
from sparseforge_ds.zero.shard import Shard

_DAMAGED = "the checkpoint's sparseforge state has no or damaged row and column sums ({}); use another checkpoint"


class RunningSums:
    """fp32, one slice a rank at every ZeRO stage."""

    def __init__(self, matrices: Matrices, shards: dict[str, Shard]) -> None:
        """Zeros."""
        self.matrices = matrices
        self.shards = shards
        self.layout = matrices.layout
        sums = AxisSums(matrices, shards, self.layout.device)
        self.numel = sums.values.numel()
        self._empty = sums.holding(sums.values.new_empty(0))
        self._lengths = sums.extents.sum(dim=1)
        self._size = math.ceil(self.numel / self.layout.world_size)
        self.slice = torch.zeros(self._size, device=self.layout.device)
        self._products = torch.zeros(3, dtype=torch.float64, device=self.layout.device)
        """Of the newest sample and the mean before it: their product, and each one's with itself."""

    @torch.no_grad()
    def take(self, sums: AxisSums, counts: Tensor, rates: Tensor) -> None:
        """Take a sample into the running mean. Collective, one reduction of fp32 to the slices.

        Args:
            sums: what this rank has summed.
            counts: (matrices,) by which the sums of each over all ranks are to be divided; 0 where there are none.
            rates: (matrices,) how far the mean of each moves to the sample.
        """
        ranks, mine = self.layout.world_size, self._mine
        padded = torch.nn.functional.pad(sums.values.float(), (0, self._size * ranks - self.numel))
        if ranks == 1:
            sample = padded
        else:
            sample = torch.empty_like(self.slice)
            self.layout.reduce_scatter(sample, padded)
        sample /= self._of_each(counts)[mine].clamp(min=1)
        rate = self._of_each(rates)[mine]
        table = torch.stack([sample * self.slice, sample.square(), self.slice.square()]).mul_(rate > 0)
        self._products = table.sum(dim=1, dtype=torch.float64)
        self.slice.lerp_(sample, rate)
        self.layout.all_reduce(self._products)

    def gather(self) -> AxisSums:
        """Return the sums of all matrices, in fp64. Collective."""
        return self._empty.holding(self._gathered().double())

    def numbers(self, sums: AxisSums, corrections: Tensor) -> Tensor:
        """(5,) fp64 on the device of the sums: what `metrics` takes.

        Args:
            sums: from `gather`.
            corrections: (matrices,) bias correction by which the mean of each is to be divided.
        """
        mean = (sums.totals() / corrections).sum()
        negative = (sums.values < 0).double().mean()
        return torch.cat([torch.stack([mean, negative]), self._products])

    def metrics(self, numbers: list[float]) -> dict[str, float]:
        """For the log."""
        total, negative, agreement, new, old = numbers
        elements = sum(math.prod(shard.shape) for shard in self.shards.values())
        metrics = {"curvature/mean": total / elements, "curvature/negative_share": negative}
        return metrics | ({"curvature/signal": agreement / math.sqrt(new * old)} if new > 0 and old > 0 else {})

    def state_dict(self) -> str:
        """Little-endian fp32 in base64, the same at any world size: a JSON type, a third larger than the numbers.
        Collective."""
        return base64.b64encode(self._gathered().cpu().numpy().astype("<f4").tobytes()).decode("ascii")

    def check(self, state: object) -> None:
        """Whether a saved state is of these matrices.

        Raises:
            ValueError: it is not, or it is damaged.
        """
        self._decoded(state)

    def load_state_dict(self, state: Any) -> None:
        """Continue with a state that `check` found good. Does not communicate."""
        whole = torch.nn.functional.pad(self._decoded(state), (0, self._size * self.layout.world_size - self.numel))
        self.slice = whole[self._mine].to(self.layout.device)

    @property
    def _mine(self) -> slice:
        return slice(self.layout.rank * self._size, (self.layout.rank + 1) * self._size)

    def _gathered(self) -> Tensor:
        """(numel,) fp32."""
        if self.layout.world_size == 1:
            return self.slice[: self.numel]
        whole = self.slice.new_empty(self._size * self.layout.world_size)
        self.layout.all_gather(whole, self.slice)
        return whole[: self.numel]

    def _of_each(self, of_matrix: Tensor) -> Tensor:
        """(matrices,) -> one fp32 number for each of its sums, padded with 0 to whole slices."""
        spread = of_matrix.float().repeat_interleave(self._lengths, output_size=self.numel)
        return torch.nn.functional.pad(spread, (0, self._size * self.layout.world_size - self.numel))

    def _decoded(self, state: object) -> Tensor:
        if not isinstance(state, str):
            raise ValueError(_DAMAGED.format(type(state).__name__))
        try:
            numbers = np.frombuffer(base64.b64decode(state, validate=True), dtype="<f4")
        except ValueError as error:
            raise ValueError(_DAMAGED.format(error)) from None
        if len(numbers) != self.numel or not np.isfinite(numbers).all():
            raise ValueError(_DAMAGED.format(f"{len(numbers)} numbers, {self.numel} expected, all finite"))
        return torch.from_numpy(numbers.astype(np.float32))
