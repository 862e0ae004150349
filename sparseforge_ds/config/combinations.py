"""Checks of the `sparseforge` block across its keys."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from typing import TYPE_CHECKING, Any

from sparseforge_ds.config.block_sections import CurvatureConfig
from sparseforge_ds.config.method_config import OPTIONAL
from sparseforge_ds.config.methods import METHODS, MOST_CHOICES
from sparseforge_ds.config.strict import require
from sparseforge_ds.mask.pattern import NM, Block, require_removing
from sparseforge_ds.mask.quantization import scale_group

if TYPE_CHECKING:
    from sparseforge_ds.config.block import SparseForgeConfig


def check_method(config: SparseForgeConfig) -> None:
    """Raise ValueError for keys, a pattern or an importance that the method cannot use."""
    method = config.method
    importance = config.importance
    pattern = config.parsed_pattern
    # 1. Keys that the method does not read.
    for key in OPTIONAL:
        default = _default(config, key)
        if key not in method.reads and getattr(config, key) != default:
            users = ", ".join(name for name, kind in METHODS.items() if key in kind.reads)
            cure = "set it to null, or leave it out" if default is None else "leave it out"
            raise ValueError(f'sparseforge.{key}: method "{method.name}" does not use it, only {users} do; {cure}')
    # 2. MaskLLM enumerates the patterns of a group.
    if method.name == "maskllm" and not isinstance(pattern, NM):
        raise ValueError(
            f'sparseforge.pattern = {config.pattern}: method "maskllm" numbers the patterns of a group, too many '
            "for a tile; use n:m"
        )
    if method.name == "maskllm" and isinstance(pattern, NM) and math.comb(pattern.m, pattern.n) > MOST_CHOICES:
        raise ValueError(
            f'sparseforge.pattern = {config.pattern}: method "maskllm" learns three numbers for every choice of a '
            f"group, and this pattern has more than {MOST_CHOICES:,}; use a smaller pattern, like 2:4 or 4:8"
        )
    # 3. CAST ranks weights inside an output, whose factor they share.
    if method.name == "cast" and method.scaling and isinstance(pattern, Block):
        raise ValueError(
            f"sparseforge.method.scaling: factors of outputs change which weights of a tile are the largest, and "
            f'{config.pattern} has tiles; use "scaling": false, or an n:m pattern'
        )
    # 4. SparseGPT chooses starting masks.
    if importance == "sparsegpt" and (method.name == "sparseforge" or not isinstance(pattern, NM)):
        raise ValueError(
            f'sparseforge.importance = "sparsegpt" makes a starting mask of an n:m pattern: not for '
            f'method "{method.name}" and pattern {config.pattern}; use "fisher"'
        )
    if config.start is not None:
        _check_start(config)


def check_removes(config: SparseForgeConfig) -> None:
    """Raise ValueError if the pattern keeps everything, unless the run is the dense control of a comparison."""
    if config.method.name == "naive_retrain" and config.importance == "magnitude":
        return
    try:
        require_removing(config.parsed_pattern)
    except ValueError as error:
        raise ValueError(
            f"sparseforge.pattern: {error}. The dense control of a comparison has it, with "
            '"method": "naive_retrain" and "importance": "magnitude"'
        ) from None


def check_quantization_start(config: SparseForgeConfig) -> None:
    """Raise ValueError if weights are to be quantized when masks freeze, and masks freeze with the last step."""
    settings = config.quantize
    if settings is not None and settings.from_ == "freeze" and 0 < config.max_steps <= config.quantize_step:
        earlier = "a larger method.frozen" if config.soft is None else "an earlier end of method.hardening"
        raise ValueError(
            f'sparseforge.quantize.from = "freeze": masks of method "{config.method.name}" freeze with the last step, '
            f"{config.max_steps}, so that no step would train quantized weights; use a fraction of max_steps, or "
            f"{earlier}"
        )


def _check_start(config: SparseForgeConfig) -> None:
    """Raise ValueError if a block-wise start does not fit the pattern and other keys."""
    assert config.start is not None
    block_start = config.start
    # 1. `start.mask` takes the place of `importance`, unless masks move afterwards.
    if config.soft is None and config.importance not in (_default(config, "importance"), block_start.mask):
        raise ValueError(
            f'sparseforge.importance = "{config.importance}": the mask of a start is chosen by start.mask = '
            f'{json.dumps(block_start.mask)}; leave it out, or set "start" to null. Where a preset has set it, '
            f'"importance": "{_default(config, "importance")}" takes it back'
        )
    # 2. Masks that stay measure no curvature.
    default = CurvatureConfig(**config.method.starts_from.get("curvature", {}))
    if config.soft is None and config.curvature != default:
        raise ValueError(
            "sparseforge.curvature: the masks of a start stay here, and nothing is measured; leave it out, or set "
            '"start" to null'
        )
    # 3. The rule must know the pattern, and branches something to begin from.
    if block_start.mask == "sparsegpt" and not isinstance(config.parsed_pattern, NM):
        raise ValueError(
            f"sparseforge.start.mask: sparsegpt makes masks of an n:m pattern, not {config.pattern}; use "
            '"wanda" or "magnitude"'
        )
    if config.soft is None and config.low_rank is not None and not config.moves_weights_into_branches:
        raise ValueError(
            "sparseforge.low_rank: branches that begin from what the mask removes have nothing to begin from after a "
            'start; use "shift": true, or leave one of the two out'
        )


def check_combinations(config: SparseForgeConfig) -> None:
    """Raise ValueError for keys that exclude each other."""
    # 1. Tokens, and row and column sums.
    _require(
        config,
        config.importance != "fisher" or config.curvature.per_token,
        "curvature.per_token",
        'importance "fisher" squares the gradient of every token; leave it out, or use importance "hutchinson"',
    )
    _require(
        config,
        config.importance != "hutchinson" or not config.curvature.per_token or config.curvature.factored is not False,
        "curvature.factored",
        'hutchinson with "per_token": true measures row and column sums only; use true, or "per_token": false',
    )
    _require(
        config,
        config.importance != "wanda" or config.curvature.factored is not False,
        "curvature.factored",
        'importance "wanda" is exactly the product of row and column sums; leave it out',
    )
    _require(
        config,
        not config.curvature.factored or config.factored,
        "curvature.factored",
        f'importance "{config.importance}" has no curvature to take row and column sums of; leave it out, or use '
        'importance "fisher"',
    )
    _require(
        config,
        config.importance == "hutchinson" or config.curvature.radius is None,
        "curvature.radius",
        'importance "hutchinson" alone moves weights by it; leave it out',
    )
    # 2. Measurements in training steps.
    trained = config.curvature.source == "training"
    _require(
        config,
        not trained or config.curvature.sequences is None,
        "curvature.sequences",
        'source "training" measures the sequences of the training step; leave it out, or use source "probe"',
    )
    _require(
        config,
        not trained or config.can_use_training_step,
        "curvature.source",
        "only sparseforge with a soft mask, importance fisher, per_token and row and column sums listens to the "
        'training step; leave it out, or use "probe"',
    )
    # 3. Groups of inputs that share a scale.
    if config.quantize is not None and config.quantize.group_size is not None:
        group_size = config.quantize.group_size
        try:
            scale_group(config.parsed_pattern, group_size, group_size * config.parsed_pattern.members)
        except ValueError as error:
            raise ValueError(f"sparseforge.quantize.group_size = {group_size}: {error}") from None
    # 4. Branches.
    if config.low_rank is not None and config.moves_weights_into_branches:
        pattern = config.parsed_pattern
        _require(
            config,
            config.low_rank.learned or (isinstance(pattern, NM) and config.low_rank.k % pattern.members == 0),
            "low_rank.k",
            f"shifted runs are whole groups of the pattern, here {pattern}; use a multiple of the m of an n:m "
            'pattern, or "shift": false',
        )


def check_branch_start(config: SparseForgeConfig) -> None:
    """Raise ValueError if branches would be switched on before the first mask update."""
    if config.low_rank is not None and config.low_rank.start is not None and config.soft is not None:
        first = config.soft.schedule(config.max_steps).update_every
        _require(
            config,
            config.branch_step >= first,
            "low_rank.start",
            f"at step {config.branch_step} of {config.max_steps} no mask has removed anything yet, the first update "
            f"being at step {first}; use null, a later start, or more steps",
        )


def _default(config: SparseForgeConfig, key: str) -> Any:
    """Return the value of a key of the block that the method starts from."""
    if key in config.method.starts_from:
        return config.method.starts_from[key]
    declared = {field.name: field for field in dataclasses.fields(config)}[key]
    return declared.default if declared.default_factory is dataclasses.MISSING else declared.default_factory()


def _require(config: SparseForgeConfig, condition: bool, key: str, cure: str) -> None:
    require(condition, key, operator.attrgetter(key)(config), cure)
