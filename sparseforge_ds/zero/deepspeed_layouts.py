"""One `ShardLayout` for each of DeepSpeed's optimizers: the only code that reads their memory layout.

Written against DeepSpeed 0.19; every field that is read is named here and nowhere else. `ShardLayout.check` compares
the map with the low-precision weights when a forge is attached: a changed layout is an error then, not a wrong mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from sparseforge_ds.mask.kernels.bits import pack
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.publication import masked_gradient
from sparseforge_ds.zero.shard import OTHER_ENGINES, MaskGradient, Shard, ShardLayout, call_before


def layout_of(engine: DeepSpeedEngine) -> ShardLayout:
    """Return the shard layout of an engine, by the optimizer that DeepSpeed chose for it.

    Raises:
        ValueError: the optimizer's layout is not supported.
    """
    if other := OTHER_ENGINES.get(type(engine)):
        return other(engine)
    if engine.optimizer is engine.basic_optimizer:
        return InnerLayout(engine)
    for kind, layout in _LAYOUTS.items():
        if isinstance(engine.optimizer, kind):
            return layout(engine)
    raise ValueError(
        f"DeepSpeed optimizer {type(engine.optimizer).__name__} has a layout that is not supported; use ZeRO stage "
        "0 to 3 with fp32, fp16 or bf16"
    )


class _AveragedGradients(ShardLayout):
    """Layout of a ZeRO optimizer that has its averaged gradients, laid out like its masters, before its step."""

    @override
    def mask_gradients(self, mask: MaskGradient) -> None:
        optimizer = self.optimizer
        if not (getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False)):
            for index, gradients in optimizer.averaged_gradients.items():
                position = 0
                for flat in _merge_adjacent(gradients or ()):
                    mask(index, position, flat)
                    position += flat.numel()
            return
        # With offload gradients lie beside the masters, once all copies to the host are done.
        get_accelerator().synchronize()
        for index, master in enumerate(self.flats):
            if master.grad is not None:
                mask(index, 0, master.grad.view(-1))
        # The norm is made of these numbers, which were taken as the gradients came there.
        norms = optimizer.norm_for_param_grads
        for name in self.marked:
            shard = self.shards[name]
            key = optimizer.get_param_id(self.low_precision[name])
            gradient = self.flats[shard.flat].grad
            if gradient is not None and key in norms:
                norms[key] = accurate_norm(shard.slice_of_flat(gradient))


def accurate_norm(values: Tensor) -> Tensor:
    """Return the () fp32 norm of (n,) values on a CPU, where `vector_norm` loses 1% of 10^8 squares in fp32."""
    squares = [values[chunk].float().square().sum(dtype=torch.float64) for chunk in chunks(values)]
    return torch.stack(squares).sum().sqrt().float() if squares else values.new_zeros((), dtype=torch.float32)


class Zero3Layout(_AveragedGradients):
    """Layout of ZeRO-3: every weight in equal parts, one a rank; a sub-group's parts end to end in a flat."""

    def _data_parallel_group(self) -> dist.ProcessGroup | None:
        # zero.Init partitions over the world's own process group, `deepspeed.initialize` over a clone of it. Prunable
        # weights come first, and theirs is the one that counts.
        process_group: dist.ProcessGroup | None = self.optimizer.fp16_groups[0][0].ds_process_group
        return process_group

    def _read(self) -> None:
        optimizer = self.optimizer
        self.flats = list(optimizer.fp32_partitioned_groups_flat)
        self.param_group_of_flat = [optimizer.sub_group_to_group_id[index] for index in range(len(self.flats))]
        for sub_group in optimizer.fp16_groups:
            for parameter in sub_group:
                index, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start, stop = _zero3_range(parameter, length)
                self._add(parameter, tuple(parameter.ds_shape), start, stop, index, offset)

    def _low_precision_of(self, shard: Shard) -> Tensor:
        own_values: Tensor = self.low_precision[shard.name].ds_tensor.data.view(-1)[: shard.numel]
        return own_values

    @torch.no_grad()
    @override
    def push(self) -> None:
        """Copy masters to the weights that the next forward sees, and wait for the device: too slow for every step."""
        optimizer = self.optimizer
        optimizer._partition_all_parameters()
        for index in range(len(self.flats)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()
        # ZeRO-3 gathers on a stream of its own, which does not wait for the one that these copies are queued on.
        accelerator = get_accelerator()
        if not accelerator.is_synchronized_device():
            accelerator.current_stream().synchronize()

    @override
    def untrained(self) -> dict[str, tuple[int, int, Tensor]]:
        ranges = {}
        for name, parameter in self.engine.module.named_parameters():
            if name in self.shards:
                continue
            start, stop = _zero3_range(parameter, parameter.ds_tensor.ds_numel)
            ranges[name] = (start, stop, parameter.ds_tensor.data.view(-1)[: stop - start])
        return ranges


class _FlatParamGroupsLayout(ShardLayout):
    """Layout of a param group's weights end to end, cut at any element into equal partitions, one a rank."""

    def _data_parallel_group(self) -> dist.ProcessGroup | None:
        process_group: dist.ProcessGroup | None = self.optimizer.real_dp_process_group[0]
        return process_group

    def _read_param_groups(
        self, flats: Iterable[Tensor], param_groups: Iterable[tuple[list[Parameter], list[int]]]
    ) -> None:
        """Add the shards of all param groups.

        Args:
            flats: this rank's partition of each param group.
            param_groups: weights of each, and the offset of each weight in its flat.
        """
        self.flats = list(flats)
        self.param_group_of_flat = list(range(len(self.flats)))
        for index, (parameters, offsets) in enumerate(param_groups):
            size = self.flats[index].numel()
            first = self.rank * size
            for parameter, offset in zip(parameters, offsets, strict=True):
                start = min(max(first - offset, 0), parameter.numel())
                stop = max(min(first + size - offset, parameter.numel()), start)
                position = max(offset - first, 0) if stop > start else 0
                self._add(parameter, tuple(parameter.shape), start, stop, index, position)

    @torch.no_grad()
    @override
    def push(self) -> None:
        self.optimizer.update_lp_params()

    @override
    def load_optimizer(self, states: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
        super().load_optimizer(states, settings)
        self.optimizer._link_all_hp_params()


class Zero12Layout(_AveragedGradients, _FlatParamGroupsLayout):
    """Layout of ZeRO-1 and 2."""

    def _read(self) -> None:
        optimizer = self.optimizer
        self._read_param_groups(
            optimizer.single_partition_of_fp32_groups,
            zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True),
        )

    @override
    def load_optimizer(self, states: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
        self.optimizer._wait_for_offload_copies()
        super().load_optimizer(states, settings)


class Bf16Layout(_FlatParamGroupsLayout):
    """Layout of ZeRO-1 in bf16 with gradients accumulated in fp32."""

    def _read(self) -> None:
        pairs = [(parameters, _offsets(parameters)) for parameters in self.optimizer.bf16_groups]
        self._read_param_groups(self.optimizer.fp32_groups_flat_partition, pairs)

    @override
    def mask_gradients(self, mask: MaskGradient) -> None:
        # The norm is that of all gradients, which every rank has.
        gradients = self.optimizer.fp32_groups_gradients_flat
        for index in sorted({self.shards[name].flat for name in self.marked}):
            master = self.flats[index]
            # Gather the bits of the others' masks once: 1/8 byte a weight, beside 4 of its gradient.
            if index not in self._kept_of_all:
                ones = torch.ones_like(master)
                mask(index, 0, ones)
                own_bits = pack(ones > 0)
                bits = own_bits.new_empty(self.world_size * len(own_bits))
                self.all_gather(bits, own_bits)
                self._kept_of_all[index] = bits
            parts = gradients[index].split(len(master))
            for part, kept in zip(parts, self._kept_of_all[index].chunk(self.world_size), strict=True):
                masked_gradient(part, kept)


class _Stage0Layout(ShardLayout):
    """Layout of stage 0: every rank holds all masters in full."""

    replicated = True

    def _data_parallel_group(self) -> dist.ProcessGroup | None:
        process_group: dist.ProcessGroup | None = self.engine.seq_data_parallel_group
        return process_group

    def _add_each(self, param_groups: Iterable[list[tuple[Parameter, Tensor]]]) -> None:
        """Add weights that have a master each.

        Args:
            param_groups: pairs of (weight, its master) of each.
        """
        for index, pairs in enumerate(param_groups):
            for parameter, master in pairs:
                self._add(parameter, tuple(parameter.shape), 0, parameter.numel(), len(self.flats), 0)
                self.flats.append(master)
                self.param_group_of_flat.append(index)

    @override
    def _equals_copy(self, shard: Shard) -> bool:
        """Return True: DeepSpeed's 16-bit constructors of stage 0 step once, and leave master and weight apart."""
        return True

    @override
    def mask_gradients(self, mask: MaskGradient) -> None:
        for name in self.marked:
            shard = self.shards[name]
            if (gradient := self.low_precision[name].grad) is not None:
                for flat in _merge_adjacent([gradient]):
                    mask(shard.flat, shard.offset, flat)

    @torch.no_grad()
    @override
    def push(self) -> None:
        for shard in self.shards.values():
            self._low_precision_of(shard).copy_(self.master(shard))


class Fp16Layout(_Stage0Layout):
    """Layout of stage 0 in 16 bits with an optimizer of DeepSpeed's: a param group's weights end to end."""

    def _read(self) -> None:
        self.flats = list(self.optimizer.fp32_groups_flat)
        self.param_group_of_flat = list(range(len(self.flats)))
        for index, group in enumerate(self.optimizer.fp16_groups):
            for parameter, offset in zip(group, _offsets(group), strict=True):
                self._add(parameter, tuple(parameter.shape), 0, parameter.numel(), index, offset)


class Fp16UnfusedLayout(_Stage0Layout):
    """Layout of stage 0 in 16 bits with any other optimizer."""

    def _read(self) -> None:
        pairs = zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
        self._add_each(list(zip(low, high, strict=True)) for low, high in pairs)


class InnerLayout(_Stage0Layout):
    """Layout of stage 0 in fp32: DeepSpeed wraps no optimizer, and the weights are their own masters."""

    def _read(self) -> None:
        self._add_each([(p, p) for p in group["params"]] for group in self.inner.param_groups)

    @override
    def before_norm(self, act: Callable[[], None]) -> bool:
        call_before(self.engine, "clip_fp32_gradients", act)
        return bool(self.engine.gradient_clipping() > 0)

    def push(self) -> None:
        """Do nothing: the masters are the weights that the forward sees."""


_LAYOUTS: dict[type, type[ShardLayout]] = {
    DeepSpeedZeroOptimizer_Stage3: Zero3Layout,
    DeepSpeedZeroOptimizer: Zero12Layout,
    BF16_Optimizer: Bf16Layout,
    FP16_Optimizer: Fp16Layout,
    FP16_UnfusedOptimizer: Fp16UnfusedLayout,
}


def _zero3_range(parameter: Any, length: int) -> tuple[int, int]:
    """Return this rank's range of a weight's elements; every rank holds `length` of them, padding included."""
    start = min(dist.get_rank(parameter.ds_process_group) * length, parameter.ds_numel)
    return start, min(start + length, parameter.ds_numel)


def _merge_adjacent(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield flat tensors to be changed in place, in the order of `tensors`; one for all that lie end to end."""
    run: list[Tensor] = []
    for tensor in tensors:
        # A tensor with gaps is changed in a copy.
        if not tensor.is_contiguous():
            yield from _flatten_run(run)
            run = []
            flat = tensor.reshape(-1)
            yield flat
            tensor.copy_(flat.view(tensor.shape))
            continue
        # A tensor that does not begin where the last one ended begins a new run.
        if run:
            last = run[-1]
            same = tensor.untyped_storage()._cdata == last.untyped_storage()._cdata and tensor.dtype == last.dtype
            if not same or tensor.storage_offset() != last.storage_offset() + last.numel():
                yield from _flatten_run(run)
                run = []
        run.append(tensor)
    yield from _flatten_run(run)


def _flatten_run(run: list[Tensor]) -> Iterator[Tensor]:
    """Yield one flat view of tensors that lie end to end; nothing if there are none."""
    if run:
        yield run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,))


def _offsets(parameters: Iterable[Parameter]) -> list[int]:
    """Return where each weight of a param group begins, if they lie end to end."""
    offsets = []
    position = 0
    for parameter in parameters:
        offsets.append(position)
        position += parameter.numel()
    return offsets
