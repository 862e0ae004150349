"""Modules that ZeRO-3 gathers in one piece."""

from __future__ import annotations

from deepspeed.utils import set_z3_leaf_modules_by_name
from torch import nn


def gather_as_one(model: nn.Module, names: list[str]) -> None:
    """Make leaves of the named modules, in place: ZeRO-3 gathers all that is in one of them when it is called.

    Args:
        model: before or after `deepspeed.initialize`; at other stages this changes nothing.
        names: as in `named_modules`; may be empty.
    """
    set_z3_leaf_modules_by_name(model, names)
