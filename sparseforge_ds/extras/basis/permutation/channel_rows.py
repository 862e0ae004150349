"""What a row of the table of channels is made of.

Names are globs as in `model.family_table`, except that `*` is a number: of the layer, then of the expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparseforge_ds.extras.basis.permutation.layouts import Layout, stacked, whole

Part = Literal["mlp", "heads", "residual"]


@dataclass(frozen=True)
class Along:
    """An axis of tensors that has the channels."""

    names: str
    """Glob over parameter names, in files and in memory."""
    axis: int
    """Negative."""
    layout: Layout = whole


@dataclass(frozen=True)
class Channels:
    """Channels that have one order in all tensors of a layer, or of the model."""

    name: str
    """`*` is the number of the layer."""
    part: Part
    tensors: tuple[Along, ...]
    experts: bool = False
    """Whether every routed expert has an order of its own; a second number in a tensor's name is then its."""


@dataclass(frozen=True)
class FamilyChannels:
    """All tensors of an architecture: each has channels of some row, or none that could be reordered."""

    rows: tuple[Channels, ...]
    others: tuple[str, ...]


def outputs(layer: str, layout: Layout = whole) -> tuple[Along, ...]:
    """The output axis of a linear layer, and its bias."""
    return Along(f"{layer}.weight", -2, layout), Along(f"{layer}.bias", -1, layout)


def inputs(layer: str, layout: Layout = whole) -> Along:
    """The input axis of a linear layer."""
    return Along(f"{layer}.weight", -1, layout)


def norm(name: str) -> tuple[Along, ...]:
    """A norm, with a bias or without."""
    return Along(f"{name}.weight", -1), Along(f"{name}.bias", -1)


def gated(where: str) -> Channels:
    """What an MLP of three linear layers has inside."""
    at = f"layers.*.{where}"
    return Channels(at, "mlp", (*outputs(f"{at}.gate_proj"), *outputs(f"{at}.up_proj"), inputs(f"{at}.down_proj")))


def plain(first: str, second: str, layout: Layout = whole) -> Channels:
    """What an MLP of two linear layers, which stand in one module, has inside; the first may be gate and up."""
    at = first.rpartition(".")[0]
    return Channels(at, "mlp", (*outputs(first, layout), inputs(f"{at}.{second}")))


def heads(at: str, first: str, layout: Layout, second: str, read: Layout) -> Channels:
    """The values of attention heads, between the layer that computes them and the one that reads them."""
    return Channels(f"{at}.values", "heads", (*outputs(f"{at}.{first}", layout), inputs(f"{at}.{second}", read)))


def experts(where: str, gate: str, up: str, down: str) -> Channels:
    """Routed experts: fused, as transformers has them, and one by one, as files have them."""
    fused, one = "layers.*.mlp.experts", f"layers.*.{where}.*"
    return Channels(
        fused,
        "mlp",
        (
            Along(f"{fused}.gate_up_proj", -2, stacked),
            Along(f"{fused}.down_proj", -1),
            Along(f"{one}.{gate}.weight", -2),
            Along(f"{one}.{up}.weight", -2),
            Along(f"{one}.{down}.weight", -1),
        ),
        experts=True,
    )


def residual(
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    more: tuple[Along, ...] = (),
    head: Layout = whole,
    embeddings: tuple[str, ...] = ("embed_tokens", "lm_head"),
) -> Channels:
    """The residual stream of a decoder: the layers that read it, those whose output is added to it, and its norms."""
    return Channels(
        "residual",
        "residual",
        (
            *(Along(f"{name}.weight", -1, head) for name in embeddings),
            *(inputs(name) for name in reads),
            *(along for name in writes for along in outputs(name)),
            *more,
        ),
    )
