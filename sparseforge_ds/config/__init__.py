"""The `sparseforge` block of a DeepSpeed JSON."""

from sparseforge_ds.config.block import SparseForgeConfig
from sparseforge_ds.config.parts import (
    CurvatureConfig,
    DistillationConfig,
    LowRankConfig,
    MonitorConfig,
    ScheduleConfig,
)
from sparseforge_ds.config.presets import METHODS, PRESETS
from sparseforge_ds.config.rules import ReconstructionConfig, RefreshConfig, SamplingConfig

__all__ = [
    "METHODS",
    "PRESETS",
    "CurvatureConfig",
    "DistillationConfig",
    "LowRankConfig",
    "MonitorConfig",
    "ReconstructionConfig",
    "RefreshConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SparseForgeConfig",
]
