"""Settings of a run: the `sparseforge` block of a DeepSpeed JSON, the launcher's flags, and the JSON itself."""

from typing import TYPE_CHECKING, Any

from sparseforge_ds.config.block_sections import (
    BlockStartConfig,
    DistillationConfig,
    HiddenConfig,
    LowRankConfig,
    QuantizeConfig,
)
from sparseforge_ds.config.methods import METHODS
from sparseforge_ds.config.presets import PRESETS

if TYPE_CHECKING:
    from sparseforge_ds.config.block import SparseForgeConfig

__all__ = [
    "METHODS",
    "PRESETS",
    "DistillationConfig",
    "HiddenConfig",
    "LowRankConfig",
    "QuantizeConfig",
    "SparseForgeConfig",
    "BlockStartConfig",
]


def __getattr__(name: str) -> Any:
    if name == "SparseForgeConfig":  # it imports torch, for which the help of a command need not wait
        from sparseforge_ds.config.block import SparseForgeConfig

        return SparseForgeConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
