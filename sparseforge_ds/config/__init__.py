"""The `sparseforge` block of a DeepSpeed JSON, the launcher's flags, and what else decides what a run is."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparseforge_ds.config.block import SparseForgeConfig
    from sparseforge_ds.config.parts import (
        CurvatureConfig,
        DistillationConfig,
        HiddenConfig,
        LowRankConfig,
        MonitorConfig,
        ScheduleConfig,
    )
    from sparseforge_ds.config.presets import METHODS, PRESETS
    from sparseforge_ds.config.rules import ReconstructionConfig, RefreshConfig, SamplingConfig

# Imported at first use: the help of a command need not wait for torch.
_WHERE = {
    "METHODS": "presets",
    "PRESETS": "presets",
    "CurvatureConfig": "parts",
    "DistillationConfig": "parts",
    "HiddenConfig": "parts",
    "LowRankConfig": "parts",
    "MonitorConfig": "parts",
    "ReconstructionConfig": "rules",
    "RefreshConfig": "rules",
    "SamplingConfig": "rules",
    "ScheduleConfig": "parts",
    "SparseForgeConfig": "block",
}

__all__ = [
    "METHODS",
    "PRESETS",
    "CurvatureConfig",
    "DistillationConfig",
    "HiddenConfig",
    "LowRankConfig",
    "MonitorConfig",
    "ReconstructionConfig",
    "RefreshConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SparseForgeConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"sparseforge_ds.config.{_WHERE[name]}"), name)
