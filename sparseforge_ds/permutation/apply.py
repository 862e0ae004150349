"""A permutation on the parameters of a model in memory, whole or partitioned by ZeRO-3."""

from __future__ import annotations

import deepspeed
import torch
from transformers import PreTrainedModel

from sparseforge_ds.model.families import full_shape
from sparseforge_ds.model.groups import PERMUTED
from sparseforge_ds.model.permutation_record import Permutation
from sparseforge_ds.permutation.reordering import Reordering


@torch.no_grad()
def permute_model(model: PreTrainedModel, permutation: Permutation) -> None:
    """Reorder the channels of a model in place; before `prepare`. Collective where ZeRO-3 has partitioned it."""
    parameters = dict(model.named_parameters())
    shapes = {name: full_shape(parameter) for name, parameter in parameters.items()}
    reorder = Reordering(permutation, model.config.model_type, model.config.get_text_config(), shapes)
    for name in reorder.moved:
        parameter = parameters[name]
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")):
            parameter.copy_(reorder(name, parameter))
    setattr(model, PERMUTED, True)
