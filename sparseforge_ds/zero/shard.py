"""The map from weights to the elements that this rank holds, and the collectives of the ranks that share the data.

`deepspeed_layouts` reads a `ShardLayout` from each of DeepSpeed's optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from sparseforge_ds.checkpoint.zero_partitions import is_prunable_group
from sparseforge_ds.ranks import all_or_raise

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MaskGradient = Callable[[int, int, Tensor], None]
"""Function of a master partition's index, the first element of gradients in it, and (n,) gradients to change."""


@dataclass(frozen=True)
class Shard:
    """Consecutive elements of one weight that this rank holds."""

    name: str
    """Parameter name in the model."""
    shape: tuple[int, ...]
    """Shape of the full weight."""
    start: int
    """First element on this rank, counted in the flattened weight."""
    stop: int
    """One past the last element; equal to `start` if this rank holds nothing of the weight."""
    flat: int
    """Index of the master partition (`ShardLayout.flats`) that holds the shard."""
    offset: int
    """Position of the first element in that partition."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def slice_of_flat(self, flat: Tensor) -> Tensor:
        """Return a (numel,) view of the shard's elements in a tensor laid out like its master partition."""
        return flat.view(-1)[self.offset : self.offset + self.numel]

    def part(self, start: int, stop: int) -> Shard:
        """Return the elements [start, stop), counted in the flattened weight, of these."""
        return replace(self, start=start, stop=stop, offset=self.offset + start - self.start)


class ShardLayout(ABC):
    """The shards of one engine on this rank, and the collectives of its data-parallel ranks.

    The collectives run on the communicator of ZeRO's own gathers and reductions. A second communicator beside it could
    deadlock under NCCL, where ranks may start the kernels of two communicators in different orders.

    A subclass names the process group (`_data_parallel_group`), and copies masters to the weights of the forward
    (`push`). Its `_read` fills `flats`, `param_group_of_flat` and the shards, by `_add` once for each weight.
    """

    replicated: bool = False
    """True if every rank holds every element (stage 0)."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        """Read the shards of an engine.

        Args:
            engine: has `module`, `optimizer` (DeepSpeed's), `basic_optimizer` (torch's, inside it), `device`, and the
                attributes that a subclass reads.
        """
        self.engine = engine
        self.optimizer: Any = engine.optimizer
        self.inner: torch.optim.Optimizer = engine.basic_optimizer
        self.device: torch.device = torch.device(engine.device)
        # The ranks among which weights and gradients are divided, and those among which one sequence is.
        self.process_group: dist.ProcessGroup | None = self._data_parallel_group()
        """Ranks that hold the shards; None for the whole world."""
        self.world_size: int = dist.get_world_size(self.process_group)
        self.rank: int = dist.get_rank(self.process_group)
        configured_size = engine._config._param_dict.get("sequence_parallel_size") or 1
        self.sequence_parallel = max(int(engine.sequence_parallel_size), int(configured_size))
        """Number of consecutive ranks that share their sequences, each with a part of the tokens."""
        # The shards of this rank, which each stage reads from its own optimizer.
        self._name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self.flats: list[Tensor] = []
        """Master partitions of this rank, the very tensors that the inner optimizer steps."""
        self.param_group_of_flat: list[int] = []
        """Index of each flat's param group in the inner optimizer."""
        self.shards: dict[str, Shard] = {}
        """Shard of each weight in the optimizer, by name; in the same order on every rank."""
        self.low_precision: dict[str, Any] = {}
        """Parameters that the forward sees, by name."""
        self._kept_of_all: dict[int, Tensor] = {}
        """Packed bits of the frozen masks of all ranks, by flat, where every rank has all gradients."""
        self._read()
        self.index_of: dict[int, int] = {id(flat): index for index, flat in enumerate(self.flats)}
        """Index of a flat in `flats`, by id(flat)."""
        self.shards_in: list[list[Shard]] = [[] for _ in self.flats]
        """Shards in each flat, in the same order on every rank; prunable weights share none with others."""
        for shard in self.shards.values():
            self.shards_in[shard.flat].append(shard)

    @abstractmethod
    def _data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group on which ZeRO gathers weights and reduces gradients."""

    @abstractmethod
    def _read(self) -> None:
        """Fill `flats`, `param_group_of_flat`, and the shards."""

    def forget_states(self, index: int, keys: Collection[str]) -> None:
        """Drop DeepSpeed's views of optimizer states that were deleted from a flat.

        Some stages hold such views from their first step on, which would keep the memory.
        """
        for shard in self.shards_in[index]:
            mapping = getattr(self.low_precision[shard.name], "_hp_mapping", None)
            if mapping is not None and mapping.optim_fragment:
                for key in keys:
                    mapping.optim_fragment.pop(key, None)

    @abstractmethod
    def push(self) -> None:
        """Copy masters to the weights that the next forward sees, as DeepSpeed does at the end of a step."""

    @abstractmethod
    def mask_gradients(self, mask: MaskGradient) -> None:
        """Call `mask` on the averaged gradients of this step, from which DeepSpeed takes the norm. Collective.

        From the first call on `mask` stands for one frozen mask, until `forget_masks`.
        """

    def forget_masks(self) -> None:
        """Drop what `mask_gradients` keeps of frozen masks: others may be loaded."""
        self._kept_of_all.clear()

    def before_norm(self, act: Callable[[], None]) -> bool:
        """Call `act` in every step, when gradients are averaged and before DeepSpeed takes their norm.

        Returns:
            False if DeepSpeed takes no norm, and never calls `act`.
        """
        call_before(self.optimizer, "step", act)
        return True

    def _add(self, parameter: Parameter, shape: tuple[int, ...], start: int, stop: int, flat: int, offset: int) -> None:
        """Register the shard of one weight; arguments as in `Shard`."""
        name = self._name_of[id(parameter)]
        self.shards[name] = Shard(name, shape, start, stop, flat, offset)
        self.low_precision[name] = parameter

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which the forward computes with the weights."""
        dtype: torch.dtype = next(iter(self.low_precision.values())).dtype
        return dtype

    @property
    def loss_scale(self) -> float:
        """Factor of gradients during a backward pass; 1 without fp16."""
        scale = getattr(self.optimizer, "loss_scale", None)
        return 1.0 if scale is None else float(scale)

    @property
    def param_group_names(self) -> list[list[str]]:
        """Names of the weights in each param group of the inner optimizer, in the order of its flats."""
        names: list[list[str]] = [[] for _ in self.inner.param_groups]
        for name, shard in self.shards.items():
            names[self.param_group_of_flat[shard.flat]].append(name)
        return names

    @cached_property
    def marked(self) -> set[str]:
        """Names of the weights whose param groups are marked as prunable."""
        pairs = zip(self.param_group_names, self.inner.param_groups, strict=True)
        return {name for names, param_group in pairs if is_prunable_group(param_group) for name in names}

    def require_own_partitions(self, names: Iterable[str]) -> dict[str, Shard]:
        """Return the shards of prunable weights, after a check that no other weight lies in their partitions.

        Raises:
            ValueError: some weight is missing from the optimizer, or shares a partition with others.
        """
        cure = (
            "build the optimizer with deepspeed.initialize(model_parameters=sparseforge_ds.param_groups(model, config))"
        )
        # Every prunable weight is trained.
        prunable: dict[str, Shard] = {}
        for name in names:
            if name not in self.shards:
                raise ValueError(f"{name} is not in the engine's optimizer; {cure}")
            prunable[name] = self.shards[name]
        # No other weight lies in one of their partitions.
        for flat in {shard.flat for shard in prunable.values()}:
            if others := [shard.name for shard in self.shards_in[flat] if shard.name not in prunable]:
                raise ValueError(f"{others[0]} is not prunable but shares a partition with weights that are; {cure}")
        # The marks on the param groups agree with the config.
        if mismatched := sorted(self.marked ^ prunable.keys()):
            state = "is not prunable by this config" if mismatched[0] in self.marked else "is prunable"
            raise ValueError(f"{mismatched[0]} {state}, and its param group says otherwise; {cure}")
        return prunable

    def check(self, names: Iterable[str]) -> None:
        """Compare the masters of weights with their low-precision copies, element by element. Collective.

        All ranks raise the same error.

        Raises:
            AgreedError: some weight is infinite or NaN, which equals nothing; the loaded model is damaged.
            RuntimeError: some shard is not what its copy is; the installed DeepSpeed has another layout.
        """
        shards = [self.shards[name] for name in names]
        all_or_raise(lambda: self._require_finite(shards), self.all_gather_object)
        differing = next((shard for shard in shards if not self._equals_copy(shard)), None)
        for rank, shard in enumerate(self.all_gather_object(differing)):
            if shard is not None:
                raise RuntimeError(
                    f"{shard.name}: elements {shard.start}..{shard.stop} on rank {rank} are not where the shard map "
                    f"expects them; DeepSpeed {version('deepspeed')} lays out {type(self.optimizer).__name__} in "
                    "another way. Install a version in the range of pyproject.toml, and report this"
                )

    def _require_finite(self, shards: Iterable[Shard]) -> None:
        """Raise ValueError for a shard whose masters are infinite or NaN."""
        for shard in shards:
            if not self.master(shard).isfinite().all():
                raise ValueError(
                    f"{shard.name} holds infinity or NaN in {self.compute_dtype}: the model that was loaded is "
                    "damaged; give a sound one, or one that fits the run's dtype"
                )

    def _equals_copy(self, shard: Shard) -> bool:
        """Return True if the master of a shard rounds to the weight that the forward sees."""
        copy = self._low_precision_of(shard)
        return torch.equal(self.master(shard).to(copy.dtype).to(copy.device), copy)

    def master(self, shard: Shard) -> Tensor:
        """Return a (numel of the shard,) view of the masters of a shard or a part of one."""
        return shard.slice_of_flat(self.flats[shard.flat].data)

    def gather_master(self, name: str) -> Tensor:
        """Return the master of a weight in fp32, in its shape, on every rank. Collective."""
        shard = self.shards[name]
        full = torch.zeros(shard.shape, device=self.device)
        full.view(-1)[shard.start : shard.stop] = self.master(shard)
        return self.sum_shards(full)

    def write_master(self, name: str, full: Tensor) -> None:
        """Write a weight's master from its full value, which every rank has, in any shape."""
        shard = self.shards[name]
        self.master(shard).copy_(full.reshape(-1)[shard.start : shard.stop])

    def as_forward_dtype(self, name: str, full: Tensor) -> Tensor:
        """Round values of a weight's master as the forward sees them, and return them in fp32."""
        return full.to(self.flats[self.shards[name].flat].dtype).to(self.low_precision[name].dtype).float()

    def _low_precision_of(self, shard: Shard) -> Tensor:
        """Return a (numel of the shard,) view of the weight that the forward sees."""
        own_values: Tensor = self.low_precision[shard.name].data.view(-1)[shard.start : shard.stop]
        return own_values

    def untrained(self) -> dict[str, tuple[int, int, Tensor]]:
        """Return what this rank holds of every parameter that the optimizer does not have, by name.

        Returns:
            First element on this rank, one past the last, and a flat view of these elements.
        """
        return {
            name: (0, parameter.numel(), parameter.data.view(-1))
            for name, parameter in self.engine.module.named_parameters()
            if name not in self.shards
        }

    def load_optimizer(self, states: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
        """Replace the inner optimizer's state in place: its `load_state_dict` would cast our tensors.

        Args:
            states: state of each flat, with tensors laid out like it; an empty dict for none.
            settings: new values of each param group's hyperparameters.
        """
        for param_group, changed in zip(self.inner.param_groups, settings, strict=True):
            param_group.update(changed)
        self.inner.state.clear()
        # Optimizers make their states where a weight has none at all.
        self.inner.state.update({flat: state for flat, state in zip(self.flats, states, strict=True) if state})

    def set_loss_scale(self, saved: dict[str, Any]) -> None:
        """Continue a dynamic fp16 loss scale from saved numbers; a fixed scale stays as it is."""
        for scaler in self.loss_scalers():
            if getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False):
                scaler.cur_scale = saved["scale"]
                scaler.cur_iter = saved["iteration"]
                scaler.last_overflow_iter = saved["last_overflow"]
                if "hysteresis" in saved and hasattr(scaler, "cur_hysteresis"):
                    scaler.cur_hysteresis = saved["hysteresis"]

    def loss_scalers(self) -> list[Any]:
        """Return the objects that hold DeepSpeed's loss scale (`loss_scaler`, or `loss_scale_config` at stage 0)."""
        scalers = (getattr(self.optimizer, name, None) for name in ("loss_scaler", "loss_scale_config"))
        return [scaler for scaler in scalers if hasattr(scaler, "__dict__")]

    # -- collectives; a rank is its number in the process group -------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks in place, and return it."""
        dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def sum_shards(self, tensor: Tensor) -> Tensor:
        """Sum in place what each rank computed from its shards; at stage 0 every rank has the sum already."""
        return tensor if self.replicated else self.all_reduce(tensor)

    def reduce(self, tensor: Tensor, owner: int) -> None:
        """Sum a tensor over the ranks, in place on the owner; on other ranks it is scratch afterwards."""
        dist.reduce(tensor, group=self.process_group, group_dst=owner)

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> None:
        """Sum (world_size * n,) over the ranks, and fill `out`, (n,), with this rank's part."""
        dist.reduce_scatter_tensor(out, tensor, group=self.process_group)

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Fill `out`, (world_size * n,), with the (n,) tensors of all ranks."""
        dist.all_gather_into_tensor(out, tensor, group=self.process_group)

    def all_to_all(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        """Exchange elements with every rank.

        Args:
            out: (sum of received,), is filled.
            tensor: (sum of sent,).
            received: number of elements from each rank.
            sent: number of elements to each rank.
        """
        dist.all_to_all_single(out, tensor, received, sent, group=self.process_group)

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Copy the owner's tensor to every rank, in place."""
        dist.broadcast(tensor, group=self.process_group, group_src=owner)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.process_group)
        return values


def call_before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Call `act` before every call of one object's method."""
    method = getattr(owner, name)

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        act()
        return method(*args, **kwargs)

    setattr(owner, name, called)


OTHER_ENGINES: dict[type, type[ShardLayout]] = {}
"""Layouts of engines that are not DeepSpeed's, by the type of the engine; a room of `extras` adds its own."""
