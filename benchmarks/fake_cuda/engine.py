"""A rank of a run without an engine: the memory layout that ZeRO would give it, and a forge on a bare torch optimizer.

The one file of these tools that knows the insides of the package: where `ShardLayout` comes from, and what of an engine
a forge uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import sparseforge_ds as sf
from benchmarks.fake_cuda.counting import Counter
from sparseforge_ds import forge as forge_module
from sparseforge_ds import sharded_weights
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.zero.shard import Shard, ShardLayout

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Rank:
    """Number of a rank, and layout of its memory."""

    world: int = 16
    number: int = 8
    stage: int = 3
    sub_group: int = int(1e9)
    """Elements of a rank's parts after which ZeRO-3 begins a new master partition (`sub_group_size`)."""
    master: torch.dtype = torch.float32
    offload: bool = False
    """Masters and optimizer states on the host."""
    only_prunable: bool = False
    """Leave out of the optimizer what is not under a mask."""
    loss_scale: float = 1.0


@contextmanager
def process_group(rank: Rank) -> Iterator[None]:
    """Provide a process group whose collectives return at once and move nothing, with devices like H100s."""
    dist.init_process_group("fake", rank=rank.number, world_size=rank.world, store=FakeStore())
    try:
        with (
            mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            mock.patch.object(torch.cuda, "mem_get_info", lambda device=None: (40 << 30, 80 << 30)),
        ):
            yield
    finally:
        dist.destroy_process_group()


def model_of(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a causal language model on fake CUDA, inside a FakeTensorMode and before a counter begins."""
    with torch.device(CUDA):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model


class Partitions:
    """Position of the elements of every weight on every rank, as ZeRO divides them."""

    def __init__(self, param_groups: list[list[tuple[str, tuple[int, ...]]]], rank: Rank) -> None:
        self.rank = rank
        self.param_group_of_flat: list[int] = []
        self.sizes: list[int] = []
        self.placed: list[tuple[str, tuple[int, ...], int, int]] = []
        """Name, shape, master partition, and where the weight begins: in a rank's partition for stages 3 and 0, else in
        the run of the whole group."""
        for group, members in enumerate(param_groups):
            self._open(group)
            complete = sum(self._part(shape) for _, shape in members)
            for number, (name, shape) in enumerate(members):
                self.placed.append((name, shape, len(self.sizes) - 1, self.sizes[-1]))
                self.sizes[-1] += self._part(shape)
                full = rank.stage == 3 and complete > rank.sub_group <= self.sizes[-1]
                if full and number + 1 < len(members):
                    self._open(group)
        if rank.stage in (1, 2):  # cut in equal partitions, aligned to two elements a rank
            self.sizes = [math.ceil(size / (2 * rank.world)) * 2 for size in self.sizes]

    def _open(self, group: int) -> None:
        self.sizes.append(0)
        self.param_group_of_flat.append(group)

    def _part(self, shape: tuple[int, ...]) -> int:
        """Elements that a weight takes up in a partition before it is cut."""
        return math.ceil(math.prod(shape) / self.rank.world) if self.rank.stage == 3 else math.prod(shape)

    def shards(self, number: int) -> list[Shard]:
        """Return the shards of one rank."""
        return [self._shard(number, *placed) for placed in self.placed]

    def _shard(self, number: int, name: str, shape: tuple[int, ...], flat: int, begins: int) -> Shard:
        numel = math.prod(shape)
        if self.rank.stage == 0:
            return Shard(name, shape, 0, numel, flat, begins)
        if self.rank.stage == 3:
            part = self._part(shape)
            return Shard(name, shape, min(number * part, numel), min((number + 1) * part, numel), flat, begins)
        first = number * self.sizes[flat]
        size = self.sizes[flat]
        start = min(max(first - begins, 0), numel)
        stop = max(min(first + size - begins, numel), start)
        return Shard(name, shape, start, stop, flat, max(begins - first, 0) if stop > start else 0)


class BareOptimizer:
    """Stand-in for DeepSpeed's optimizer, which gives the inner one gradients, at stage 3 a sub-group at a time."""

    def __init__(self, inner: torch.optim.Optimizer, flats: Sequence[Tensor], rank: Rank, counter: Counter) -> None:
        self.inner = inner
        self.flats = flats
        self.rank = rank
        self.counter = counter
        self.loss_scale = rank.loss_scale
        self.before_norm: Callable[[], None] | None = None
        """Function that the forge calls in every step; see `ShardLayout.before_norm`."""
        self.averaged: list[Tensor] = []
        """Averaged gradients of each flat in this step."""
        self.gradient_dtype = torch.float32
        self._members = [list(group["params"]) for group in inner.param_groups]

    def step(self) -> None:
        """Step with gradients that are there; DeepSpeed's own work on them is not counted."""
        with self.counter.paused():
            self.averaged = [torch.zeros_like(flat, dtype=self.gradient_dtype) for flat in self.flats]
        if self.before_norm is not None:
            self.before_norm()
        with self.counter.paused():
            for flat, averaged in zip(self.flats, self.averaged, strict=True):
                flat.grad = averaged.to(flat.dtype)
            self.averaged = []
        if self.rank.stage != 3:
            self.inner.step()
        else:
            for members in self._members:
                for flat in members:
                    for group, own in zip(self.inner.param_groups, self._members, strict=True):
                        group["params"] = [flat] if own is members else []
                    self.inner.step()
            for group, own in zip(self.inner.param_groups, self._members, strict=True):
                group["params"] = list(own)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Let the gradients go."""
        for flat in self.flats:
            flat.grad = None


class BareEngine:
    """Stand-in for an engine, as far as a forge uses it, with complete weights on the device."""

    global_steps = 0
    skipped_steps = 0
    micro_steps = 0
    _is_gradient_accumulation_boundary = True
    enable_backward_allreduce = True
    sequence_parallel_size = 1
    _config = SimpleNamespace(_param_dict={})

    def __init__(self, module: nn.Module, optimizer: BareOptimizer, partitions: Partitions) -> None:
        self.module = module
        self.optimizer = optimizer
        self.partitions = partitions
        self.basic_optimizer = optimizer.inner
        self.device = CUDA
        self.prunable: list[str] = []

    def gradient_clipping(self) -> float:
        """Norm at which gradients are clipped."""
        return 1.0

    def gradient_accumulation_steps(self) -> int:
        """Return 1: a step has one micro-batch."""
        return 1

    def set_gradient_accumulation_boundary(self, boundary: bool) -> None:
        """There is no other."""

    def backward(self, loss: Tensor) -> None:
        """Gradients of the whole weights, which are then let go: the optimizer has its own."""
        (loss * self.optimizer.loss_scale).backward()
        self.zero_grad()

    def step(self) -> None:
        """Step the optimizer."""
        self.micro_steps += 1
        self.optimizer.step()

    def save_checkpoint(self, *_args: object) -> None:
        """Do nothing; a forge attaches to this method."""
        raise NotImplementedError("fake tensors have no values that could be saved")

    load_checkpoint = save_checkpoint

    def zero_grad(self) -> None:
        """Let the gradients go."""
        for parameter in self.module.parameters():
            parameter.grad = None


class BareLayout(ShardLayout):
    """The shard map that ZeRO's partitions have on this rank."""

    @property
    def replicated(self) -> bool:  # type: ignore[override]
        """See `ShardLayout`."""
        return self.engine.partitions.rank.stage == 0

    def _data_parallel_group(self) -> None:
        return None

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the shards of every rank, no error of any rank, or this rank's counts for those of every rank."""
        if value is None or isinstance(value, tuple):
            return [value] * self.engine.partitions.rank.world
        partitions = self.engine.partitions
        everyone = []
        for number in range(partitions.rank.world):
            stored = {shard.name: (shard.start, shard.stop) for shard in partitions.shards(number)}
            everyone.append([stored[name] for name in self.engine.prunable])
        assert everyone[partitions.rank.number] == value, "the ranks are asked for something else than their shards"
        return everyone

    def _read(self) -> None:
        partitions = self.engine.partitions
        parameters = dict(self.engine.module.named_parameters())
        self.flats = self.optimizer.flats
        self.param_group_of_flat = partitions.param_group_of_flat
        for shard in partitions.shards(partitions.rank.number):
            self.shards[shard.name] = shard
            self.low_precision[shard.name] = parameters[shard.name]
        counter = self.optimizer.counter
        with counter.paused():
            dtype = next(iter(parameters.values())).dtype
            self._low = [torch.zeros(flat.shape, dtype=dtype, device=CUDA) for flat in self.flats]

    def check(self, names: Any) -> None:
        """Nothing to compare with."""

    def mask_gradients(self, mask: Callable[[int, int, Tensor], None]) -> None:
        """Mask the averaged gradients of this step."""
        for index, averaged in enumerate(self.optimizer.averaged):
            mask(index, 0, averaged)

    def before_norm(self, act: Callable[[], None]) -> bool:
        """Keep the function; averaged gradients have the dtype of weights, on the host that of masters."""
        self.optimizer.before_norm = act
        rank = self.engine.partitions.rank
        if rank.stage and not rank.offload:
            self.optimizer.gradient_dtype = self._low[0].dtype
        return True

    def push(self) -> None:
        """Copy each partition, as ZeRO-3 casts masters to the weights' dtype."""
        for low, flat in zip(self._low, self.flats, strict=True):
            low.copy_(flat.detach(), non_blocking=True)  # as DeepSpeed copies from pinned memory


def attach(
    model: nn.Module, config: sf.SparseForgeConfig, rank: Rank, counter: Counter, fused: bool = True
) -> tuple[sf.SparseForge, BareEngine]:
    """Attach a forge on a rank, inside `process_group` and a FakeTensorMode, to a prepared model on CUDA."""
    param_groups = sf.param_groups(model, config, weight_decay=0.0)
    if rank.only_prunable:
        param_groups = param_groups[:1]
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [[(name_of[id(p)], tuple(p.shape)) for p in group["params"]] for group in param_groups]
    partitions = Partitions(named, rank)
    device = torch.device("cpu") if rank.offload else CUDA
    with counter.paused():
        flats = [nn.Parameter(torch.zeros(size, dtype=rank.master, device=device)) for size in partitions.sizes]
    for number, group in enumerate(param_groups):
        belonging = zip(flats, partitions.param_group_of_flat, strict=True)
        group["params"] = [flat for flat, owner in belonging if owner == number]
    inner = torch.optim.AdamW(param_groups, lr=1e-4, fused=fused and not rank.offload)
    engine = BareEngine(model, BareOptimizer(inner, flats, rank, counter), partitions)
    engine.prunable = [weight.name for weight in prunable_weights(model, config)]

    with (
        mock.patch.object(forge_module, "refuse_unsupported", lambda engine: None),
        mock.patch.object(sharded_weights, "layout_of", BareLayout),
    ):
        forge = sf.SparseForge(engine, config)
    edges = forge.sharded.halo
    periods = {w.name: config.parsed_pattern.period(w.shape, w.input_axis) for w in forge.weights}
    edges.any_cut = any(  # a value that the ranks agree on, and fake tensors do not have
        start % periods[name] or stop % periods[name]
        for name, ranges in edges.ranges.items()
        for start, stop in ranges
        if stop > start
    )
    return forge, engine
