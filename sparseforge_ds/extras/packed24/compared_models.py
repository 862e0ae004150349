"""The models that `bench` compares: a packed one, its dense form, torchao's quantized forms, and rounded values."""

from __future__ import annotations

import copy
import shlex
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sparseforge_ds.evaluate.finished_model import NO_ADAPTER, find_adapter, load_model
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.model.stored_config import is_packed_config
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, round_values
from sparseforge_ds.packed_format.packing import POSITIONS, has_packed_weights, packed24_axis

RIVALS = ("int8", "fp8", "int4")
"""Quantized forms of the dense model, weights only, by torchao: a scale a row, or for int4 a scale a group."""
_INT4_GROUP = 128
"""Inputs that share a scale in torchao's int4."""


def load_pair(name: str, against: str | None, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedModel]:
    """Load (packed, dense).

    Args:
        name: a packed24 folder.
        against: the dense model; None: the packed model, unpacked.
        dtype: dtype of both.

    Raises:
        ValueError: a model cannot be loaded, the first is not packed, or their sizes or dtypes differ.
    """
    other = name if against is None else against
    _require_comparable(name, other, dtype)
    packed = load_model(name, dtype, find_adapter(name, NO_ADAPTER))
    if not any(map(has_packed_weights, packed.modules())):
        raise not_packed(name)
    dense = load_model(other, dtype, find_adapter(other, NO_ADAPTER))
    if (quantizer := getattr(dense, "hf_quantizer", None)) is not None:
        quantizer.make_dense(dense)
    _require_one_dtype(name, packed.dtype, other, dense.dtype)  # a config.json may name none
    # Tensors in a mapped file may be unaligned, and not in memory yet. Positions of packed weights are buffers.
    for model in (packed, dense):
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return packed, dense


def _require_comparable(name: str, other: str, dtype: str) -> None:
    """Reject models of different sizes or dtypes, or a quantized one for the dense one, by what config.json says."""
    packed_config = load_config(name, name)
    dense_config = load_config(other, other)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        expected = getattr(packed_config.get_text_config(), key)
        size = getattr(dense_config.get_text_config(), key)
        if size != expected:
            raise ValueError(f"{other}: {key} {size} is not the {expected} of {name}")
    quantization = vars(dense_config).get("quantization_config")
    if quantization and not is_packed_config(vars(dense_config)):
        method = quantization.get("quant_method", "quantization_config")
        raise ValueError(f"--against {other}: its weights are quantized ({method}); give the dense model")
    if dtype == "auto" and None not in (dense_config.dtype, packed_config.dtype):
        _require_one_dtype(name, packed_config.dtype, other, dense_config.dtype)


def _require_one_dtype(name: str, packed: torch.dtype, other: str, dense: torch.dtype) -> None:
    """Reject models of two dtypes, whose times would compare the dtypes."""
    if dense != packed:
        raise ValueError(
            f"{other}: is stored in {dense}, and {name} in {packed}, so the times would compare dtypes; "
            f"give --dtype {str(packed).removeprefix('torch.')}"
        )


def not_packed(name: str) -> ValueError:
    """Return the error about a model that is not packed."""
    return ValueError(
        f"{name}: none of its weights is packed, so there is nothing to compare; pack them by sparseforge export "
        f"{shlex.quote(name)} PACKED --format packed24"
    )


def quantized(dense: PreTrainedModel, packed: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Copy the dense model, and let torchao quantize the layers that the other model has packed.

    Args:
        dense: the dense model.
        packed: the packed model.
        kind: one of `RIVALS`.

    Raises:
        ValueError: torchao cannot do this here, or the model has packed experts.
    """
    flag = f"--rivals {kind}"
    from torchao import quantization

    # torchao leaves what it cannot quantize dense, in silence: the comparison would not be one.
    layers = {name for name, module in packed.named_modules() if has_packed_weights(module)}
    odd = next((name for name in layers if not isinstance(dense.get_submodule(name), nn.Linear)), None)
    if odd is not None:
        raise ValueError(f"{flag}: {odd} is no linear layer, and torchao would leave it as it is; leave the flag out")
    if kind == "int4":
        odd = next((name for name in sorted(layers) if dense.get_submodule(name).in_features % _INT4_GROUP), None)
        if odd is not None:
            raise ValueError(
                f"{flag}: the inputs of {odd} are no multiple of {_INT4_GROUP}, and torchao would leave it dense; "
                "leave the flag out"
            )
    # Quantize a copy in the layers that the packed model has packed, and in no others.
    config: Any
    try:
        if kind == "int4":
            where = "tile_packed_to_4d" if dense.device.type == "cuda" else "opaque"
            config = quantization.Int4WeightOnlyConfig(group_size=_INT4_GROUP, int4_packing_format=where)
        else:
            config = getattr(quantization, {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}[kind])()
        model = copy.deepcopy(dense)
        quantization.quantize_(model, config, filter_fn=lambda _, name: name in layers)
    except (ImportError, NotImplementedError) as error:  # kernels that are missing here
        reason = " ".join(str(error).split())
        raise ValueError(f"{flag}: torchao cannot quantize this model here ({reason}); leave it out") from None
    return model


def rounded(packed: PreTrainedModel, grid: Grid) -> PreTrainedModel:
    """Copy the packed model, and round its values to nearest, as an export does.

    Args:
        packed: a model whose packed values are floating point.
        grid: of the copy.

    Raises:
        ValueError: values are rounded already, or groups do not divide them; the message names the weight.
    """
    model = copy.deepcopy(packed)
    for module_name, module in model.named_modules():
        if not has_packed_weights(module):
            continue
        for buffer in [name for name, _ in module.named_buffers(recurse=False) if name.endswith(POSITIONS)]:
            name = buffer.removesuffix(POSITIONS)
            # Round the kept values of one weight, which are floating point.
            values = getattr(module, name).detach()
            if getattr(module, name + SCALE, None) is not None:
                raise ValueError(
                    f"{module_name}.{name}: its values are rounded; leave --values out, or give a folder in bf16"
                )
            axis = packed24_axis(tuple(values.shape), tuple(getattr(module, buffer).shape))
            try:
                codes, scale = round_values(values, axis, grid)
            except ValueError as error:
                raise ValueError(f"{module_name}.{name}: {error}") from None
            if values.stride(axis) == 1:  # GPT-2's inputs are contiguous in memory
                codes = codes.transpose(-1, axis).contiguous().transpose(-1, axis)
                scale = scale.transpose(-1, axis).contiguous().transpose(-1, axis)
            # Store the codes in the place of the values, as a loaded export has them.
            setattr(module, name, nn.Parameter(codes, requires_grad=False))
            module.register_buffer(name + SCALE, scale)
    return model
