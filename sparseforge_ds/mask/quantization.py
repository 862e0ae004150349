"""Symmetric quantization of published weights to a few bits (eq. 14): w = Q(m_eff W).

Legend of shape suffixes: G groups, I inputs of a group, which share a scale.

A pruned weight stays 0. The scale has 8 significant bits, so that bf16 holds it, and what was trained is bit for bit
what an export stores as codes and scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.mask.pattern import NM, Block, Pattern

SCALE_DTYPE = torch.bfloat16
"""Dtype that holds every scale exactly."""


def largest_code(bits: int) -> int:
    """Return the largest code of a symmetric grid: 7 for 4 bits. Its negative is the smallest; -8 is no code."""
    return (1 << (bits - 1)) - 1


def quantize(weight_GI: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of groups (eq. 14): q = round(w / s), s = max |w| of the group / largest code.

    Args:
        weight_GI: (G, I) fp32 published weights.
        bits: of a code, the sign included.

    Returns:
        (G, I) fp32 integers, ties to even, and (G, 1) fp32 scales. A group of zeros has the scale 1.
    """
    # A tensor divides: CUDA multiplies by the reciprocal of a Python number, which rounds differently than a CPU does.
    largest_11 = weight_GI.new_full((1, 1), largest_code(bits))
    scale_G1 = weight_GI.abs().amax(dim=1, keepdim=True) / largest_11
    scale_G1 = scale_G1.to(SCALE_DTYPE).float()
    scale_G1 = torch.where(scale_G1 == 0, 1.0, scale_G1)
    code_GI = (weight_GI / scale_G1).round_().clamp_(-largest_code(bits), largest_code(bits))
    return code_GI, scale_G1


def quantized(weight_GI: Tensor, bits: int) -> Tensor:
    """Return Q(w) = q s, (G, I) fp32, in which every zero is +0.0.

    The gradient passes straight through: dL/dQ(w) is used for W as dL/dw is.
    """
    code_GI, scale_G1 = quantize(weight_GI, bits)
    return code_GI * scale_G1 + 0.0


def scale_group(pattern: Pattern, group_size: int | None, inputs: int) -> NM:
    """Return the groups of inputs that share a scale, as a pattern that prunes nothing.

    Args:
        pattern: of the weight.
        group_size: kept values that share a scale; None for all inputs of an output.
        inputs: of the weight.

    Raises:
        ValueError: the groups do not consist of whole groups of the pattern, or do not divide the inputs.
    """
    if group_size is None:
        return NM(inputs, inputs)
    size, rest = divmod(group_size * pattern.members, pattern.kept_count)
    if rest or (not isinstance(pattern, Block) and size % pattern.members):
        raise ValueError(
            f"{group_size} kept values are no whole number of groups of {pattern}; use a multiple of what a group keeps"
        )
    if inputs % size:
        raise ValueError(
            f"{group_size} kept values lie in {size} inputs at {pattern}, which do not divide its {inputs} inputs; use "
            "a smaller number, or null for a scale a row"
        )
    return NM(size, size)
