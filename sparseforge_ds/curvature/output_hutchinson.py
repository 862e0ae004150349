"""Hutchinson's estimate at the outputs of the linear layers, reduced to sums of rows and columns.

The paper's probe vector is one sign a weight, and every other weight's curvature is noise in it. Here it is one sign v
for every token and output of a layer, y = W x: with g = dL/dy, v (g(y + r v) - g(y - r v)) / 2r estimates D, the second
derivative of the loss with respect to each output at each token. The curvature of W_oi is the sum over tokens of
D_to x_ti^2, up to terms that couple two tokens, which are left out. There are as many samples of D as tokens. The
estimate is signed, and unbiased but for these terms.

Only the row sums, over tokens of D_to |x_t|^2, and the column sums, of (sum of D_t) x_ti^2, are formed: a few numbers a
token are kept between the two sides, where elements would need both sides' gradients. No weight-shaped matrix is
formed or reduced.

Legend of shape suffixes: T tokens, O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.axis_sums import AxisSums
from sparseforge_ds.curvature.context import EstimatorContext, SumsEstimator
from sparseforge_ds.mask.random_numbers import counter_key, rademacher_rows
from sparseforge_ds.zero.extra_passes import Closure, ProbeBatches
from sparseforge_ds.zero.layer_hooks import token_gradients

RADIUS = 0.1
"""Step relative to the RMS of a token's outputs; the same in all dtypes."""
_LEAST = 1e-6
"""Step where all outputs of a token are 0."""
_CALLED_AGAIN = (
    "{}: its layer is called more than once in a forward, or the two calls of a probe give it other tokens, so that "
    'tokens cannot be matched; use importance "fisher"'
)


@dataclass
class _Between:
    """Numbers of a layer that wait between the two sides of a probe."""

    radius_T: Tensor
    """Radius r of each token, in the dtype of the outputs."""
    square_T: Tensor | None = None
    """|x|^2 of the first side, until the second has used it."""
    slope_T: Tensor | None = None
    """Sum over outputs of v g / 2r, of the first side."""


class OutputHutchinson(SumsEstimator):
    """v (g(y + r v) - g(y - r v)) / 2r at the outputs, times x^2."""

    def __init__(self, context: EstimatorContext, config: SparseForgeConfig) -> None:
        self.context = context
        self.seed = config.seed
        self.radius = config.curvature.radius or RADIUS
        self._sums: AxisSums | None = None
        self._passes = 0
        assert context.modules.keys() == context.shards.keys() and not context.expert_load.rows  # refused before

    @override
    def refresh(self, batches: ProbeBatches, step: int, probes: int) -> bool:
        """Collect the sums in two forward and backward passes for every pass of a batch."""
        context = self.context
        sums = self._sums = context.empty_sums.zeros()
        self._passes = 0
        for batch in range(probes):
            keys = {name: counter_key(self.seed, step, batch, f"{name} outputs") for name in context.shards}
            for number, closure in enumerate(batches.passes(batch)):
                by_layer: dict[str, _Between] = {}
                for side in (1.0, -1.0):
                    self._pass(closure, side, keys, number, by_layer, sums)
                self._passes += 1
        return context.extra_passes.usable(sums.values)

    @override
    def finish(self) -> tuple[AxisSums, Tensor]:
        assert self._sums is not None
        for name in self.context.shards:
            output_O, input_I = self.context.sums_of(name, self._sums)
            # Both have the same total, but for x, which each took from another side.
            output_O += (input_I.sum() - output_O.sum()) / len(output_O)
        passes = float(self.context.layout.world_size * self._passes)
        sums = self._sums
        self._sums = None
        return sums, sums.values.new_full((len(self.context.matrices.names),), passes)

    def _pass(
        self,
        closure: Closure,
        side: float,
        keys: dict[str, int],
        number: int,
        by_layer: dict[str, _Between],
        sums: AxisSums,
    ) -> None:
        """Add one side of the difference on pass `number` to `sums`."""
        context = self.context

        # The same signs move the outputs, and multiply their gradients.
        def signs(name: str, like_TO: Tensor) -> Tensor:
            tokens = context.tokens_of(number, like_TO.shape[0])  # signs belong to the tokens, whoever has them
            runs = [rademacher_rows(keys[name], run.start, len(run), like_TO.shape[1], like_TO) for run in tokens]
            return runs[0] if len(runs) == 1 else torch.cat(runs)

        def displacement(name: str, output_TO: Tensor) -> Tensor:
            if name not in by_layer:
                size_T = squares_in_fp32(output_TO).mean(dim=1).sqrt()
                by_layer[name] = _Between((self.radius * size_T).clamp_(min=_LEAST).to(output_TO.dtype))
            elif len(by_layer[name].radius_T) != len(output_TO):
                raise ValueError(_CALLED_AGAIN.format(name))
            return signs(name, output_TO).mul_((side * by_layer[name].radius_T)[:, None])

        def receive(name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
            layer = by_layer[name]
            if (layer.slope_T is None) != (side > 0):
                raise ValueError(_CALLED_AGAIN.format(name))
            scale_T = 1 / (2 * context.extra_passes.backward_scale * layer.radius_T.float())
            slope_TO = (grad_TO * signs(name, grad_TO)).float().mul_(scale_T[:, None])
            slope_T = slope_TO.sum(dim=1)
            square_TI = squares_in_fp32(input_TI)
            output_O, input_I = context.sums_of(name, sums)
            if layer.slope_T is None:
                layer.slope_T = slope_T
                layer.square_T = square_TI.sum(dim=1)
            else:
                input_I += (layer.slope_T - slope_T) @ square_TI
            assert layer.square_T is not None
            output_O += side * (layer.square_T @ slope_TO)

        with token_gradients(context.modules, receive, displacement):
            context.extra_passes.activations((closure,))


def squares_in_fp32(values: Tensor) -> Tensor:
    """Return the squares in fp32, in the only copy of the values that is made."""
    return values.to(torch.float32, copy=True).square_()
