"""2:4 sparse large language models, trained on DeepSpeed (SparseForge, arXiv 2605.06402)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import sparseforge_ds.started_by  # noqa: F401  first: it notes who started this process

if TYPE_CHECKING:
    from sparseforge_ds.checkpoint.reader import Checkpoint
    from sparseforge_ds.config import SparseForgeConfig
    from sparseforge_ds.extension_locks import clear_extension_locks
    from sparseforge_ds.forge import ForgeError, SparseForge
    from sparseforge_ds.integrations.mask_keeper import MaskKeeper, keep_mask
    from sparseforge_ds.model.any_family import any_family
    from sparseforge_ds.model.distill import DistillationLoss, distillation_loss
    from sparseforge_ds.model.family_table import Row, SavedAs, register_family
    from sparseforge_ds.model.head import loss_in_head
    from sparseforge_ds.model.low_rank import prepare
    from sparseforge_ds.model.param_groups import param_groups
    from sparseforge_ds.model.registration import register_model_classes
    from sparseforge_ds.model.teacher import Teacher

# Imported at first use: the offline tools and whoever only loads a model need no DeepSpeed.
_WHERE = {
    "Checkpoint": "checkpoint.reader",
    "DistillationLoss": "model.distill",
    "ForgeError": "forge",
    "MaskKeeper": "integrations.mask_keeper",
    "SavedAs": "model.family_table",
    "Row": "model.family_table",
    "SparseForge": "forge",
    "SparseForgeConfig": "config",
    "Teacher": "model.teacher",
    "any_family": "model.any_family",
    "distillation_loss": "model.distill",
    "keep_mask": "integrations.mask_keeper",
    "loss_in_head": "model.head",
    "param_groups": "model.param_groups",
    "prepare": "model.low_rank",
    "register_family": "model.family_table",
    "register_model_classes": "model.registration",
    "clear_extension_locks": "extension_locks",
}

__all__ = [
    "Checkpoint",
    "DistillationLoss",
    "ForgeError",
    "MaskKeeper",
    "SavedAs",
    "Row",
    "SparseForge",
    "SparseForgeConfig",
    "Teacher",
    "any_family",
    "distillation_loss",
    "keep_mask",
    "loss_in_head",
    "param_groups",
    "prepare",
    "register_model_classes",
    "register_family",
    "clear_extension_locks",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"sparseforge_ds.{_WHERE[name]}"), name)
