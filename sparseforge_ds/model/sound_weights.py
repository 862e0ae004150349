"""Rejection of weights that nobody can train or compute with: not stored as floating-point numbers, or not finite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparseforge_ds.model.registration import build_model, load_config
from sparseforge_ds.packed_format.packing import VALUE_DTYPES


def require_float_weights(dtypes: Mapping[str, torch.dtype], folder: str | Path, who: str) -> None:
    """Reject files of a dense model with a parameter in a dtype that loaders cast in silence: int64, bool, float8.

    Args:
        dtypes: of every tensor in the files. Buffers, like the masks that old files keep as bool, may have any.
        folder: of the model, for its config.json.
        who: the model's name in the message.

    Raises:
        ValueError: a parameter has such a dtype.
    """
    foreign = sorted(name for name, dtype in dtypes.items() if dtype not in VALUE_DTYPES)
    if not foreign:
        return
    from sparseforge_ds.model.loading_targets import Targets
    from sparseforge_ds.transformers_internals import get_model_conversion_mapping

    # Names in files may differ from those in memory, which say what is a parameter.
    config = load_config(folder, who)
    with torch.device("meta"):
        model = build_model(config)
    targets = Targets(model, get_model_conversion_mapping(model))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in foreign:
        if targets.find(name)[0] in parameters:
            raise ValueError(
                f"{who}: {name} is stored as {dtypes[name]}, which transformers would cast without a word; give a "
                "model whose weights are float32, bfloat16 or float16"
            )


def first_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter with NaN or infinity, or None; under ZeRO-3 in this rank's parts alone."""
    return next((name for name, parameter in model.named_parameters() if not _is_finite(_local(parameter))), None)


def why_not_finite(model: Any) -> str:
    """Return why a loaded model computes NaN or infinity, and what to do: a weight, or else sums that overflow."""
    dtype = str(model.dtype).removeprefix("torch.")
    cure = "give a sound model" if dtype == "float32" else "give a sound model, or try --dtype float32"
    # Scales of packed weights are buffers.
    buffers = (name for name, buffer in model.named_buffers() if not _is_finite(buffer))
    name = first_not_finite(model) or next(buffers, None)
    cause = f"all weights are finite, so sums overflow in {dtype}" if name is None else f"{name} is not finite"
    return f"{cause}; {cure}"


def require_finite_weights(model: Any, who: str) -> None:
    """Reject NaN and infinity in the weights before anything trains on them. Collective if ZeRO-3 divides them.

    Args:
        model: of transformers, with its weights.
        who: its name in the message.

    Raises:
        ValueError: a weight is not finite; all ranks name the same one.
    """
    names = [name for name, _ in model.named_parameters()]
    bad_name = first_not_finite(model)
    first = len(names) if bad_name is None else names.index(bad_name)
    # Parts of one weight lie on several ranks, which must raise together.
    if any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()):
        shared = torch.tensor(first, device=torch.accelerator.current_accelerator(check_available=True) or "cpu")
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN)
        first = int(shared)
    if first < len(names):
        raise ValueError(
            f"{who}: {names[first]} is not finite in {model.dtype}, and neither would any loss be; give a sound model, "
            "or one that fits the run's dtype"
        )


def _is_finite(values: Tensor) -> bool:
    if values.numel() == 0 or values.is_meta or not values.is_floating_point():
        return True
    if values.itemsize == 1:  # torch computes little in 8 bits
        values = values.float()
    extremes = torch.stack(torch.aminmax(values))  # aminmax passes NaN on
    return bool(extremes.isfinite().all())


def _local(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter, without the padding behind the last part of ZeRO-3."""
    partitioned: Any = parameter
    if not hasattr(partitioned, "ds_tensor"):
        return parameter.detach()
    part = partitioned.ds_tensor.detach().reshape(-1)
    start = part.numel() * torch.distributed.get_rank(partitioned.ds_process_group)
    return part[: max(0, partitioned.ds_numel - start)]
