"""The methods of the trainer, one file each, all on the same shards (`MaskMethod`, `ShardedWeights`).

CONTRIBUTING.md says what a new one needs.
"""

from __future__ import annotations

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.methods.ast import Ast
from sparseforge_ds.methods.cast import Cast
from sparseforge_ds.methods.elsa import Elsa
from sparseforge_ds.methods.maskllm import MaskLLM
from sparseforge_ds.methods.method import MaskMethod
from sparseforge_ds.methods.pat import Pat
from sparseforge_ds.methods.soft_mask import SoftMask
from sparseforge_ds.methods.sr_ste import SrSte
from sparseforge_ds.methods.starting_mask import StartingMask

__all__ = ["MaskMethod", "method_of"]


_METHODS: dict[str, type[MaskMethod]] = {
    "sparseforge": SoftMask,
    "naive_retrain": StartingMask,
    "sr_ste": SrSte,
    "ast": Ast,
    "cast": Cast,
    "elsa": Elsa,
    "pat": Pat,
    "maskllm": MaskLLM,
}


def method_of(config: SparseForgeConfig) -> type[MaskMethod]:
    """Return the class of the config's method."""
    # A soft mask that would be frozen before the first step is a fixed one.
    fixed = config.method.name == "sparseforge" and config.soft is None
    return StartingMask if fixed else _METHODS[config.method.name]
