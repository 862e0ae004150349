"""One module whole on every rank, as a plain copy without DeepSpeed's hooks, and the way back to the ranks' shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from sparseforge_ds.zero.shard import ShardLayout
from sparseforge_ds.zero.state import ShardState


class FullParameters:
    """Reads parameters whole, in fp32, from what the ranks hold of them, and writes them back."""

    def __init__(self, layout: ShardLayout, state: ShardState) -> None:
        """Look up where every parameter is.

        Args:
            layout: of the engine.
            state: of the prunable weights, of which W is read and written; of others it is the master.
        """
        self.layout = layout
        self.state = state
        self._untrained = layout.untrained()
        self._prunable = set(state.flats)
        module = layout.engine.module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}

    def names(self, module: nn.Module) -> list[str]:
        """Return the names in the whole model of a module's parameters."""
        return [self._names[id(parameter)] for parameter in module.parameters()]

    def is_trained(self, name: str) -> bool:
        """Return whether the optimizer has this parameter."""
        return name in self.layout.shards

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return whole fp32 parameters end to end, and views of each by its name. Collective; one sum over the
        ranks."""
        sizes = {name: math.prod(self._shapes[name]) for name in names}
        flat = torch.zeros(sum(sizes.values()), device=self.layout.device)
        whole = dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
        for name, values in whole.items():
            start, stop, part = self._part(name)
            # What is not divided counts once in the sum.
            divided = self.is_trained(name) or stop - start < values.numel()
            if divided or self.layout.replicated or self.layout.rank == 0:
                values[start:stop] = part
        self.layout.sum_shards(flat)
        return flat, {name: values.view(self._shapes[name]) for name, values in whole.items()}

    @torch.no_grad()
    def write(self, whole: Mapping[str, Tensor]) -> None:
        """Store this rank's part of trained parameters; `ShardLayout.push` makes them visible."""
        for name, values in whole.items():
            if self.is_trained(name):
                start, stop, part = self._part(name)
                part.copy_(values.reshape(-1)[start:stop])

    def _part(self, name: str) -> tuple[int, int, Tensor]:
        """Return the first element of a parameter on this rank, one past the last, and a view of them."""
        if not self.is_trained(name):
            return self._untrained[name]
        shard = self.layout.shards[name]
        prunable = shard.flat in self._prunable
        part = self.state.dense(shard) if prunable else shard.slice_of_flat(self.layout.flats[shard.flat].data)
        return shard.start, shard.stop, part


def plain_copy(module: nn.Module, whole: Mapping[int, Tensor]) -> nn.Module:
    """Return a module that computes what `module` does in evaluation, with parameters and buffers of its own.

    No hook comes along, and no recomputation of activations. Everything else that it refers to is shared.

    Args:
        module: of a model, partitioned or not.
        whole: the values of its parameters, by their ids.
    """
    parameters: dict[int, nn.Parameter] = {}

    def own(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in parameters:
            parameters[id(parameter)] = nn.Parameter(whole[id(parameter)], requires_grad=False)
        return parameters[id(parameter)]

    def copy_of(original: nn.Module) -> nn.Module:
        copy = original.__class__.__new__(original.__class__)
        # The attributes of a bare module are its registries and hooks, all empty.
        vars(copy).update({**vars(original), **vars(nn.Module())})
        for compiled_or_patched in ("_compiled_call_impl", "forward"):
            vars(copy).pop(compiled_or_patched, None)
        if "gradient_checkpointing" in vars(copy):
            vars(copy)["gradient_checkpointing"] = False
        for name, parameter in original._parameters.items():
            copy._parameters[name] = own(parameter)
        for name, buffer in original._buffers.items():
            copy._buffers[name] = None if buffer is None else buffer.detach().clone()
        copy._non_persistent_buffers_set = set(original._non_persistent_buffers_set)
        for name, child in original._modules.items():
            copy._modules[name] = None if child is None else copy_of(child)
        return copy

    return copy_of(module).eval()
