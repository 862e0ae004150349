"""2:4 sparse large language models, trained on DeepSpeed (SparseForge, arXiv 2605.06402)."""

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.forge import ForgeError, SparseForge
from sparseforge_ds.model.distill import DistillationLoss, Teacher, distillation_loss
from sparseforge_ds.model.groups import param_groups
from sparseforge_ds.model.low_rank import low_rank_share, prepare

__all__ = [
    "DistillationLoss",
    "ForgeError",
    "SparseForge",
    "SparseForgeConfig",
    "Teacher",
    "distillation_loss",
    "low_rank_share",
    "param_groups",
    "prepare",
]
__version__ = "0.1.0"
