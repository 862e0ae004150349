"""The two optimizer hooks that publish m_eff W, the state they carry, and its survival through a checkpoint.

Adam creates its moments lazily when a parameter's state is empty, so our tensors wait outside the optimizer until its
first step is over. From then on they are ordinary optimizer state: DeepSpeed saves, shards and offloads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparseforge_ds.zero.shard import Layout, Shard

STATE_KEYS = ("dense", "mask", "curvature")
"""Our tensors in the state of a master partition, fp32, laid out like it; padding is 0."""

PublishShard = Callable[[Shard, Tensor, Tensor, Tensor], None]
Harvest = Callable[[int, Tensor], None]


class StepRule(Protocol):
    """What else happens to prunable weights around a step of the inner optimizer."""

    trains_the_rest: bool
    """Whether weights that are not prunable are stepped."""

    @property
    def remembers(self) -> bool:
        """Whether publishing the step that begins needs W as it is now."""

    def before_step(self, index: int, gradient: Tensor, group: dict[str, Any]) -> Tensor | None:
        """The gradient to step the dense weights of a master partition with; None to leave them alone."""

    def after_step(self, index: int, group: dict[str, Any]) -> None:
        """Before a partition is published."""


class Publication:
    """Keeps DeepSpeed's master at m_eff W while the optimizer trains W."""

    def __init__(
        self, layout: Layout, shards: dict[str, Shard], publish: PublishShard, keys: tuple[str, ...] = ()
    ) -> None:
        """Attach to the engine's inner optimizer.

        Args:
            layout: of the engine.
            shards: of the prunable weights, by name.
            publish: called as (shard, dense, mask, out) with views of this rank's elements; writes m_eff W to `out`.
            keys: of the states to keep beside `dense` and `mask`; 0 at first.
        """
        self.layout = layout
        self.publish = publish
        self.keys = ("dense", "mask", *keys)
        """Of our tensors in the optimizer's state."""
        self.rule: StepRule | None = None
        self.harvest: Harvest | None = None
        """When set, a step hands its gradients to this and changes nothing."""
        self.steps_begun = 0
        """Optimizer steps applied since the owner last looked; more than one is a missed `forge.step`."""
        self.in_step = False
        """Whether it is an optimizer step that publishes, one that the owner has not counted yet."""
        self.loads_masks = True
        """Whether optimizer state that is loaded must hold our tensors: not if it is from before the first step."""
        self._by_flat: dict[int, list[Shard]] = {}
        for shard in shards.values():
            self._by_flat.setdefault(shard.flat, []).append(shard)
        self._waiting: dict[int, dict[str, Tensor]] = {}
        self.reset()
        self._swapped: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._loading: dict[int, dict[str, Tensor]] = {}
        inner = layout.inner
        inner.register_step_pre_hook(self._before_step)
        inner.register_step_post_hook(self._after_step)
        inner.register_load_state_dict_pre_hook(self._before_load)
        inner.register_load_state_dict_post_hook(self._after_load)

    def reset(self) -> None:
        """Begin anew from the present masters: nothing is masked, and our tensors wait for the first step."""
        self._waiting = {index: self._initial(index) for index in self.flats}

    def _initial(self, index: int) -> dict[str, Tensor]:
        flat = self.layout.flats[index].detach()
        mask = torch.zeros(flat.shape, dtype=torch.float32, device=flat.device)
        for shard in self._by_flat[index]:
            shard.of(mask).fill_(1.0)
        state = {"dense": flat.to(torch.float32, copy=True), "mask": mask}
        return state | {key: torch.zeros_like(mask) for key in self.keys if key not in state}

    def settle(self) -> None:
        """Make our tensors optimizer state without a step, for a run that has none; Adam could not begin after that."""
        for index, waiting in self._waiting.items():
            # torch's Adam loads no state without a step.
            self.layout.inner.state[self.layout.flats[index]].update(waiting | {"step": torch.tensor(0.0)})
        self._waiting.clear()

    @property
    def complete(self) -> bool:
        """Whether all our tensors are optimizer state: after the first step, or after a checkpoint was loaded."""
        return not self._waiting

    @property
    def flats(self) -> list[int]:
        """Indices of the master partitions that hold prunable weights."""
        return sorted(self._by_flat)

    def state(self, index: int) -> dict[str, Tensor]:
        """Our tensors of one master partition. Look them up at every use: a checkpoint load replaces them."""
        return self._waiting.get(index) or self.layout.inner.state[self.layout.flats[index]]

    def state_dtype(self, index: int) -> torch.dtype:
        """The dtype of a flat's per-element optimizer state: that of what the optimizer steps on."""
        if index in self._by_flat or getattr(self.layout.inner, "fp32_optimizer_states", False):
            return torch.float32
        return self.layout.flats[index].dtype

    def of(self, shard: Shard, key: str) -> Tensor:
        """This rank's elements of one weight in `dense`, `mask` or `curvature`, as a view."""
        return shard.of(self.state(shard.flat)[key])

    def before(self, shard: Shard) -> Tensor | None:
        """This rank's elements of W before the step that is being published; None if the rule did not ask for it.

        They may lie in the memory that is published to: read them before it is written.
        """
        found = self._before.get(shard.flat)
        return None if found is None else shard.of(found)

    @torch.no_grad()
    def write_masters(self) -> None:
        """master = m_eff W for every prunable partition, outside an optimizer step; `Layout.push` makes it visible."""
        for index in self.flats:
            self._write(index, self.layout.flats[index].data)

    def _write(self, index: int, out: Tensor) -> None:
        state = self.state(index)
        for shard in self._by_flat[index]:
            if shard.numel:
                self.publish(shard, shard.of(state["dense"]), shard.of(state["mask"]), shard.of(out))

    def _active(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Master partitions that take part in this call, and their groups: ZeRO-3 steps one sub-group at a time."""
        return [(flat, group) for group in self.layout.inner.param_groups for flat in group["params"]]

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for flat, group in self._active():
            index = self.layout.index_of[id(flat)]
            if self.harvest is not None:
                if flat.grad is not None:
                    self._gradients.append((flat, flat.grad))
                    self.harvest(index, flat.grad.detach())
                    flat.grad = None
            elif index in self._by_flat:
                gradient, flat.grad = flat.grad, None
                master, dense = flat.data, self.state(index)["dense"].view(flat.shape)
                self._swapped[index] = master
                if self.rule is not None and self.rule.remembers:
                    # The master is written anew after the step; until then it can hold what the step began from.
                    self._before[index] = master.copy_(dense) if master.dtype == dense.dtype else dense.clone()
                flat.data = dense
                flat.grad = None if gradient is None else gradient.to(flat.dtype)
                if self.rule is not None and flat.grad is not None:
                    used = self.rule.before_step(index, flat.grad, group)
                    if used is None:
                        self._gradients.append((flat, flat.grad))
                    flat.grad = used
            elif self.rule is not None and not self.rule.trains_the_rest and flat.grad is not None:
                self._gradients.append((flat, flat.grad))
                flat.grad = None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for flat, group in self._active():
            index = self.layout.index_of[id(flat)]
            if self.harvest is not None or index not in self._by_flat:
                continue
            if waiting := self._waiting.pop(index, None):
                optimizer.state[flat].update(waiting)
            if self.rule is not None:
                with torch.no_grad():
                    self.rule.after_step(index, group)
            gradient, flat.grad = flat.grad, None
            flat.data = self._swapped.pop(index)
            flat.grad = None if gradient is None else gradient.to(flat.dtype)
            self.in_step = True
            with torch.no_grad():
                self._write(index, flat.data)
            self.in_step = False
            self._before.pop(index, None)
            if index == self.flats[0]:
                self.steps_begun += 1
        for flat, gradient in self._gradients:
            flat.grad = gradient.to(flat.dtype)  # offload keeps the buffer and would lose it
        self._gradients.clear()

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Take the tensors aside: torch would cast ours, and moments of fp32 weights, to the master's dtype."""
        self._loading = {
            key: {name: value for name, value in state.items() if isinstance(value, Tensor)}
            for key, state in state_dict["state"].items()
            if isinstance(state, dict)
        }

    def _after_load(self, optimizer: Optimizer) -> None:
        parameters = (flat for group in optimizer.param_groups for flat in group["params"])
        for key, flat in enumerate(parameters):
            index = self.layout.index_of[id(flat)]
            loaded = self._loading.get(key, {})
            expected = set()
            if index in self._by_flat and self.loads_masks:
                expected = set(self.state(index)) & set(self.keys)
                if missing := expected - set(loaded):
                    raise ValueError(
                        f"the checkpoint holds no {', '.join(sorted(missing))} for master partition {index}: it was "
                        "not written by a sparseforge run with this importance; start a fresh run with --model instead"
                    )
                self._waiting.pop(index, None)
            for name in expected:
                if loaded[name].numel() != flat.numel():
                    raise ValueError(
                        f"the checkpoint's {name} of master partition {index} has {loaded[name].numel()} elements, "
                        f"this engine {flat.numel()}: use forge.restore, which fits any world size and ZeRO stage"
                    )
                optimizer.state[flat][name] = loaded[name].to(device=flat.device, dtype=torch.float32)
            if self.state_dtype(index) != flat.dtype:
                for name in set(loaded) - expected:
                    if optimizer.state[flat][name].dtype != loaded[name].dtype:
                        optimizer.state[flat][name] = loaded[name].to(device=flat.device)
        self._loading = {}
