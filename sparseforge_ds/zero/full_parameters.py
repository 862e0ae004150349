"""Parameters in full on every rank, for a plain copy of a module without DeepSpeed's hooks, and back to shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from sparseforge_ds.zero.shard import ShardLayout
from sparseforge_ds.zero.state import ShardState


class FullParameters:
    """Reader of full fp32 parameters from the shards of all ranks, and writer of them to the shards."""

    def __init__(self, layout: ShardLayout, state: ShardState) -> None:
        """Look up where every parameter is.

        Args:
            layout: shard map of the engine.
            state: state of the prunable weights. W is read and written for them, the master for others.
        """
        self.layout = layout
        self.state = state
        self._untrained = layout.untrained()
        module = layout.engine.module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of a module's parameters, as the full model names them."""
        return [self._names[id(parameter)] for parameter in module.parameters()]

    def is_trained(self, name: str) -> bool:
        """Return whether the optimizer has this parameter."""
        return name in self.layout.shards

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return full fp32 parameters end to end, and a view of each by name. Collective: one sum over the ranks."""
        sizes = {name: math.prod(self._shapes[name]) for name in names}
        flat = torch.zeros(sum(sizes.values()), device=self.layout.device)
        flat_views = dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
        for name, values in flat_views.items():
            start, stop, own_values = self._part(name)
            # A parameter that every rank holds in full counts once in the sum.
            divided = self.is_trained(name) or stop - start < values.numel()
            if divided or self.layout.replicated or self.layout.rank == 0:
                values[start:stop] = own_values
        self.layout.sum_shards(flat)
        return flat, {name: values.view(self._shapes[name]) for name, values in flat_views.items()}

    @torch.no_grad()
    def write(self, full: Mapping[str, Tensor]) -> None:
        """Store this rank's part of full parameters, and skip untrained ones; `ShardLayout.push` makes them visible."""
        for name, values in full.items():
            if self.is_trained(name):
                start, stop, own_values = self._part(name)
                own_values.copy_(values.reshape(-1)[start:stop])

    def _part(self, name: str) -> tuple[int, int, Tensor]:
        """Return the first element of a parameter on this rank, one past the last, and a view of them."""
        if not self.is_trained(name):
            return self._untrained[name]
        shard = self.layout.shards[name]
        own_values = self.state.dense(shard) if shard.flat in self.state.shards_in else self.layout.master(shard)
        return shard.start, shard.stop, own_values


def plain_copy(module: nn.Module, full: Mapping[int, Tensor]) -> nn.Module:
    """Return a module that computes what `module` does in evaluation, with parameters and buffers of its own.

    It has no hooks and does not recompute activations. Everything else that it refers to is shared.

    Args:
        module: part of a model, partitioned or not.
        full: full values of its parameters, by id(parameter).
    """
    parameters: dict[int, nn.Parameter] = {}

    def own_parameter(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in parameters:
            parameters[id(parameter)] = nn.Parameter(full[id(parameter)], requires_grad=False)
        return parameters[id(parameter)]

    def copy_module(original: nn.Module) -> nn.Module:
        copy = original.__class__.__new__(original.__class__)
        # The attributes of a bare module are its registries and hooks, all empty.
        vars(copy).update({**vars(original), **vars(nn.Module())})
        for compiled_or_patched in ("_compiled_call_impl", "forward"):
            vars(copy).pop(compiled_or_patched, None)
        if "gradient_checkpointing" in vars(copy):
            vars(copy)["gradient_checkpointing"] = False
        for name, parameter in original._parameters.items():
            copy._parameters[name] = own_parameter(parameter)
        for name, buffer in original._buffers.items():
            copy._buffers[name] = None if buffer is None else buffer.detach().clone()
        copy._non_persistent_buffers_set = set(original._non_persistent_buffers_set)
        for name, child in original._modules.items():
            copy._modules[name] = None if child is None else copy_module(child)
        return copy

    return copy_module(module).eval()
