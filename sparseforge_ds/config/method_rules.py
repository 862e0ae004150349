"""What the `sparseforge` block may say, by method."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sparseforge_ds.config.rules import USES
from sparseforge_ds.config.strict import require
from sparseforge_ds.mask.pattern import NM

if TYPE_CHECKING:
    from sparseforge_ds.config.block import SparseForgeConfig


def check_method(config: SparseForgeConfig) -> None:
    """Whether what is said fits the method."""
    method, used = config.method, USES[config.method]
    for key in sorted(set().union(*USES.values()) - used):
        neutral = default_of(type(config), key) if key in ("schedule", "threshold") else None
        if getattr(config, key) != neutral:
            users = ", ".join(name for name, keys in USES.items() if key in keys)
            raise ValueError(
                f'sparseforge.{key}: method "{method}" does not use it, only {users} do; '
                f"{'leave it out' if neutral is not None else 'set it to null, or leave it out'}"
            )
    for key in ("refresh", "sampling"):
        if key in used and getattr(config, key) is None:
            raise ValueError(
                f'sparseforge.{key} = null: method "{method}" needs it; write "{key}": {{}}, and build with '
                f'SparseForgeConfig.from_dict({{"method": "{method}"}}) for its published settings'
            )
    if config.refresh is not None and config.refresh.scaling and method != "cast":
        raise ValueError(f'sparseforge.refresh.scaling: method "{method}" has no weight scaling; only cast has')
    if method == "oneshot":
        require(config.max_steps == 0, "max_steps", config.max_steps, 'method "oneshot" trains nothing: set it to 0')
    if method == "maskllm" and not isinstance(config.parsed_pattern, NM):
        raise ValueError(
            f'sparseforge.pattern = {config.pattern}: method "maskllm" numbers the patterns of a group, too many '
            "for a tile; use n:m"
        )
    if config.importance == "sparsegpt" and (method == "sparseforge" or not isinstance(config.parsed_pattern, NM)):
        raise ValueError(
            f'sparseforge.importance = "sparsegpt" makes a starting mask of an n:m pattern: not for '
            f'method "{method}" and pattern {config.pattern}; use "fisher"'
        )
    if config.reconstruction is not None and config.importance != "sparsegpt":
        raise ValueError(f'sparseforge.reconstruction: importance "{config.importance}" does not use it; leave it out')


def default_of(kind: type[SparseForgeConfig], key: str) -> Any:
    """What a top-level key is when nothing is said."""
    found = next(item for item in dataclasses.fields(kind) if item.name == key)
    return found.default if found.default_factory is dataclasses.MISSING else found.default_factory()
