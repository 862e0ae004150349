"""Running mean of row and column sums: the curvature's state where scores are made of sums.

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

_DAMAGED = "the checkpoint's sparseforge state has no or damaged row and column sums ({}); use another checkpoint"


class RunningSums:
    """Running mean in fp32, one slice a rank at every ZeRO stage."""

    def __init__(self, empty: AxisSums) -> None:
        """Begin with zeros for the matrices of `empty`."""
        self.layout = empty.matrices.layout
        self.numel = empty.bounds[-1][2]
        self._empty = empty
        self._lengths = empty.extents.sum(dim=1)
        self._size = math.ceil(self.numel / self.layout.world_size)
        self.slice = torch.zeros(self._size, device=self.layout.device)
        self._products = torch.zeros(3, dtype=torch.float64, device=self.layout.device)
        """Inner products of the newest sample and the mean before it: with each other, and each with itself."""

    @torch.no_grad()
    def take(self, sums: AxisSums, counts: Tensor, rates: Tensor) -> None:
        """Take a sample into the running mean. Collective, one reduction of fp32 to the slices.

        Args:
            sums: what this rank has summed.
            counts: (matrices,) divisors of the sums over all ranks; 0 for a matrix without tokens.
            rates: (matrices,) how far the mean of each moves to the sample.
        """
        ranks = self.layout.world_size
        padded = torch.nn.functional.pad(sums.values.float(), (0, self._size * ranks - self.numel))
        if ranks == 1:
            sample = padded
        else:
            sample = torch.empty_like(self.slice)
            self.layout.reduce_scatter(sample, padded)
        count, rate = self._of_each(torch.stack([counts, rates]))[:, self._own]
        sample /= count.clamp(min=1)
        table = torch.stack([sample * self.slice, sample.square(), self.slice.square()]).mul_(rate > 0)
        self._products = table.sum(dim=1, dtype=torch.float64)
        self.slice.lerp_(sample, rate)
        self.layout.all_reduce(self._products)

    def gather(self) -> AxisSums:
        """Return the sums of all matrices, in fp64. Collective."""
        return self._empty.holding(self._gathered().double())

    def numbers(self, sums: AxisSums, corrections: Tensor) -> Tensor:
        """Return (5,) fp64 on the device of the sums, for `metrics`.

        Args:
            sums: from `gather`.
            corrections: (matrices,) bias correction by which the mean of each is to be divided.
        """
        mean = (sums.totals() / corrections).sum()
        negative = (sums.values < 0).double().mean()
        return torch.cat([torch.stack([mean, negative]), self._products])

    def metrics(self, numbers: list[float]) -> dict[str, float]:
        """Return metrics for the log, of what `numbers` gave."""
        total, negative, agreement, new, old = numbers
        elements = sum(math.prod(shard.shape) for shard in self._empty.shards.values())
        metrics = {"curvature/mean": total / elements, "curvature/negative_share": negative}
        return metrics | ({"curvature/signal": agreement / math.sqrt(new * old)} if new > 0 and old > 0 else {})

    def state_dict(self) -> str:
        """Return little-endian fp32 in base64: a JSON type, the same at any world size. Collective."""
        return base64.b64encode(self._gathered().cpu().numpy().astype("<f4").tobytes()).decode("ascii")

    def check(self, state: object) -> None:
        """Raise ValueError where a saved state is not of these matrices, or damaged."""
        self._decoded(state)

    def load_state_dict(self, state: Any) -> None:
        """Continue with a state that `check` has passed. Does not communicate."""
        padded = torch.nn.functional.pad(self._decoded(state), (0, self._size * self.layout.world_size - self.numel))
        self.slice = padded[self._own].to(self.layout.device)

    @property
    def _own(self) -> slice:
        return slice(self.layout.rank * self._size, (self.layout.rank + 1) * self._size)

    def _gathered(self) -> Tensor:
        """Return (numel,) fp32 of all ranks."""
        if self.layout.world_size == 1:
            return self.slice[: self.numel]
        slices = self.slice.new_empty(self._size * self.layout.world_size)
        self.layout.all_gather(slices, self.slice)
        return slices[: self.numel]

    def _of_each(self, of_matrix: Tensor) -> Tensor:
        """Repeat (..., matrices) numbers for each of their sums, in fp32, padded with 0 to whole slices."""
        spread = of_matrix.float().repeat_interleave(self._lengths, dim=-1, output_size=self.numel)
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
