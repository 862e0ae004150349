"""Optimizer parameter groups: prunable weights by themselves, so that DeepSpeed's flat partitions are wholly prunable.

DeepSpeed flattens each group on its own. With biases and norms elsewhere, no foreign element shifts the groups of four,
and the optimizer state `dense`, `mask` and `curvature` exists for exactly the elements that need it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import BRANCH, full_shape, prunable_weights


def param_groups(
    model: nn.Module, config: SparseForgeConfig, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Divide the parameters into the groups that `deepspeed.initialize` takes as `model_parameters`.

    There are four groups, in this order; empty ones are left out:

    - `prunable`, marked with the key `sparseforge`, which travels through every ZeRO stage,
    - `matrix`: all other matrices,
    - `vector`: norms and biases, without weight decay,
    - `low_rank`: SLoRB's B and a learned P, without weight decay; their moments start when their branch does.

    Parameters that require no gradient are left out, and tied ones are listed once.

    Args:
        model: after `prepare`, before `deepspeed.initialize`; its parameters may be partitioned by ZeRO-3.
        config: decides which weights are prunable.
        weight_decay: of the first two groups; by default that of the optimizer.

    Raises:
        ValueError: a prunable weight is frozen, or `prunable_weights` cannot place the model.
    """
    names = {weight.name for weight in prunable_weights(model, config)}
    prunable: list[nn.Parameter] = []
    matrix: list[nn.Parameter] = []
    vector: list[nn.Parameter] = []
    low_rank: list[nn.Parameter] = []
    # Each parameter goes into the first group that it belongs to.
    for name, parameter in model.named_parameters():
        if name in names and not parameter.requires_grad:
            raise ValueError(
                f"{name} is to be pruned but does not require a gradient; call requires_grad_(True) on it, or keep it "
                f'dense with "exclude": ["{name}"] in the sparseforge block'
            )
        if not parameter.requires_grad:
            continue
        if name in names:
            prunable.append(parameter)
        elif name.rpartition(".")[2] in BRANCH:
            low_rank.append(parameter)
        elif len(full_shape(parameter)) > 1 and not name.endswith("bias"):  # biases of fused experts are matrices
            matrix.append(parameter)
        else:
            vector.append(parameter)
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = [
        {"name": "prunable", "params": prunable, **decay, "sparseforge": "prunable"},
        {"name": "matrix", "params": matrix, **decay},
        {"name": "vector", "params": vector, "weight_decay": 0.0},
        {"name": "low_rank", "params": low_rank, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
