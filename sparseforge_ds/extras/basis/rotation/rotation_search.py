"""The search for the rotations in which a pattern removes the least score.

DenoiseRotator (arXiv 2505.23049) learns rotations by which importance is concentrated, two for a layer, one of which it
has to compute at inference. Here the residual stream has one for the whole model, which its weights absorb, and what
is minimized is what the pattern itself removes. It is differentiable almost everywhere. Rotations move along
skew-symmetric directions, by Adam's rule on the gradient taken there.

Legend of shape suffixes: E experts (1 of a weight that is not fused), I inputs, O outputs, B blocks, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from sparseforge_ds.extras.basis.rotation.moments import Scored, sides_of
from sparseforge_ds.extras.basis.rotation.stream import RESIDUAL, Stream
from sparseforge_ds.extras.basis.rotation.turn import Rotations, residual_axis, scaled, turned
from sparseforge_ds.mask.pattern import NM

_RATE = 0.4
"""Largest step, as an angle times the root of the channels: a rotation's own size grows like that root."""
_BETAS = (0.9, 0.99)
_ELEMENTS = 1 << 24
"""Of weights that a step looks at, most."""
_SHARE = 0.4
"""Of the elements of a small model that a step looks at: with all of them the search stops at a worse place."""
_WEIGHTS = 16
"""That a step draws its sample from, where all would be too many."""


@dataclass(frozen=True)
class Found:
    """Rotations, and what they gain."""

    rotations: Rotations
    removed: float
    """Score that the pattern removes, relative to what it removes without them; of a sample where a model is large."""


class Search:
    """A search on the weights of one model."""

    def __init__(
        self,
        read: Callable[[str], Tensor],
        stream: Stream,
        scored: Sequence[Scored],
        pattern: NM,
        seed: int,
    ) -> None:
        """`read` gives a weight by its name."""
        self._read, self._stream, self._pattern = read, stream, pattern
        self._scored = [held for held in scored if held.inputs.dimension or held.outputs.dimension]
        self._total = sum(held.weight.numel for held in self._scored)
        self._generator = torch.Generator().manual_seed(seed)

    def run(self, steps: int) -> Found:
        """Start from the basis that the model has. Raises ValueError for weights that are in the pattern already."""
        device = self._scored[0].inputs.square_EC.device
        rotations = {
            name: torch.eye(held.channels, device=device).repeat(held.blocks, 1, 1)
            for name, held in self._stream.rotated.items()
        }
        moments = {name: (torch.zeros_like(r), torch.zeros_like(r)) for name, r in rotations.items()}
        measured = self._sample(_ELEMENTS)
        with torch.no_grad():
            before = self._removed(rotations, measured)
        if before == 0:
            raise ValueError(
                f"rotate: the weights are {self._pattern} already, so that the pattern removes nothing; start from "
                "the dense model"
            )
        for step in tqdm(range(steps), unit=" steps", disable=None):
            leaves = {name: rotation.requires_grad_() for name, rotation in rotations.items()}
            (self._removed(leaves, self._sample(min(_ELEMENTS, int(_SHARE * self._total)))) / before).backward()
            for name, rotation in rotations.items():
                gradient_BCC = torch.zeros_like(rotation) if rotation.grad is None else rotation.grad
                rotation = rotation.detach()
                skew_BCC = self._tangent(name, rotation.mT @ gradient_BCC)
                first, second = moments[name]
                first.lerp_(skew_BCC, 1 - _BETAS[0])
                second.lerp_(skew_BCC.square(), 1 - _BETAS[1])
                size = math.sqrt(1 - _BETAS[1] ** (step + 1)) / (1 - _BETAS[0] ** (step + 1))
                angle = _RATE / math.sqrt(rotation.shape[-1]) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
                direction_BCC = self._tangent(name, first * (size / (second.sqrt() + 1e-12)))
                rotations[name] = rotation @ torch.matrix_exp(-angle * direction_BCC)
        exact = {name: _orthogonal(rotation) for name, rotation in rotations.items()}
        with torch.no_grad():
            return Found(exact, float(self._removed(exact, measured) / before))

    def _tangent(self, name: str, value_BCC: Tensor) -> Tensor:
        """The skew-symmetric part; if norms subtract the mean, the part that keeps the vector of ones."""
        value_BCC = (value_BCC - value_BCC.mT) / 2
        if name == RESIDUAL and self._stream.keeps_ones:
            value_BCC = value_BCC - value_BCC.mean(-1, keepdim=True)
            value_BCC = value_BCC - value_BCC.mean(-2, keepdim=True)
        return value_BCC

    def _sample(self, elements: int) -> list[tuple[Scored, Tensor | None]]:
        """Weights, and of each the places along the axis that is not rotated; None for all."""
        if self._total <= elements:
            return [(held, None) for held in self._scored]
        chosen = torch.randperm(len(self._scored), generator=self._generator)[:_WEIGHTS]
        return [(held := self._scored[int(i)], self._places(held, elements // len(chosen))) for i in chosen]

    def _places(self, held: Scored, elements: int) -> Tensor | None:
        """A sample of outputs, or of whole groups of inputs."""
        weight, unit = held.weight, 1
        share = elements / weight.numel
        if share >= 1 or (held.inputs.dimension and held.outputs.dimension):
            return None
        side = 1
        if held.inputs.dimension is None:
            side, unit = 0, self._pattern.members
        count = weight.shape[sides_of(weight)[side]] // unit
        first = torch.randperm(count, generator=self._generator)[: max(1, round(share * count))].sort().values
        return (first[:, None] * unit + torch.arange(unit)).flatten()

    def _removed(self, rotations: Rotations, sample: list[tuple[Scored, Tensor | None]]) -> Tensor:
        """The score that the pattern removes from a sample of the rotated weights."""
        return torch.stack([self._removed_from(held, places, rotations) for held, places in sample]).sum()

    def _removed_from(self, held: Scored, places: Tensor | None, rotations: Rotations) -> Tensor:
        weight = held.weight
        value = self._read(weight.name).float()
        side_I, side_O = sides_of(weight)
        axes = list(self._stream.axes(weight.name))
        square_EI, square_EO = held.inputs.diagonal(rotations), held.outputs.diagonal(rotations)
        scale = 1.0
        if places is not None:
            places = places.to(value.device)
            free = side_I if held.inputs.dimension is None else side_O
            scale = value.shape[free] / len(places)
            value = value.index_select(free, places)
            if free == side_I:
                square_EI = square_EI[:, places]
            else:
                square_EO = square_EO[:, places]
        if weight.name in self._stream.norm_of:
            value = scaled(value, residual_axis(axes), self._stream.gains[self._stream.norm_of[weight.name]])
        for name, axis in axes:
            value = turned(value, axis, rotations[name])
        value = value if value.dim() == 3 else value[None]
        score_EOI = value.square().movedim(side_I, -1) * square_EO[:, :, None] * square_EI[:, None, :]
        groups = score_EOI.reshape(-1, self._pattern.members)
        removed = groups.topk(self._pattern.members - self._pattern.n, dim=1, largest=False).values
        return scale * removed.sum()


def _orthogonal(rotation_BCC: Tensor) -> Tensor:
    """An exactly orthogonal one within the rounding that has led away from it."""
    q_BCC, r_BCC = torch.linalg.qr(rotation_BCC.detach().double())
    return (q_BCC * r_BCC.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]).float()
