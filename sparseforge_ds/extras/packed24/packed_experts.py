"""Experts of a packed 2:4 mixture, whose weights, one tensor for all experts of a layer, stay packed in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparseforge_ds.extras.packed24.experts24 import add_choices, experts24, sort_by_expert
from sparseforge_ds.extras.packed24.packed_linear import keep_bits
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, scale_shape
from sparseforge_ds.packed_format.packing import POSITIONS, packed24_shapes, unpack24


class Packed24Experts(nn.Module):
    """Base class that an experts module of transformers gets when its weights are packed.

    `gate_up_proj` (or `up_proj`) and `down_proj` hold the kept values of all experts, (experts, out, in/2). Buffers of
    the same names with `_positions` hold their positions, (experts, out, ceil(in/8)), those with `_scale` the scales of
    rounded values; an element of int4 holds two. All are transposed if the module's weights are. Activations, biases
    and norms are the module's own, as in `transformers.integrations.moe`. `experts_implementation` has no effect.
    """

    is_transposed: bool
    has_bias: bool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the experts' outputs (tokens, hidden), for the experts and weights of each token, (tokens, k)."""
        it: Any = self
        experts, order, ends = sort_by_expert(top_k_index, len(it.down_proj))
        rows = hidden_states[order // top_k_index.shape[1]]
        up = self._product("gate_up_proj" if it.has_gate else "up_proj", rows, experts, ends)
        inner = it._apply_gate(up) if it.has_gate else it.act_fn(up)
        y = self._product("down_proj", inner, experts, ends)
        if getattr(it, "has_post_expert_norm", False):  # older releases of transformers have no such experts
            y = it.post_expert_norm(y)
        return add_choices(y, order, top_k_weights).to(hidden_states.dtype)

    def _product(self, name: str, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows (rows, in) with the weights of their sorted `experts` (rows,), and return (rows, out)."""
        parts = [getattr(self, name), getattr(self, name + POSITIONS), getattr(self, name + SCALE, None)]
        if self.is_transposed:
            parts = [part if part is None else part.transpose(1, 2) for part in parts]
        values, positions, scale = parts
        y: Tensor = experts24(x if scale is not None else x.to(values.dtype), values, positions, ends, scale)
        return y + getattr(self, f"{name}_bias")[experts] if self.has_bias else y

    @torch.no_grad()
    def make_dense(self, dtype: torch.dtype = torch.float32) -> None:
        """Unpack the weights, one expert at a time, rounded values into `dtype`, and restore the module's class."""
        for buffer in [name for name in self._buffers if name.endswith(POSITIONS)]:
            name = buffer.removesuffix(POSITIONS)
            values = getattr(self, name)
            positions = getattr(self, buffer)
            scale = getattr(self, name + SCALE, None)
            scales = [None] * len(values) if scale is None else list(scale)
            first = unpack24(values[0], positions[0], scales[0], dtype)
            dense = first.new_empty((len(values), *first.shape))
            for expert in range(len(values)):
                dense[expert] = unpack24(values[expert], positions[expert], scales[expert], dtype)
            delattr(self, buffer)
            if scale is not None:
                delattr(self, name + SCALE)
            setattr(self, name, nn.Parameter(dense))
        self.__class__ = type(self).__bases__[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move as any module does, and keep rounded values and their scales when others are cast."""
        return super()._apply(keep_bits(self, fn), recurse)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle and deepcopy restore the module from, since its class is made at run time."""
        return _empty, type(self).__bases__, self.__dict__


class Packed24Llama4Experts(Packed24Experts):
    """Packed experts of Llama 4, each of which computes all tokens; those of other experts are zero."""

    is_transposed = True
    has_bias = False

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]  # each token comes once an expert
        """Return the outputs (experts * tokens, hidden) of rows in the same order."""
        it: Any = self
        numbers = torch.arange(len(it.down_proj), device=hidden_states.device)
        ends = (numbers + 1) * (len(hidden_states) // len(numbers))
        gate, up = self._product("gate_up_proj", hidden_states, numbers, ends).chunk(2, dim=-1)
        return self._product("down_proj", up * it.act_fn(gate), numbers, ends)


def packed_kind(experts: nn.Module) -> type[Packed24Experts] | None:
    """Return the packed replacement class for an experts module, or None if there is none.

    There is one for classes decorated by `use_experts_implementation` of transformers, and for Llama 4.
    """
    if getattr(experts, "is_transposed", None) is not None:
        return Packed24Experts
    return Packed24Llama4Experts if type(experts).__name__ == "Llama4TextExperts" else None


def _packed_class(kind: type[Packed24Experts], dense_class: type[nn.Module]) -> type[nn.Module]:
    """Make the packed form of a class of experts."""
    return type(f"Packed24{dense_class.__name__}", (kind, dense_class), {})


def _empty(kind: type[Packed24Experts], dense_class: type[nn.Module]) -> nn.Module:
    """Return an instance without attributes, for pickle to fill."""
    packed_class = _packed_class(kind, dense_class)
    return packed_class.__new__(packed_class)


def pack_experts(experts: Any, kind: type[Packed24Experts], names: list[str], grid: Grid | None = None) -> None:
    """Turn an experts module of transformers into one for packed weights, in place; the loader fills them.

    Args:
        experts: the module.
        kind: its `packed_kind`.
        names: its weights, each of which becomes empty tensors for values and positions.
        grid: of rounded values, which also get a tensor for scales; None: values in the module's dtype.
    """
    experts.__class__ = _packed_class(kind, type(experts))
    for name in names:
        dense = getattr(experts, name)
        axis = -2 if experts.is_transposed else -1
        dtype = None if grid is None else grid.dtype
        values, positions = packed24_shapes(tuple(dense.shape), axis, dtype)
        setattr(experts, name, nn.Parameter(dense.new_empty(values, dtype=dtype), requires_grad=False))
        experts.register_buffer(name + POSITIONS, dense.new_empty(positions, dtype=torch.uint8))
        if grid is not None:
            scales = dense.new_empty(scale_shape(values, axis, grid), dtype=grid.scale_dtype)
            experts.register_buffer(name + SCALE, scales)
