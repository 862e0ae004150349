"""Shards of the prunable weights on this rank, their groups and states, and how far the run has come."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.methods import MaskLLMConfig
from sparseforge_ds.mask.kernels.groups import survivors
from sparseforge_ds.mask.quantization import scale_group
from sparseforge_ds.mask_metrics import MaskMetrics
from sparseforge_ds.model.families import PrunableWeight, prunable_weights
from sparseforge_ds.zero.deepspeed_layouts import layout_of
from sparseforge_ds.zero.forge_error import ForgeError
from sparseforge_ds.zero.halo import Halo, HaloExchange
from sparseforge_ds.zero.matrices import Matrices
from sparseforge_ds.zero.quantized_masters import QuantizedMasters
from sparseforge_ds.zero.refuse import uses_muon
from sparseforge_ds.zero.shard import Shard
from sparseforge_ds.zero.state import ShardState

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_LOG = logging.getLogger(__name__)
_SHORTEST_PATH = 0.01
"""Path (steps times learning rate, divided by the RMS of the weights) below which a run is warned about."""
_ADAM = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
"""Classes of torch and DeepSpeed with the moments and the step of Adam; relatives have the same settings."""


class DivergedError(ForgeError):
    """The run has diverged: a measurement, or a weight itself, is infinite or NaN."""


class ShardedWeights:
    """One engine's shards, and how far its run has come."""

    def __init__(self, engine: DeepSpeedEngine, config: SparseForgeConfig) -> None:
        """Read the layout of an engine. Collective.

        Raises:
            ValueError: the model or the optimizer's param groups do not fit the config.
        """
        self.engine = engine
        self.config = config
        self.schedule = config.resolved_schedule
        self.pattern = config.parsed_pattern
        self.prunable: dict[str, PrunableWeight] = {w.name: w for w in prunable_weights(engine.module, config)}
        self.step = 0
        """Optimizer steps that were applied."""
        self.layout = layout_of(engine)
        self.shards = self.layout.require_own_partitions(self.prunable)
        self.layout.check(self.shards)
        mask_dtype = getattr(torch, config.mask_storage)
        is_quantized = config.quantize is not None
        self.state = ShardState(self.layout, self.shards, mask_dtype, config.state_keys, is_quantized)
        periods = {name: self.pattern.period(weight.shape, weight.input_axis) for name, weight in self.prunable.items()}
        self.halo = HaloExchange(self.layout, self.shards, periods)
        self.matrices = Matrices(self.layout, self.shards, {n: w.matrices for n, w in self.prunable.items()})
        self.metrics = MaskMetrics(self.matrices, self.pattern)
        self.quantizer = self._quantizer()
        """Quantization of the published weights; None for none."""

    def _quantizer(self) -> QuantizedMasters | None:
        settings = self.config.quantize
        if settings is None:
            return None
        axes = {name: weight.input_axis for name, weight in self.prunable.items()}
        groups = {
            name: scale_group(self.pattern, settings.group_size, weight.shape[weight.input_axis])
            for name, weight in self.prunable.items()
        }
        return QuantizedMasters(self.layout, self.shards, groups, axes, settings.bits)

    def require_adam(self, method: str) -> None:
        """Refuse an optimizer that is not Adam or AdamW, whose moments the method uses."""
        inner = self.layout.inner
        name = type(inner).__name__
        if name not in _ADAM:
            raise ValueError(
                f'method "{method}" works on the moments of Adam, which {name} does not keep; use "optimizer": '
                '{"type": "AdamW"} in the DeepSpeed JSON'
            )
        # Adam of DeepSpeed can leave out the correction, of torch it has no such setting.
        for setting, required in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
            if any(bool(group.get(setting, required)) != required for group in inner.param_groups):
                with_or_without = "with" if required else "without"
                raise ValueError(
                    f'method "{method}" repeats the step of Adam {with_or_without} {setting}; leave {setting} out of '
                    "the parameters of the optimizer"
                )

    def require_gradients(self, what: str) -> None:
        """Refuse Muon, which orthogonalizes gradients before a step sees them, for `what`."""
        if uses_muon(self.layout.inner):
            raise ValueError(
                f"{what} with Muon, which orthogonalizes gradients before a step sees them; use AdamW, or the default "
                "method and curvature"
            )

    def chunks(self, names: Collection[str] | None = None) -> Iterator[Shard]:
        """Yield all shards of this rank, or those of the named weights, a bounded chunk at a time."""
        for name in self.shards if names is None else names:
            yield from self.halo.chunks[name]

    def state_view(self, shard: Shard, key: str) -> Tensor:
        """Return a (numel of the shard,) view of a state. Look it up at every use: a checkpoint load replaces it."""
        return self.state.state_view(shard, key)

    def exchange(self, key: str, names: Collection[str] | None = None) -> Halo:
        """Fetch what cut groups lack of a state, of all weights or of the named ones. Collective."""
        values = self.state.mask if key == "mask" else lambda shard: self.state_view(shard, key)
        return self.halo.exchange(values, names)

    def to_groups(self, shard: Shard, values: Tensor, halo: Halo) -> Tensor:
        """Turn (numel of the shard,) into (G, M): all groups that the shard has a member of, cut ones included."""
        weight = self.prunable[shard.name]
        return self.pattern.to_groups(self.halo.with_halo(shard, values, halo), weight.shape, weight.input_axis)

    def from_groups(self, shard: Shard, group_GM: Tensor) -> Tensor:
        """Turn (G, M) into (numel of the shard,): the shard's own members."""
        weight = self.prunable[shard.name]
        return self.halo.without_halo(shard, self.pattern.from_groups(group_GM, weight.shape, weight.input_axis))

    def top(self, shard: Shard, values: Tensor, halo: Halo) -> Tensor:
        """Return (numel of the shard,) bool: the top N of the values in every group."""
        return self.from_groups(shard, survivors(self.to_groups(shard, values, halo), self.pattern))

    def dense(self, shard: Shard) -> Tensor:
        """Return a (numel of the shard,) view of W."""
        return self.state.dense(shard)

    @torch.no_grad()
    def rms(self) -> float:
        """Return the root mean square of W over all weights under a mask. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.layout.device)
        for chunk in self.chunks():
            square = self.dense(chunk).double().square().sum()
            sums += torch.stack([square, square.new_tensor(chunk.numel)]).to(sums.device)
        total, count = self.layout.all_reduce(sums).tolist()
        return math.sqrt(total / count)

    def warn_of_slow_weights(self) -> None:
        """Warn of a learning rate that cannot make up for what moving masks remove. Collective, before the first step.

        A step of Adam moves a weight by about the learning rate.
        """
        # A mask that is kept may be finetuned gently, a block-wise start has trained already, and MaskLLM trains no
        # weight.
        masks_move = self.schedule.freeze_step > 0
        has_trained = self.config.start is not None and self.config.start.epochs > 0
        if not masks_move or has_trained or isinstance(self.config.method, MaskLLMConfig):
            return
        # A scheduler keeps the highest rate: torch's in the groups, DeepSpeed's in a list of its own.
        scheduler = getattr(self.engine, "lr_scheduler", None)
        groups = [group for group in self.layout.inner.param_groups if group.get("use_muon", True)]
        rates = [max(group.get("max_lr", 0.0), group.get("initial_lr", group["lr"])) for group in groups]
        rates += getattr(scheduler, "max_lrs", getattr(scheduler, "org_lrs", []))
        learning_rate = float(max(rates))
        distance = learning_rate * self.config.max_steps
        size = self.rms()
        # A rate of 0 is that of a warm-up that the loop makes by hand.
        if 0 < distance < _SHORTEST_PATH * size and not self.layout.rank:
            _LOG.warning(
                "learning rate %g: in %d steps weights of size %.2g (RMS) move by at most %.2g, so the model will "
                "hardly recover from its masks; use a higher learning rate or more steps",
                learning_rate,
                self.config.max_steps,
                size,
                distance,
            )

    @torch.no_grad()
    def require_finite(self, cure: str) -> None:
        """Check the weights as they are now, and the optimizer's state of them. Collective, one reduction.

        Args:
            cure: end of the message, which says what to go back to.

        Raises:
            DivergedError: some are infinite or NaN, or too large for the dtype that the forward pass sees.
        """
        layout = self.layout
        lost_W = torch.zeros(len(layout.shards), device=layout.device)
        for row, (name, shard) in enumerate(layout.shards.items()):
            flat = layout.flats[shard.flat]
            optimizer_state = layout.inner.state.get(flat, {}).values()
            states = [state for state in optimizer_state if isinstance(state, Tensor) and state.is_floating_point()]
            limits = [(flat.data, torch.finfo(layout.low_precision[name].dtype).max)]
            limits += [(state, torch.finfo(state.dtype).max) for state in states if state.numel() == flat.numel()]
            for values, limit in limits if shard.numel else ():
                # Both are NaN where an element is, and NaN is not <= a limit.
                low, high = shard.slice_of_flat(values).aminmax()
                lost_W[row] += (~((-low <= limit) & (high <= limit))).to(layout.device)
        lost = [name for name, count in zip(layout.shards, layout.all_reduce(lost_W).tolist(), strict=True) if count]
        if lost:
            raise DivergedError(
                f"{len(lost)} of {len(lost_W)} weights or their optimizer states are infinite, NaN or beyond their "
                f"dtype after step {self.step}, {lost[0]} among them: the run has diverged; {cure}"
            )

    @torch.no_grad()
    def check_frozen(self) -> None:
        """Raise ValueError where a frozen mask is not of the pattern, or prunes a weight that is not 0. Collective.

        Such weights are not those of a frozen run.
        """
        halo = self.exchange("mask")
        misfits = torch.zeros((), dtype=torch.int64, device=self.layout.device)
        for chunk in self.chunks():
            # A pruned weight that is not 0 counts as kept.
            kept = self.state.mask(chunk).masked_fill(self.dense(chunk) != 0, 1.0)
            kept_GM = self.to_groups(chunk, kept, halo)
            # In a full group the kept members are its best ones, and N in number.
            is_full_G = (kept_GM.sum(dim=1) == self.pattern.kept_count) & (
                survivors(kept_GM, self.pattern) == kept_GM.bool()
            ).all(dim=1)
            misfits += (~is_full_G).sum().to(misfits.device)
        if self.layout.all_reduce(misfits).item():
            raise ValueError(
                f"the checkpoint's masks are frozen, but groups of its weights are not {self.pattern}: it was not "
                "written by a sparseforge run, or is damaged; use another one"
            )

    def add_update(
        self, chunk: Shard, mask: Tensor, target: Tensor, kept: Tensor | None = None, disagrees: Tensor | None = None
    ) -> None:
        """Account for a chunk's new mask in the metrics, and store what is `kept` of a soft one.

        See `MaskMetrics.add_update` and `add_disagreement`.
        """
        bits = None if kept is None else self.state.own_packed_kept(chunk)
        self.metrics.add_update(chunk, mask, target, kept, bits)
        if kept is not None and bits is None:
            self.state.write_kept(chunk, kept)
        if disagrees is not None:
            self.metrics.add_disagreement(self.prunable[chunk.name], chunk, disagrees)

    @torch.no_grad()
    def account(self) -> None:
        """Account for all masks in the metrics; what is kept is the target."""
        for chunk in self.chunks():
            mask = self.state.mask(chunk)
            self.add_update(chunk, mask, mask != 0)
