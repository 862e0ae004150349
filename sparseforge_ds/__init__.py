"""2:4 sparse large language models, trained on DeepSpeed (SparseForge, arXiv 2605.06402)."""

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.forge import SparseForge
from sparseforge_ds.model.groups import param_groups
from sparseforge_ds.model.low_rank import prepare

__all__ = ["SparseForge", "SparseForgeConfig", "param_groups", "prepare"]
__version__ = "0.1.0"
