"""Building blocks of the rows of the channel table.

Names are globs as in `model.family_table`, except that `*` is a number: of the layer, then of the expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparseforge_ds.extras.basis.permutation.layouts import ChannelLayout, stacked, whole_axis

Part = Literal["mlp", "heads", "residual"]


@dataclass(frozen=True)
class ChannelAxis:
    """Axis of the named tensors along which channels lie."""

    names: str
    """Glob over parameter names, in files and in memory."""
    axis: int
    """Negative index of the axis."""
    layout: ChannelLayout = whole_axis


@dataclass(frozen=True)
class Channels:
    """Channels that have one order in all tensors of a layer, or of the model."""

    name: str
    """Name of the dimension; `*` is the number of the layer."""
    part: Part
    tensors: tuple[ChannelAxis, ...]
    experts: bool = False
    """True: every routed expert has its own order, and a second number in a tensor's name is the expert's."""


@dataclass(frozen=True)
class FamilyChannels:
    """Tensors of an architecture, by whether their channels can be reordered."""

    rows: tuple[Channels, ...]
    fixed: tuple[str, ...]
    """Globs over the tensors without channels of any row."""


def outputs(layer: str, layout: ChannelLayout = whole_axis) -> tuple[ChannelAxis, ...]:
    """Return the output axis of a linear layer, and that of its bias."""
    return ChannelAxis(f"{layer}.weight", -2, layout), ChannelAxis(f"{layer}.bias", -1, layout)


def inputs(layer: str, layout: ChannelLayout = whole_axis) -> ChannelAxis:
    """Return the input axis of a linear layer."""
    return ChannelAxis(f"{layer}.weight", -1, layout)


def norm(name: str) -> tuple[ChannelAxis, ...]:
    """Return the axes of a norm's gain and of its bias, which may be missing."""
    return ChannelAxis(f"{name}.weight", -1), ChannelAxis(f"{name}.bias", -1)


def gated(mlp: str) -> Channels:
    """Return the inner channels of an MLP with gate, up and down projections."""
    at = f"layers.*.{mlp}"
    return Channels(at, "mlp", (*outputs(f"{at}.gate_proj"), *outputs(f"{at}.up_proj"), inputs(f"{at}.down_proj")))


def plain(first: str, second: str, layout: ChannelLayout = whole_axis) -> Channels:
    """Return the inner channels of an MLP with two linear layers in one module; the first may be gate and up."""
    at = first.rpartition(".")[0]
    return Channels(at, "mlp", (*outputs(first, layout), inputs(f"{at}.{second}")))


def heads(at: str, writer: str, written: ChannelLayout, reader: str, read: ChannelLayout) -> Channels:
    """Return the channels of attention values.

    Args:
        at: the attention module.
        writer: its layer that computes the values.
        written: layout of the values in the writer's outputs.
        reader: its layer that reads the attended values.
        read: layout of the values in the reader's inputs.
    """
    return Channels(f"{at}.values", "heads", (*outputs(f"{at}.{writer}", written), inputs(f"{at}.{reader}", read)))


def experts(module: str, gate: str, up: str, down: str) -> Channels:
    """Return the inner channels of routed experts: fused as in transformers' modules, and separate as in files."""
    fused = "layers.*.mlp.experts"
    expert = f"layers.*.{module}.*"
    return Channels(
        fused,
        "mlp",
        (
            ChannelAxis(f"{fused}.gate_up_proj", -2, stacked),
            ChannelAxis(f"{fused}.down_proj", -1),
            ChannelAxis(f"{expert}.{gate}.weight", -2),
            ChannelAxis(f"{expert}.{up}.weight", -2),
            ChannelAxis(f"{expert}.{down}.weight", -1),
        ),
        experts=True,
    )


def residual(
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    more: tuple[ChannelAxis, ...] = (),
    head: ChannelLayout = whole_axis,
    embeddings: tuple[str, ...] = ("embed_tokens", "lm_head"),
) -> Channels:
    """Return the channels of a decoder's residual stream.

    Args:
        reads: layers that read the stream.
        writes: layers whose output is added to it.
        more: further axes, such as those of norms.
        head: layout in the embeddings and the head.
        embeddings: names of the embeddings and the head.
    """
    return Channels(
        "residual",
        "residual",
        (
            *(ChannelAxis(f"{name}.weight", -1, head) for name in embeddings),
            *(inputs(name) for name in reads),
            *(axis for name in writes for axis in outputs(name)),
            *more,
        ),
    )
