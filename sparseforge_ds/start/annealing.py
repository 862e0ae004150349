"""Soft masks that are annealed inside one decoder block, by the block's own error (eqs. 3 to 11).

They begin at 1 on weights that already have a first mask: what it pruned is 0, and comes back where it grows.

This is the method of `methods.soft_mask` on whole matrices. Scores come from row and column sums of squared gradients
of each token; the published weight is a blend of soft and hard mask, and W moves by the share m_eff of each optimizer
step. The blend x and the rates take a new value at every mask update, not at every step: between updates m_eff stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparseforge_ds.config.soft_mask_config import SoftMaskConfig
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.factored import shares
from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels.fisher import InputSquares, add_fisher_sums, expert_fisher_sums
from sparseforge_ds.mask.kernels.fused_update import update_mask_in_place
from sparseforge_ds.mask.kernels.groups import survivors
from sparseforge_ds.mask.kernels.scores import RankOne, score_moments
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.start.first_mask import Reduce
from sparseforge_ds.zero.expert_hooks import expert_tokens
from sparseforge_ds.zero.layer_hooks import token_gradients

DECAY = 0.9
"""Decay of the running sums, once an update; their scale cancels in a standardized score."""
DAMPING = 1e-4
"""eps of the score, relative to the mean curvature of a matrix (eq. 3)."""


@dataclass
class _Annealed:
    """One weight whose mask is soft."""

    weight: PrunableWeight
    parameter: nn.Parameter
    dense: Tensor
    """W, flat in fp32; the parameter holds m_eff W."""
    mask: Tensor
    """m, flat in fp32."""
    effective: Tensor
    """m_eff, flat in fp32."""
    sums: Tensor
    """Decayed row and column sums, (matrices, R + C) in fp64."""
    new_sums: Tensor
    """Row and column sums of this rank since the last update, in the same shape."""
    fixed: list[bool] | None = None
    """True for each matrix whose mask does not move; None if all move."""


class Annealing:
    """Soft masks of a block's weights, until they are frozen."""

    def __init__(
        self,
        block: nn.Module,
        weights: Sequence[PrunableWeight],
        pattern: Pattern,
        steps: int,
        first_masks: Mapping[str, Tensor],
        starved: Mapping[str, Tensor],
    ) -> None:
        """Begin with masks of ones.

        Args:
            block: the decoder block; what its first masks prune is 0.
            weights: its prunable weights, by names inside the block.
            pattern: of the masks.
            steps: optimizer steps until the masks freeze, at least 2.
            first_masks: bool in the shape of each weight.
            starved: (E,) bool by weight of experts: True for experts that keep their first mask.
        """
        self._block = block
        self._pattern = pattern
        self._squares = InputSquares()
        # The default schedule, squeezed into these steps.
        defaults = SoftMaskConfig()
        schedule = defaults.schedule(max(1, round(steps / defaults.hardening[1])))
        self.schedule = replace(schedule, freeze_step=min(schedule.freeze_step, steps))
        self._soft: dict[str, _Annealed] = {}
        for weight in weights:
            self._soft[weight.name] = self._begin(weight, first_masks[weight.name], starved.get(weight.name))

    def _begin(self, weight: PrunableWeight, first_mask: Tensor, starved_E: Tensor | None) -> _Annealed:
        """Return a weight with a mask of ones, or with its first mask for starved experts."""
        parameter = self._block.get_parameter(weight.name)
        dense = parameter.detach().reshape(-1).clone()
        sums = dense.new_zeros(weight.matrices, sum(weight.matrix), dtype=torch.float64)
        soft = _Annealed(
            weight=weight,
            parameter=parameter,
            dense=dense,
            mask=torch.ones_like(dense),
            effective=torch.ones_like(dense),
            sums=sums,
            new_sums=sums.clone(),
        )
        # Masks of experts with too few tokens do not move.
        if starved_E is not None:
            fixed_M = starved_E.repeat_interleave(weight.matrices // len(starved_E))
            soft.fixed = fixed_M.tolist()
            for mask in (soft.mask, soft.effective):
                mask_MN = mask.view(weight.matrices, -1)
                mask_MN.copy_(torch.where(fixed_M[:, None], first_mask.view_as(mask_MN).float(), mask_MN))
        return soft

    @contextmanager
    def collect_sums(self) -> Iterator[None]:
        """Add the squared gradients of every backward pass in the block to the sums."""
        layers = {name: soft.weight for name, soft in self._soft.items() if len(soft.weight.shape) == 2}
        fused = sorted({soft.weight.module for name, soft in self._soft.items() if name not in layers})
        modules = {name: self._block.get_submodule(weight.module) for name, weight in layers.items()}
        experts = {name: self._block.get_submodule(name) for name in fused}
        with token_gradients(modules, self._add_layer), expert_tokens(experts, self._add_experts):
            yield

    @torch.no_grad()
    def after_step(self, step: int, reduce: Reduce) -> dict[str, Tensor] | None:
        """Move W and, at an update, the masks, after an optimizer step of the published weights.

        Args:
            step: number of the step; the first is 1.
            reduce: sums tensors over the ranks, in place.

        Returns:
            The masks, in the weights' shapes, if this step froze them; else None.
        """
        # W takes the share m_eff of the step that the published weight took.
        for soft in self._soft.values():
            step_taken = soft.parameter.detach().reshape(-1) - soft.dense * soft.effective
            soft.dense.addcmul_(step_taken, soft.effective)
        # Masks are frozen at the end of the schedule, and move at its updates.
        frozen: dict[str, Tensor] = {}
        if step >= self.schedule.freeze_step:
            for name, soft in self._soft.items():
                kept = self._hard(soft)
                frozen[name] = kept.view(soft.weight.shape)
                soft.effective = kept.float()
        elif self.schedule.is_update(step):
            reduce([soft.new_sums for soft in self._soft.values()])
            for soft in self._soft.values():
                self._update(soft, self.schedule.dials(step))
        for soft in self._soft.values():
            self._publish(soft)
        return frozen or None

    def _update(self, soft: _Annealed, dials: Dials) -> None:
        """Move the mask of a weight (eqs. 3 to 9), and form the effective one (eq. 10)."""
        # eq. 2: sums of new tokens enter the decayed sums.
        soft.sums.mul_(DECAY).add_(soft.new_sums)
        soft.new_sums.zero_()
        weight = soft.weight
        rows, columns = weight.matrix
        extents = torch.tensor([[rows, columns]] * weight.matrices, device=soft.sums.device)
        factors_MN = shares(soft.sums.reshape(-1), extents).view(weight.matrices, -1)
        # A matrix without any gradient has H = 1, as in a run: its scores are W^2.
        factors_MN = torch.where(soft.sums.any(dim=1, keepdim=True), factors_MN, 1.0)
        # eqs. 3 to 9: each matrix is scored by itself.
        curvatures = [RankOne(factors_N[:rows], factors_N[rows:], 0) for factors_N in factors_MN]
        dense, mask = (vector.view(weight.matrices, -1).unbind() for vector in (soft.dense, soft.mask))
        moments = torch.stack([score_moments(w, h) for w, h in zip(dense, curvatures, strict=True)])
        scaling = scalings(moments, DAMPING)
        for number, (w, m, h) in enumerate(zip(dense, mask, curvatures, strict=True)):
            if soft.fixed is None or not soft.fixed[number]:
                update_mask_in_place(w, m, h, scaling[number], dials, self._pattern, weight.matrix, weight.input_axis)
        # eq. 10: the effective mask is between the hard and the soft one.
        soft.effective = torch.lerp(self._hard(soft).float(), soft.mask, dials.x)

    def _hard(self, soft: _Annealed) -> Tensor:
        """Return the top N of every group of the mask, flat bool."""
        weight = soft.weight
        kept_GM = survivors(self._pattern.to_groups(soft.mask, weight.shape, weight.input_axis), self._pattern)
        return self._pattern.from_groups(kept_GM, weight.shape, weight.input_axis)

    def _publish(self, soft: _Annealed) -> None:
        # eq. 1: the network sees m_eff W.
        soft.parameter.data.copy_((soft.dense * soft.effective).view(soft.weight.shape))

    def _add_layer(self, name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
        """Add the tokens of a linear layer to its sums."""
        soft = self._soft[name]
        rows, columns = soft.new_sums[0].split(list(soft.weight.matrix))
        output, inputs = (rows, columns) if soft.weight.input_axis == -1 else (columns, rows)
        add_fisher_sums(grad_TO, input_TI, 1.0, output, inputs, squares=self._squares)

    def _add_experts(
        self, layer: str, parameter: str, grad_SO: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
    ) -> None:
        """Add the tokens of a layer's fused experts to their sums."""
        soft = self._soft.get(f"{layer}.{parameter}")
        if soft is None:
            return
        assert grad_SO is not None
        output_input_sums = expert_fisher_sums(grad_SO, input_SI, stop_E, soft.weight.stacked)
        row_column_sums = output_input_sums if soft.weight.input_axis == -1 else output_input_sums[::-1]
        soft.new_sums += torch.cat(row_column_sums, dim=2).view_as(soft.new_sums)
