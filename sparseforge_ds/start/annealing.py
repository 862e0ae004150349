"""Soft masks that are annealed inside one decoder block, by the block's own error (design eqs. 3 to 11).

It is the method of `methods.soft_mask` on whole matrices: scores from row and column sums of the squared gradients of
each token, gate, blend, running mean, and a share of each optimizer step for weights on their way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparseforge_ds.config.soft_mask_config import SoftMaskConfig
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.factored import shares
from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels.fisher import add_fisher_sums, expert_fisher_sums
from sparseforge_ds.mask.kernels.fused_update import update_mask_in_place
from sparseforge_ds.mask.kernels.groups import top_n
from sparseforge_ds.mask.kernels.scores import RankOne, score_moments
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.start.first_mask import Reduce
from sparseforge_ds.zero.expert_hooks import expert_tokens
from sparseforge_ds.zero.layer_hooks import token_gradients

DECAY = 0.9
"""Decay of the running mean of the sums, at an update."""
DAMPING = 1e-4
"""eps of the score, relative to the mean curvature of a matrix (eq. 3)."""
SOFT_SHARE = 0.4
"""Share of a block's steps in which its masks are soft."""


@dataclass
class _Annealed:
    """One weight whose mask is soft."""

    weight: PrunableWeight
    parameter: nn.Parameter
    dense: Tensor
    """Flat fp32 W; the parameter holds m_eff W."""
    mask: Tensor
    """Flat fp32 m."""
    effective: Tensor
    """Flat fp32 m_eff."""
    sums: Tensor
    """(matrices, R + C) fp64 running mean of row and column sums."""
    new_sums: Tensor
    """Those of the steps since the last update, of this rank."""
    fixed: list[bool] | None = None
    """True for each matrix whose mask stands still."""


class Annealing:
    """Masks of a block while they are soft."""

    def __init__(
        self,
        block: nn.Module,
        weights: Sequence[PrunableWeight],
        pattern: Pattern,
        steps: int,
        few: Mapping[str, Tensor],
    ) -> None:
        """Begin with the dense weights, of which those that magnitude would prune count half: the error of a whole
        block has no gradient.

        Args:
            block: the decoder block with its dense weights.
            weights: its prunable weights, by names inside the block.
            pattern: how many members of a group survive.
            steps: optimizer steps of the whole training of the block.
            few: (E,) bool of weights of experts: those whose masks stay magnitude's.
        """
        self._block, self._pattern = block, pattern
        defaults = SoftMaskConfig()
        schedule = defaults.schedule(max(1, round(steps * SOFT_SHARE / defaults.hardening[1])))
        self.schedule = replace(schedule, freeze_step=min(schedule.freeze_step, steps))
        self._soft: dict[str, _Annealed] = {}
        for weight in weights:
            parameter = block.get_parameter(weight.name)
            dense = parameter.detach().reshape(-1).clone()
            groups_GM = pattern.to_groups(dense, weight.shape, weight.input_axis)
            top_GM = top_n(groups_GM.abs(), pattern.kept)
            kept = pattern.from_groups(top_GM, weight.shape, weight.input_axis)
            sums = dense.new_zeros(weight.matrices, sum(weight.matrix), dtype=torch.float64)
            effective = kept.float().mul_(0.5).add_(0.5)
            soft = _Annealed(weight, parameter, dense, torch.ones_like(dense), effective, sums, sums.clone())
            if weight.name in few:
                fixed_M = few[weight.name].repeat_interleave(weight.matrices // len(few[weight.name]))
                soft.fixed = fixed_M.tolist()
                by_matrix = soft.mask.view(weight.matrices, -1)
                by_matrix.copy_(torch.where(fixed_M[:, None], kept.view_as(by_matrix).float(), by_matrix))
            self._soft[weight.name] = soft
            self._publish(soft)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While active, every backward pass through the block is heard."""
        layers = {name: soft.weight for name, soft in self._soft.items() if len(soft.weight.shape) == 2}
        fused = {soft.weight.module for name, soft in self._soft.items() if name not in layers}
        with ExitStack() as stack:
            modules = {name: self._block.get_submodule(weight.module) for name, weight in layers.items()}
            stack.enter_context(token_gradients(modules, self._hear))
            if fused:
                experts = {name: self._block.get_submodule(name) for name in sorted(fused)}
                stack.enter_context(expert_tokens(experts, self._hear_experts))
            yield

    @torch.no_grad()
    def after_step(self, step: int, reduce: Reduce) -> dict[str, Tensor] | None:
        """Follow optimizer step `step` (the first is 1), and return the masks where they are frozen by it.

        W takes the share m of the step that the published weight took; at an update the masks move.
        """
        for soft in self._soft.values():
            moved = soft.parameter.detach().reshape(-1) - soft.dense * soft.effective
            soft.dense.addcmul_(moved, soft.effective)
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
        # Sums of new tokens enter the running mean.
        soft.sums.mul_(DECAY).add_(soft.new_sums)
        soft.new_sums.zero_()
        weight = soft.weight
        rows, columns = weight.matrix
        extents = torch.tensor([[rows, columns]] * weight.matrices, device=soft.sums.device)
        factors_MN = shares(soft.sums.reshape(-1), extents).view(weight.matrices, -1)
        # Each matrix is scored by itself.
        curvatures = [RankOne(factors_N[:rows], factors_N[rows:], 0) for factors_N in factors_MN]
        dense, mask = (vector.view(weight.matrices, -1).unbind() for vector in (soft.dense, soft.mask))
        moments = torch.stack([score_moments(w, h) for w, h in zip(dense, curvatures, strict=True)])
        scaling = scalings(moments, DAMPING)
        for number, (w, m, h) in enumerate(zip(dense, mask, curvatures, strict=True)):
            if soft.fixed is None or not soft.fixed[number]:
                update_mask_in_place(w, m, h, scaling[number], dials, self._pattern, weight.matrix, weight.input_axis)
        soft.effective = torch.lerp(self._hard(soft).float(), soft.mask, dials.x)

    def _hard(self, soft: _Annealed) -> Tensor:
        """Flat bool: the top N of every group of the mask."""
        weight = soft.weight
        kept_GM = top_n(self._pattern.to_groups(soft.mask, weight.shape, weight.input_axis), self._pattern.kept)
        return self._pattern.from_groups(kept_GM, weight.shape, weight.input_axis)

    def _publish(self, soft: _Annealed) -> None:
        soft.parameter.data.copy_((soft.dense * soft.effective).view(soft.weight.shape))

    def _hear(self, name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
        soft = self._soft[name]
        first, second = soft.new_sums[0].split(list(soft.weight.matrix))
        output, inputs = (first, second) if soft.weight.input_axis == -1 else (second, first)
        add_fisher_sums(grad_TO, input_TI, 1.0, output, inputs)

    def _hear_experts(
        self, layer: str, parameter: str, grad_SO: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
    ) -> None:
        soft = self._soft.get(f"{layer}.{parameter}")
        if soft is None:
            return
        assert grad_SO is not None
        of_axis = expert_fisher_sums(grad_SO, input_SI, stop_E, soft.weight.stacked)
        both = torch.cat(of_axis if soft.weight.input_axis == -1 else of_axis[::-1], dim=2)
        soft.new_sums += both.view_as(soft.new_sums)
