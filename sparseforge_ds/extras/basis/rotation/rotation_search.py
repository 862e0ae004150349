"""Search for the rotations in which a pattern removes the least score.

DenoiseRotator (arXiv 2505.23049) learns two rotations for a layer that concentrate importance, and must compute one of
them at inference. Here the residual stream has one rotation for the whole model, which its weights absorb. The loss is
the score that the pattern removes, which is differentiable almost everywhere. Rotations move along skew-symmetric
directions, by Adam's rule on the gradient there.

Legend of shape suffixes: E experts (1 of a weight that is not fused), I inputs, O outputs, B blocks, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.extras.basis.rotation.moments import ScoredWeight, matrix_axes
from sparseforge_ds.extras.basis.rotation.stream import RESIDUAL, Stream
from sparseforge_ds.extras.basis.rotation.transform import Rotations, absorb_gain, residual_axis, rotate_axis
from sparseforge_ds.mask.pattern import NM

_RATE = 0.4
"""Largest step, as an angle times the root of the channels: a rotation's own size grows like that root."""
_BETAS = (0.9, 0.99)
_ELEMENTS = 1 << 24
"""Maximum of elements of weights in a step."""
_SHARE = 0.4
"""Share of a small model's elements in a step; with all of them the search ends at a worse minimum."""
_WEIGHTS = 16
"""Number of weights that a step samples from in a large model."""


@dataclass(frozen=True)
class RotationResult:
    """Rotations and their gain."""

    rotations: Rotations
    removed: float
    """Score that the pattern removes, relative to the score without rotations; in large models of a sample."""


class RotationSearch:
    """Search on the weights of one model.

    Args:
        read: returns a weight by its name.
        stream: the dimensions that can be rotated.
        scored: the weights to prune, with their moments.
        pattern: N of every M.
        seed: seed of the samples.
    """

    def __init__(
        self,
        read: Callable[[str], Tensor],
        stream: Stream,
        scored: Sequence[ScoredWeight],
        pattern: NM,
        seed: int,
    ) -> None:
        self._read = read
        self._stream = stream
        self._pattern = pattern
        self._scored = [weight for weight in scored if weight.inputs.dimension or weight.outputs.dimension]
        self._total = sum(weight.weight.numel for weight in self._scored)
        self._generator = torch.Generator().manual_seed(seed)

    def run(self, steps: int) -> RotationResult:
        """Search from the model's own basis.

        Raises:
            ValueError: the weights are in the pattern already.
        """
        device = self._scored[0].inputs.square_EC.device
        rotations = {
            name: torch.eye(dimension.channels, device=device).repeat(dimension.blocks, 1, 1)
            for name, dimension in self._stream.rotated.items()
        }
        moments = {name: (torch.zeros_like(r), torch.zeros_like(r)) for name, r in rotations.items()}
        # The same sample measures the score before and after.
        measured = self._sample(_ELEMENTS)
        with torch.no_grad():
            before = self._removed(rotations, measured)
        if before == 0:
            raise ValueError(
                f"rotate: the weights are {self._pattern} already, so the pattern removes nothing; start from the "
                "dense model"
            )
        for step in tqdm(range(steps), unit=" steps", disable=None):
            # The gradient of the removed score of a new sample.
            leaves = {name: rotation.requires_grad_() for name, rotation in rotations.items()}
            (self._removed(leaves, self._sample(min(_ELEMENTS, int(_SHARE * self._total)))) / before).backward()
            for name, rotation in rotations.items():
                gradient_BCC = torch.zeros_like(rotation) if rotation.grad is None else rotation.grad
                rotation = rotation.detach()
                # Adam's moments, in the space of skew-symmetric directions.
                skew_BCC = self._tangent(name, rotation.mT @ gradient_BCC)
                first, second = moments[name]
                first.lerp_(skew_BCC, 1 - _BETAS[0])
                second.lerp_(skew_BCC.square(), 1 - _BETAS[1])
                bias_correction = math.sqrt(1 - _BETAS[1] ** (step + 1)) / (1 - _BETAS[0] ** (step + 1))
                # The step follows a geodesic, with a rate that falls like a cosine.
                angle = _RATE / math.sqrt(rotation.shape[-1]) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
                direction_BCC = self._tangent(name, first * (bias_correction / (second.sqrt() + 1e-12)))
                rotations[name] = rotation @ torch.matrix_exp(-angle * direction_BCC)
        exact = {name: _orthogonal(rotation) for name, rotation in rotations.items()}
        with torch.no_grad():
            return RotationResult(exact, float(self._removed(exact, measured) / before))

    def _tangent(self, name: str, value_BCC: Tensor) -> Tensor:
        """Return the skew-symmetric part; if norms subtract the mean, only what keeps the vector of ones."""
        value_BCC = (value_BCC - value_BCC.mT) / 2
        if name == RESIDUAL and self._stream.keeps_ones:
            value_BCC = value_BCC - value_BCC.mean(-1, keepdim=True)
            value_BCC = value_BCC - value_BCC.mean(-2, keepdim=True)
        return value_BCC

    def _sample(self, elements: int) -> list[tuple[ScoredWeight, Tensor | None]]:
        """Sample weights, and positions along the axis of each that is not rotated; None for all positions."""
        if self._total <= elements:
            return [(scored, None) for scored in self._scored]
        chosen = torch.randperm(len(self._scored), generator=self._generator)[:_WEIGHTS]
        weights = [self._scored[int(index)] for index in chosen]
        return [(scored, self._sample_positions(scored, elements // len(chosen))) for scored in weights]

    def _sample_positions(self, scored: ScoredWeight, elements: int) -> Tensor | None:
        """Sample outputs of a weight, or complete groups of its inputs; None for all."""
        weight = scored.weight
        share = elements / weight.numel
        if share >= 1 or (scored.inputs.dimension and scored.outputs.dimension):
            return None
        # Sample along the side that is not rotated.
        inputs, outputs = matrix_axes(weight)
        side, unit = (inputs, self._pattern.members) if scored.inputs.dimension is None else (outputs, 1)
        count = weight.shape[side] // unit
        first = torch.randperm(count, generator=self._generator)[: max(1, round(share * count))].sort().values
        return (first[:, None] * unit + torch.arange(unit)).flatten()

    def _removed(self, rotations: Rotations, sample: list[tuple[ScoredWeight, Tensor | None]]) -> Tensor:
        """Sum the score that the pattern removes from a sample of the rotated weights."""
        return torch.stack([self._removed_from(scored, positions, rotations) for scored, positions in sample]).sum()

    def _removed_from(self, scored: ScoredWeight, positions: Tensor | None, rotations: Rotations) -> Tensor:
        """Estimate the score that the pattern removes from one rotated weight, by its elements at `positions`."""
        weight = scored.weight
        value = self._read(weight.name).float()
        side_I, side_O = matrix_axes(weight)
        axes = list(self._stream.axes(weight.name))
        square_EI = scored.inputs.diagonal(rotations)
        square_EO = scored.outputs.diagonal(rotations)
        # The sample, scaled to the whole weight.
        scale = 1.0
        if positions is not None:
            positions = positions.to(value.device)
            free = side_I if scored.inputs.dimension is None else side_O
            scale = value.shape[free] / len(positions)
            value = value.index_select(free, positions)
            if free == side_I:
                square_EI = square_EI[:, positions]
            else:
                square_EO = square_EO[:, positions]
        # The weight in the new basis.
        if weight.name in self._stream.norm_of:
            value = absorb_gain(value, residual_axis(axes), self._stream.gains[self._stream.norm_of[weight.name]])
        for name, axis in axes:
            value = rotate_axis(value, axis, rotations[name])
        # The N:M pattern removes the smallest scores of every group of inputs.
        value = value if value.dim() == 3 else value[None]
        score_EOI = value.square().movedim(side_I, -1) * square_EO[:, :, None] * square_EI[:, None, :]
        groups = score_EOI.reshape(-1, self._pattern.members)
        removed = groups.topk(self._pattern.members - self._pattern.n, dim=1, largest=False).values
        return scale * removed.sum()


def _orthogonal(rotation_BCC: Tensor) -> Tensor:
    """Remove the accumulated rounding of a rotation by a QR decomposition."""
    q_BCC, r_BCC = torch.linalg.qr(rotation_BCC.detach().double())
    return (q_BCC * r_BCC.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]).float()
