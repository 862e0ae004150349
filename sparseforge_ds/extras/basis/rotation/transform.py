"""Application of rotations of hidden vectors to a model's parameters."""

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
"""Orthogonal matrices (blocks, C, C) by dimension; new channel j is the sum over i of channel i times entry [i, j]."""


def rotate_axis(value: Tensor, axis: Axis, rotation_BCC: Tensor) -> Tensor:
    """Return a tensor with the channels of an axis rotated; positions without a channel stay as they are."""
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
    """Rotate the hidden vectors of a model with an untied head in place; all gains of a norm become its scale."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        axes = list(stream.axes(name))
        owner = name.rpartition(".")[0]
        if owner in stream.gains and name.endswith(".weight"):
            parameter.fill_(stream.gain_scales[owner])
            continue
        if not axes:
            continue
        # A norm's bias is divided by what its readers are multiplied by.
        value = parameter.float()
        if owner in stream.gains:
            value = value / stream.gains[owner]
        elif name in stream.norm_of:
            value = absorb_gain(value, residual_axis(axes), stream.gains[stream.norm_of[name]])
        for dimension, axis in axes:
            value = rotate_axis(value, axis, rotations[dimension].to(value.device))
        parameter.copy_(value)


def absorb_gain(value: Tensor, axis: Axis, gain_C: Tensor) -> Tensor:
    """Multiply a weight that reads the residual stream by the gain of its norm."""
    return value * (gain_C if axis.axis == -1 else gain_C[:, None])


def residual_axis(axes: list[tuple[str, Axis]]) -> Axis:
    """Return the axis that has the residual stream."""
    return next(axis for name, axis in axes if name == RESIDUAL)


def rotations_sha256(rotations: Rotations) -> str:
    """Return the hash of all rotations."""
    digest = hashlib.sha256()
    for name, rotation_BCC in sorted(rotations.items()):
        digest.update(f"{name} {tuple(rotation_BCC.shape)}\n".encode())
        digest.update(tensor_bytes(rotation_BCC.cpu()))
    return digest.hexdigest()
