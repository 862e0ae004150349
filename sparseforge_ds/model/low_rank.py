"""Preparation of a model for training: SLoRB's branches (eq. 13; arXiv 2409.09099), CAST's factors, experts.

    y = x (w^T + P^T B^T)

The branch's layer is in `model.branch`. B is zero and switched off until the forge starts it: before the first step
from a shift of the weights, or, as published, from the part that a mask removes (`branches.branch_start`), or, with a
learned P, from a low-rank part of the weights (`branches.decompose`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from deepspeed.utils import set_z3_leaf_modules_by_name
from torch import nn

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extension_locks import clear_before_training
from sparseforge_ds.model.branch import add_branch
from sparseforge_ds.model.expert_modules import expert_lists, leaf_modules, sync_expert_gradients
from sparseforge_ds.model.families import LOW_RANK, PrunableWeight
from sparseforge_ds.model.plain_layers import plain_layers
from sparseforge_ds.model.weight_scale import add_scales

_SAVE = "save_pretrained"
WOULD_LOSE = "transformers would load the model without its "
"""Beginning of the reason for which a model is not saved; `SparseForgeConfig.added_to_layers` is its end."""


def prepare(model: nn.Module, config: SparseForgeConfig) -> nn.Module:
    """Prepare a model for training, in place; call it once, before `deepspeed.initialize`.

    The routed experts of a layer become a ZeRO-3 leaf (`leaf_modules`), and those in lists get gradients together
    (`sync_expert_gradients`). With `low_rank`, every layer whose weight goes under a mask becomes a `LowRankLinear` or
    `LowRankConv1D` with `enabled = False`, and computes what it did before, bit for bit. CAST's factors are added
    likewise. `save_pretrained` of a model with either is an error. The first process of a machine also clears the locks
    that killed compilers left (`clear_extension_locks`).

    Args:
        model: a transformers model; its parameters may be partitioned by ZeRO-3 already. The new ones are ordinary
            parameters with the dtype and device of their weight, which `deepspeed.initialize` partitions.
        config: its `low_rank`, `method`, and all that decides which weights are prunable are used.

    Returns:
        The same object.

    Raises:
        ValueError: a branch for a routed expert; a model that was prepared before; the errors of `prunable_weights`.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):  # a model on meta is planned, not trained
        clear_before_training()
    # Experts first: their gradients and gathers do not depend on the method.
    set_z3_leaf_modules_by_name(model, leaf_modules(model))
    sync_expert_gradients(model, expert_lists(model))
    if config.method.name == "cast" and config.method.scaling:
        add_scales(model, config)
    if config.added_to_layers is not None:
        setattr(model, _SAVE, partial(_refuse_save, config.added_to_layers))
    if config.low_rank is None:
        return model
    # No layer is changed before all are known to be able to have a branch.
    layers = plain_layers(model, config, LOW_RANK, "low-rank branch", '"low_rank": null')
    for weight in layers:
        _refuse_experts(weight)
    for layer in layers.values():
        add_branch(layer, config.low_rank.k, config.low_rank.learned)
    return model


@contextmanager
def saves_allowed(model: nn.Module) -> Iterator[None]:
    """Have `save_pretrained` work in the block in spite of what was added: for a checkpoint, which a resume reads."""
    refusal = vars(model).pop(_SAVE, None)
    try:
        yield
    finally:
        if refusal is not None:
            setattr(model, _SAVE, refusal)


def _refuse_save(added: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise ValueError(
        f"save_pretrained: {WOULD_LOSE}{added}; save a checkpoint (engine.save_checkpoint, or the trainer's), and make "
        "the model from it: sparseforge consolidate CHECKPOINT OUT"
    )


def _refuse_experts(weight: PrunableWeight) -> None:
    if weight.experts:
        raise ValueError(
            f"{weight.name} belongs to a routed expert, which low_rank does not cover; set "
            '"low_rank": null, or keep experts dense with "exclude": ["*.experts.*"] in the sparseforge block'
        )
