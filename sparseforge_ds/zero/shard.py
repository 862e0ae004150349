"""Which elements of which weight this rank holds, and what the ranks that share the data tell each other.

`deepspeed_layouts` reads a `ShardLayout` out of each of DeepSpeed's optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

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
    """Index of the master partition (`ShardLayout.flats`) that holds it."""
    offset: int
    """Where it begins in that partition."""

    @property
    def numel(self) -> int:
        """Elements of the weight on this rank."""
        return self.stop - self.start

    def slice_of_flat(self, flat: Tensor) -> Tensor:
        """The shard's elements, as a view of a tensor laid out like its master partition."""
        return flat.view(-1)[self.offset : self.offset + self.numel]


class ShardLayout(ABC):
    """The shard map of one engine, the way back from master to low-precision weights, and the ranks' collectives.

    The collectives run on the communicator of ZeRO's own gathers and reductions. A second communicator beside it could
    deadlock under NCCL, where ranks may start the kernels of two communicators in different orders.

    A subclass says which group the ranks form (`_data_parallel_group`), fills `flats`, `group_of_flat` and the shards
    (`_read`, which calls `_add` once for each weight), and brings masters to the weights of the forward (`push`).
    """

    replicated: bool = False
    """Whether every rank holds every element (stage 0)."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        """Read the shard map.

        Args:
            engine: needs `module`, `optimizer` (DeepSpeed's), `basic_optimizer` (torch's, inside it) and `device` here,
                and what the methods of a subclass read.
        """
        self.engine = engine
        self.optimizer: Any = engine.optimizer
        self.inner: torch.optim.Optimizer = engine.basic_optimizer
        self.device: torch.device = torch.device(engine.device)
        self.group: dist.ProcessGroup | None = self._data_parallel_group()
        """The ranks that hold the shards; None for all there are."""
        self.world_size: int = dist.get_world_size(self.group)
        self.rank: int = dist.get_rank(self.group)
        said = engine._config._param_dict.get("sequence_parallel_size") or 1
        self.sequence_parallel = max(int(engine.sequence_parallel_size), int(said))
        """Consecutive ranks that share their sequences, each with a part of the tokens."""
        self._name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self.flats: list[Tensor] = []
        """This rank's master partitions, as the inner optimizer has them."""
        self.group_of_flat: list[int] = []
        """Index of the inner optimizer's param group that each flat belongs to."""
        self.shards: dict[str, Shard] = {}
        """What this rank holds of each weight in the optimizer, by name; in the same order on every rank."""
        self.low_precision: dict[str, Any] = {}
        """The parameters that the forward sees, by name."""
        self._read()
        self.index_of: dict[int, int] = {id(flat): index for index, flat in enumerate(self.flats)}

    @abstractmethod
    def _data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group on which ZeRO gathers weights and reduces gradients."""

    @abstractmethod
    def _read(self) -> None:
        """Fill `flats`, `group_of_flat`, and the shards."""

    @abstractmethod
    def push(self) -> None:
        """Bring changed masters to the weights that the next forward sees, as DeepSpeed does at the end of a step."""

    def before_norm(self, mask: Callable[[int, int, Tensor], None]) -> bool:
        """Have `mask` called on this rank's averaged gradients in every step, before DeepSpeed looks at them.

        Args:
            mask: is given the index of a master partition, the element that the gradients begin with, and the flat
                gradients, to be changed in place.

        Returns:
            False where DeepSpeed has no such moment; `mask` is never called then.
        """
        return False

    def _add(self, parameter: Parameter, shape: tuple[int, ...], start: int, stop: int, flat: int, offset: int) -> None:
        name = self._name_of[id(parameter)]
        self.shards[name] = Shard(name, shape, start, stop, flat, offset)
        self.low_precision[name] = parameter

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

    def require_own_partitions(self, names: Iterable[str]) -> dict[str, Shard]:
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
        groups = zip(self.groups, self.inner.param_groups, strict=True)
        marked = {name for names, group in groups if group.get(GROUP_KEY) for name in names}
        if odd := sorted(marked ^ chosen.keys()):
            what = "is not prunable by this config" if odd[0] in marked else "is prunable"
            raise ValueError(f"{odd[0]} {what}, and its param group says otherwise; {cure}")
        return chosen

    def check(self, names: Iterable[str]) -> None:
        """Compare the map with the low-precision weights, element by element.

        Raises:
            RuntimeError: some weight is not where the map says; the installed DeepSpeed has another layout.
        """
        for name in names:
            shard, here = self.shards[name], self._low_precision_of(self.shards[name])
            master = shard.slice_of_flat(self.flats[shard.flat].detach())
            if not torch.equal(master.to(here.dtype).to(here.device), here):
                raise RuntimeError(
                    f"{name}: elements {shard.start}..{shard.stop} are not where the shard map expects them; "
                    f"DeepSpeed {version('deepspeed')} lays out {type(self.optimizer).__name__} in another way. "
                    "Install a version in the range of pyproject.toml, and report this"
                )

    def _low_precision_of(self, shard: Shard) -> Tensor:
        """(numel of the shard,) view of the weight that the forward sees, where it is on this rank."""
        part: Tensor = self.low_precision[shard.name].data.view(-1)[shard.start : shard.stop]
        return part

    def untrained(self) -> dict[str, tuple[int, int, Tensor]]:
        """Parameters that the optimizer does not have: first element here, one past the last, and a view of them.

        Raises:
            ValueError: one of them is swapped out to disk.
        """
        return {
            name: (0, parameter.numel(), parameter.data.view(-1))
            for name, parameter in self.engine.module.named_parameters()
            if name not in self.shards
        }

    def load_optimizer(self, states: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
        """Replace the whole state of the inner optimizer, through its own loading and its hooks.

        Args:
            states: of each flat, laid out like it; empty for none.
            settings: what to change in each param group.
        """
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for group, changed in zip(self.inner.param_groups, settings, strict=True):
            numbers = list(range(len(state), len(state) + len(group["params"])))
            state |= {n: states[self.index_of[id(flat)]] for n, flat in zip(numbers, group["params"], strict=True)}
            groups.append({**group, **changed, "params": numbers})
        self.inner.load_state_dict({"state": {n: held for n, held in state.items() if held}, "param_groups": groups})

    def set_loss_scale(self, saved: dict[str, Any]) -> None:
        """Continue a dynamic fp16 loss scale; one that is fixed here stays what it is."""
        for scaler in self.loss_scalers():
            if getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False):
                scaler.cur_scale, scaler.cur_iter = saved["scale"], saved["iteration"]
                scaler.last_overflow_iter = saved["last_overflow"]
                if "hysteresis" in saved and hasattr(scaler, "cur_hysteresis"):
                    scaler.cur_hysteresis = saved["hysteresis"]

    def loss_scalers(self) -> list[Any]:
        """What holds DeepSpeed's loss scale: ZeRO's `loss_scaler`, the `loss_scale_config` of stage 0."""
        held = (getattr(self.optimizer, name, None) for name in ("loss_scaler", "loss_scale_config"))
        return [scaler for scaler in held if hasattr(scaler, "__dict__")]

    # -- collectives; a rank is its number in the group ---------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_shards(self, tensor: Tensor) -> Tensor:
        """Sum in place what every rank has formed of its shards; what was formed of replicas is whole already."""
        return tensor if self.replicated else self.all_reduce(tensor)

    def reduce(self, tensor: Tensor, owner: int) -> None:
        """Sum over the ranks, in place on the owner; elsewhere the tensor is scratch afterwards."""
        dist.reduce(tensor, group=self.group, group_dst=owner)

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> None:
        """(world_size * n,) of every rank -> (n,) of the sum, each rank its part."""
        dist.reduce_scatter_tensor(out, tensor, group=self.group)

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """(n,) of every rank -> (world_size * n,) on all of them."""
        dist.all_gather_into_tensor(out, tensor, group=self.group)

    def all_to_all(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        """(sum of sent,) -> (sum of received,): so many elements to and from each rank."""
        dist.all_to_all_single(out, tensor, received, sent, group=self.group)

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """The owner's tensor on every rank, in place."""
        dist.broadcast(tensor, group=self.group, group_src=owner)

    def send(self, tensor: Tensor, receiver: int) -> None:
        """Hand a contiguous tensor to one rank, which calls `receive`."""
        dist.send(tensor, group=self.group, group_dst=receiver)

    def receive(self, tensor: Tensor, sender: int) -> None:
        """Fill a contiguous tensor by what one rank sends."""
        dist.recv(tensor, group=self.group, group_src=sender)

    def all_gather_object(self, value: Any) -> list[Any]:
        """A picklable value of every rank, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values
