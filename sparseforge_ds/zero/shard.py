"""Which elements of which weight this rank holds: the only code that reads DeepSpeed's memory layout.

Written against DeepSpeed 0.19; every field it reads is named here and nowhere else. `Layout` checks its own map against
the low-precision weights when it is built, so a changed layout is an error at attach time and not a wrong mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.nn import Parameter

GROUP_KEY = "sparseforge"
"""Key of the optimizer's param groups that hold prunable weights."""


@dataclass(frozen=True)
class Shard:
    """A run of consecutive elements of one weight that lies on this rank."""

    name: str
    """Parameter name in the model."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    start: int
    """First flat element of the weight that is here."""
    stop: int
    """One past the last; `stop == start` when this rank holds nothing of the weight."""
    flat: int
    """Index of the master partition (`Layout.flats`) that holds it."""
    offset: int
    """Where it begins in that partition."""

    @property
    def numel(self) -> int:
        """Elements of the weight on this rank."""
        return self.stop - self.start

    def of(self, flat: Tensor) -> Tensor:
        """The shard's elements, as a view of a tensor laid out like its master partition."""
        return flat.view(-1)[self.offset : self.offset + self.numel]


class Layout:
    """The shard map of one engine, and the way back from master to low-precision weights."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.inner: torch.optim.Optimizer = engine.basic_optimizer
        self.device: torch.device = torch.device(engine.device)
        self.world_size: int = dist.get_world_size()
        self.rank: int = dist.get_rank()
        self._name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self.flats: list[Tensor] = []
        self.group_of_flat: list[int] = []
        """Index of the inner optimizer's param group that each flat belongs to."""
        self.shards: dict[str, Shard] = {}
        self.low_precision: dict[str, Any] = {}
        self._read()
        self.index_of: dict[int, int] = {id(flat): index for index, flat in enumerate(self.flats)}

    @property
    def replicated(self) -> bool:
        """Whether every rank holds every element (stage 0)."""
        return not isinstance(self.optimizer, (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer, BF16_Optimizer))

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by during a backward pass; 1 without fp16."""
        scale = getattr(self.optimizer, "loss_scale", None)
        return 1.0 if scale is None else float(scale)

    @property
    def groups(self) -> list[list[str]]:
        """Names of each param group of the inner optimizer, in the order of its flats."""
        names: list[list[str]] = [[] for _ in self.inner.param_groups]
        for name, shard in self.shards.items():
            names[self.group_of_flat[shard.flat]].append(name)
        return names

    def _read(self) -> None:
        optimizer = self.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            self.flats = list(optimizer.fp32_partitioned_groups_flat)
            self.group_of_flat = [optimizer.sub_group_to_group_id[index] for index in range(len(self.flats))]
            for group in optimizer.fp16_groups:
                for parameter in group:
                    index, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                    rank = dist.get_rank(parameter.ds_process_group)
                    start = min(rank * length, parameter.ds_numel)
                    stop = min(start + length, parameter.ds_numel)
                    self._add(parameter, tuple(parameter.ds_shape), start, stop, index, offset)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            self.flats = list(optimizer.single_partition_of_fp32_groups)
            for index, group in enumerate(optimizer.round_robin_bit16_groups):
                self._add_run(group, optimizer.round_robin_bit16_offsets[index], index)
        elif isinstance(optimizer, BF16_Optimizer):
            self.flats = list(optimizer.fp32_groups_flat_partition)
            for index, group in enumerate(optimizer.bf16_groups):
                self._add_run(group, _offsets(group), index)
        elif isinstance(optimizer, FP16_Optimizer):
            self.flats = list(optimizer.fp32_groups_flat)
            for index, group in enumerate(optimizer.fp16_groups):
                for parameter, offset in zip(group, _offsets(group), strict=True):
                    self._add(parameter, tuple(parameter.shape), 0, parameter.numel(), index, offset)
        elif isinstance(optimizer, FP16_UnfusedOptimizer):
            pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            self._add_each(list(zip(low, high, strict=True)) for low, high in pairs)
        elif optimizer is self.inner:
            self._add_each([(p, p) for p in group["params"]] for group in self.inner.param_groups)
        else:
            raise ValueError(
                f"DeepSpeed optimizer {type(optimizer).__name__} has a layout that is not supported; use ZeRO stage "
                "0 to 3 with fp32, fp16 or bf16"
            )
        if not self.group_of_flat:
            self.group_of_flat = list(range(len(self.flats)))

    def _add_each(self, groups: Iterable[list[tuple[Parameter, Tensor]]]) -> None:
        """Weights that have a master each (stage 0)."""
        for index, pairs in enumerate(groups):
            for parameter, master in pairs:
                self._add(parameter, tuple(parameter.shape), 0, parameter.numel(), len(self.flats), 0)
                self.flats.append(master)
                self.group_of_flat.append(index)

    def _add_run(self, group: Iterable[Parameter], offsets: list[int], index: int) -> None:
        """Weights laid end to end and cut in equal partitions, one a rank (stages 1 and 2)."""
        size = self.flats[index].numel()
        first = dist.get_rank(self.optimizer.real_dp_process_group[index]) * size
        for parameter, offset in zip(group, offsets, strict=True):
            start = min(max(first - offset, 0), parameter.numel())
            stop = max(min(first + size - offset, parameter.numel()), start)
            self._add(
                parameter, tuple(parameter.shape), start, stop, index, max(offset - first, 0) if stop > start else 0
            )

    def _add(self, parameter: Parameter, shape: tuple[int, ...], start: int, stop: int, flat: int, offset: int) -> None:
        name = self._name_of[id(parameter)]
        self.shards[name] = Shard(name, shape, start, stop, flat, offset)
        self.low_precision[name] = parameter

    def wholly(self, names: Iterable[str]) -> dict[str, Shard]:
        """Shards of the named weights, which must have master partitions of their own.

        Raises:
            ValueError: some weight is missing from the optimizer, or shares a partition with others.
        """
        cure = (
            "build the optimizer with deepspeed.initialize(model_parameters=sparseforge_ds.param_groups(model, config))"
        )
        chosen: dict[str, Shard] = {}
        for name in names:
            if name not in self.shards:
                raise ValueError(f"{name} is not in the engine's optimizer; {cure}")
            chosen[name] = self.shards[name]
        flats = {shard.flat for shard in chosen.values()}
        for name, shard in self.shards.items():
            if shard.flat in flats and name not in chosen:
                raise ValueError(f"{name} is not prunable but shares a partition with weights that are; {cure}")
        if not any(group.get(GROUP_KEY) for group in self.inner.param_groups):
            raise ValueError(f"no param group of the optimizer is marked as prunable; {cure}")
        return chosen

    def check(self, names: Iterable[str]) -> None:
        """Compare the map with the low-precision weights, element by element.

        Raises:
            RuntimeError: some weight is not where the map says; the installed DeepSpeed has another layout.
        """
        if self.replicated:
            return  # DeepSpeed's 16-bit stage-0 constructors step once and leave master and weight apart
        for name in names:
            shard, parameter = self.shards[name], self.low_precision[name]
            if isinstance(self.optimizer, DeepSpeedZeroOptimizer_Stage3):
                here = parameter.ds_tensor.data.view(-1)[: shard.numel]
            else:
                here = parameter.data.view(-1)[shard.start : shard.stop]
            master = shard.of(self.flats[shard.flat].detach())
            if not torch.equal(master.to(here.dtype).to(here.device), here):
                import deepspeed

                raise RuntimeError(
                    f"{name}: elements {shard.start}..{shard.stop} are not where the shard map expects them; "
                    f"DeepSpeed {deepspeed.__version__} lays out {type(self.optimizer).__name__} in another way. "
                    "Install a version in the range of pyproject.toml, and report this"
                )

    @torch.no_grad()
    def push(self) -> None:
        """Bring changed masters to the weights that the next forward sees, as DeepSpeed does at the end of a step."""
        optimizer = self.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            optimizer._partition_all_parameters()
            for index in range(len(self.flats)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
            optimizer.invalidate_secondary_tensor()
        elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
            optimizer.update_lp_params()
        else:
            for name, shard in self.shards.items():
                parameter, master = self.low_precision[name], self.flats[shard.flat]
                if parameter is not master:
                    parameter.data.view(-1).copy_(shard.of(master.detach()))

    def untrained(self) -> dict[str, tuple[int, int, Tensor]]:
        """Parameters that the optimizer does not have: first element here, one past the last, and a view of them.

        Raises:
            ValueError: one of them is swapped out to disk.
        """
        found = {}
        for name, parameter in self.engine.module.named_parameters():
            if name in self.shards:
                continue
            if isinstance(self.optimizer, DeepSpeedZeroOptimizer_Stage3):
                if parameter.ds_tensor.status != PartitionedParamStatus.AVAILABLE:
                    raise ValueError(
                        f'{name} is frozen and on disk ("offload_param": "nvme"), where it cannot be restored; '
                        'set zero_optimization.offload_param.device to "cpu"'
                    )
                length = parameter.ds_tensor.ds_numel
                start = min(dist.get_rank(parameter.ds_process_group) * length, parameter.ds_numel)
                stop = min(start + length, parameter.ds_numel)
                found[name] = (start, stop, parameter.ds_tensor.data.view(-1)[: stop - start])
            else:
                found[name] = (0, parameter.numel(), parameter.data.view(-1))
        return found

    def load_optimizer(self, states: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
        """Replace the whole state of the inner optimizer, through its own loading and its hooks.

        Args:
            states: of each flat, laid out like it; empty for none.
            settings: what to change in each param group.
        """
        optimizer = self.optimizer
        of_sub_groups = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            optimizer._wait_for_offload_copies()
        if of_sub_groups:
            optimizer._set_fp32_optimizer_param_groups()
        try:
            state: dict[int, dict[str, Any]] = {}
            groups = []
            for group, changed in zip(self.inner.param_groups, settings, strict=True):
                numbers = list(range(len(state), len(state) + len(group["params"])))
                state |= {n: states[self.index_of[id(flat)]] for n, flat in zip(numbers, group["params"], strict=True)}
                groups.append({**group, **changed, "params": numbers})
            self.inner.load_state_dict(
                {"state": {n: held for n, held in state.items() if held}, "param_groups": groups}
            )
        finally:
            if of_sub_groups:
                optimizer._clear_fp32_optimizer_param_groups()
        if isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
            optimizer._link_all_hp_params()

    def set_loss_scale(self, saved: dict[str, Any]) -> None:
        """Continue a dynamic fp16 loss scale; one that is fixed here stays what it is."""
        if isinstance(self.optimizer, (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer)):
            scaler = self.optimizer.loss_scaler
            dynamic = isinstance(scaler, DynamicLossScaler)
        else:
            scaler = getattr(self.optimizer, "loss_scale_config", None)
            dynamic = scaler is not None and scaler.dynamic_loss_scale
        if not dynamic:
            return
        scaler.cur_scale, scaler.cur_iter = saved["scale"], saved["iteration"]
        scaler.last_overflow_iter = saved["last_overflow"]
        if "hysteresis" in saved and isinstance(scaler, DynamicLossScaler):
            scaler.cur_hysteresis = saved["hysteresis"]


def _offsets(group: Iterable[Parameter]) -> list[int]:
    offsets, position = [], 0
    for parameter in group:
        offsets.append(position)
        position += parameter.numel()
    return offsets
