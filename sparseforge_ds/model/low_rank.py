"""Preparation of a model for training: SLoRB's branches (eq. 13; arXiv 2409.09099), CAST's factors, experts.

    y = x (w^T + P^T B^T)

The branch's layer is in `model.branch`. B is zero and switched off until the forge starts it: before the first step
from a shift of the weights, or, as published, from the part that a mask removes (`branches.branch_start`), or, with a
learned P, from a low-rank part of the weights (`branches.decompose`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.utils import set_z3_leaf_modules_by_name
from torch import nn

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.block import describe_additions
from sparseforge_ds.extension_locks import clear_before_training
from sparseforge_ds.model.branch import add_branch, branches
from sparseforge_ds.model.expert_modules import expert_lists, leaf_modules, sync_expert_gradients
from sparseforge_ds.model.families import LOW_RANK, PrunableWeight, prunable_weights
from sparseforge_ds.model.family_table import SCALE
from sparseforge_ds.model.plain_layers import plain_layers
from sparseforge_ds.model.weight_scale import add_scales, scaled_layers

_SAVE = "save_pretrained"


def prepare(model: nn.Module, config: SparseForgeConfig) -> nn.Module:
    """Prepare a model for training, in place; call it once, before `deepspeed.initialize`.

    The routed experts of a layer become a ZeRO-3 leaf (`leaf_modules`), and those in lists get gradients together
    (`sync_expert_gradients`). With `low_rank`, every layer whose weight goes under a mask becomes a `LowRankLinear` or
    `LowRankConv1D` with `enabled = False`, and computes what it did before, bit for bit. CAST's factors are added
    likewise. `save_pretrained` of a model with branches, or with factors that are not folded into the weights yet, is
    an error. The first process of a machine also clears the locks that killed compilers left
    (`clear_extension_locks`).

    Args:
        model: a transformers model; its parameters may be partitioned by ZeRO-3 already. The new ones are ordinary
            parameters with the dtype and device of their weight, which `deepspeed.initialize` partitions.
        config: its `low_rank`, `method`, and all that decides which weights are prunable are used.

    Returns:
        The same object.

    Raises:
        ValueError: a branch for a routed expert; a model that was prepared or compiled before; the errors of
            `prunable_weights`.
    """
    compiled_name = next((name for name, module in model.named_modules() if hasattr(module, "_orig_mod")), None)
    if compiled_name is not None:
        raise ValueError(
            f"{compiled_name or type(model).__name__} is compiled already, under names that no checkpoint or export "
            "has; prepare the model as it is, and compile it after deepspeed.initialize, by engine.compile()"
        )
    if not any(parameter.is_meta for parameter in model.parameters()):  # a model on meta is planned, not trained
        clear_before_training()
    # Experts first: their gradients and gathers do not depend on the method.
    set_z3_leaf_modules_by_name(model, leaf_modules(model))
    sync_expert_gradients(model, expert_lists(model))
    if config.method.name == "cast" and config.method.scaling:
        add_scales(model, config)
    if config.added_to_layers is not None:
        setattr(model, _SAVE, _WholeSave(model))
    if config.low_rank is None:
        return model
    # No layer is changed before all are known to be able to have a branch.
    layers = plain_layers(model, config, LOW_RANK, "low-rank branch", '"low_rank": null')
    for weight in layers:
        _refuse_experts(weight)
    for layer in layers.values():
        add_branch(layer, config.low_rank.k, config.low_rank.learned)
    return model


def require_prepared(model: nn.Module, config: SparseForgeConfig) -> None:
    """Reject a model whose branches or factors are not those of the config: it was prepared with another one."""
    prunable = [weight.name for weight in prunable_weights(model, config)]
    low_rank = config.low_rank
    branches_by_config = {} if low_rank is None else dict.fromkeys(prunable, (low_rank.k, low_rank.learned))
    branches_of_model = {name: (branch.k, branch.low_rank_p is not None) for name, branch in branches(model).items()}
    has_scales = config.method.name == "cast" and config.method.scaling
    scales_by_config = set(prunable) if has_scales else set()
    fits = {
        "low_rank": branches_of_model == branches_by_config,
        "method.scaling": set(scaled_layers(model)) == scales_by_config,
    }
    for key, key_fits in fits.items():
        if not key_fits:
            raise ValueError(
                f"sparseforge.{key}: the model was prepared with another value than that of the forge's config; give "
                "the same config to sf.prepare, sf.param_groups and sf.SparseForge"
            )


@contextmanager
def saves_allowed(model: nn.Module) -> Iterator[None]:
    """Have `save_pretrained` work in the block whatever it loses: for a checkpoint, which a resume reads whole."""
    refusing = vars(model).pop(_SAVE, None) if lost_parts(model) is not None else None
    try:
        yield
    finally:
        if refusing is not None:
            setattr(model, _SAVE, refusing)


def lost_parts(model: nn.Module) -> str | None:
    """Return what transformers would leave out of a prepared model, in words; None for nothing.

    Factors count until they are folded into the weights.
    """
    has_factors = any(layer.enabled for layer in scaled_layers(model).values())
    return describe_additions(bool(branches(model)), has_factors)


def would_lose(parts: str) -> str:
    """Return the reason why a model with such parts is not saved."""
    return f"transformers would load the model without its {parts}"


class _WholeSave:
    """`save_pretrained` of a prepared model: that of transformers, without factors that are folded into the weights.

    An object can be copied and pickled with its model, which a bound method under another name cannot.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, folder: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any) -> None:
        """Save; ValueError where the saved model would not be the whole one."""
        model = self.model
        if (parts := lost_parts(model)) is not None:
            raise ValueError(
                f"save_pretrained: {would_lose(parts)}; save a checkpoint (engine.save_checkpoint, or the trainer's), "
                "and make the model from it: sparseforge consolidate CHECKPOINT OUT"
            )
        folded = {f"{name.removesuffix('weight')}{SCALE}" for name in scaled_layers(model)}
        tensors = model.state_dict() if state_dict is None else state_dict
        without_factors = {name: value for name, value in tensors.items() if name not in folded}
        type(model).save_pretrained(model, folder, is_main_process, without_factors, **options)


def _refuse_experts(weight: PrunableWeight) -> None:
    if weight.experts:
        raise ValueError(
            f"{weight.name} belongs to a routed expert, which low_rank does not cover; set "
            '"low_rank": null, or keep experts dense with "exclude": ["*.experts.*"] in the sparseforge block'
        )
