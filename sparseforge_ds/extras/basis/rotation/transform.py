"""Rotations of a model's hidden vectors, applied to its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparseforge_ds.checkpoint.tensors import tensor_bytes
from sparseforge_ds.extras.basis.permutation.channels import Axis
from sparseforge_ds.extras.basis.rotation.stream import RESIDUAL, Stream

Rotations = Mapping[str, Tensor]
"""(blocks, C, C) orthogonal, by the name of a dimension; new channel j is the sum over i of channel i times [i, j]."""


def turned(value: Tensor, axis: Axis, rotation_BCC: Tensor) -> Tensor:
    """A tensor with the channels of an axis rotated; positions that hold no channel stay."""
    moved = value.movedim(axis.axis, -1)
    if moved.shape[-1] == rotation_BCC.shape[-1]:  # in fused experts the residual stream is a whole axis of each
        return (moved @ rotation_BCC[0]).movedim(-1, axis.axis)
    positions_SBC = axis.positions.to(value.device)
    rotated = torch.einsum("...sbi,bij->...sbj", moved[..., positions_SBC], rotation_BCC)
    result = moved.clone()
    result[..., positions_SBC] = rotated
    return result.movedim(-1, axis.axis)


@torch.no_grad()
def rotate_model(model: PreTrainedModel, stream: Stream, rotations: Rotations) -> None:
    """Rotate the hidden vectors of a model in place; afterwards its norms have gains of 1. Its head must be untied."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        axes = list(stream.axes(name))
        owner = name.rpartition(".")[0]
        if owner in stream.gains and name.endswith(".weight"):
            parameter.fill_(1.0)
            continue
        if not axes:
            continue
        value = parameter.float()
        if owner in stream.gains:
            value = value / stream.gains[owner]
        elif name in stream.norm_of:
            value = scaled(value, residual_axis(axes), stream.gains[stream.norm_of[name]])
        for dimension, axis in axes:
            value = turned(value, axis, rotations[dimension].to(value.device))
        parameter.copy_(value)


def scaled(value: Tensor, axis: Axis, gain_C: Tensor) -> Tensor:
    """A weight that reads the residual stream, with the gain of its norm inside."""
    return value * (gain_C if axis.axis == -1 else gain_C[:, None])


def residual_axis(axes: list[tuple[str, Axis]]) -> Axis:
    """The axis that has the residual stream."""
    return next(axis for name, axis in axes if name == RESIDUAL)


def sha256_of(rotations: Rotations) -> str:
    """Of all rotations."""
    digest = hashlib.sha256()
    for name, rotation_BCC in sorted(rotations.items()):
        digest.update(f"{name} {tuple(rotation_BCC.shape)}\n".encode())
        digest.update(tensor_bytes(rotation_BCC.cpu()))
    return digest.hexdigest()
