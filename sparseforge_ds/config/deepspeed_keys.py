"""Checks of the keys of a DeepSpeed JSON, and of the kinds of their values.

DeepSpeed ignores a top-level key that it does not know, so "zero_optimisation" trains stage 0, and it takes most values
as they are. Sections of which it has a pydantic model are left to that.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.logging import log_levels

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.strict import nearest

_KINDS: dict[str, str] = {
    "object": """
        activation_checkpointing aio autotuning bf16 checkpoint comet comms_config comms_logger compile csv_monitor
        data_efficiency data_types datastates_ckpt expert_parallel flops_profiler fp16 hybrid_engine optimizer
        scheduler sparseforge tensor_parallel tensorboard timers torch_autocast wandb weight_quantization
        zero_optimization
        """,
    "boolean": """
        dataloader_drop_last disable_allgather disable_python_gc dump_state managed_gradient_accumulation
        memory_breakdown prescale_gradients use_data_before_expert_parallelism use_node_rank wall_clock_breakdown
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        """,
    "number": "gradient_clipping gradient_predivide_factor",
    "integer": """
        gradient_accumulation_steps sequence_parallel_size steps_per_print train_batch_size
        train_micro_batch_size_per_gpu vocabulary_size
        """,
    "string": "communication_data_type gradient_allreduce_op log_level seq_parallel_communication_data_type",
}
_EXPECTED = {
    "object": "an object, like {}",
    "boolean": "true or false",
    "number": "a number",
    "integer": "an integer",
    "string": "a string",
}
_EXAMPLES = {"zero_optimization": '{"stage": 3}', "optimizer": '{"type": "AdamW", "params": {"lr": "auto"}}'}
_REMOVED = "curriculum_learning eigenvalue elasticity nebula progressive_layer_drop quantize_training sparse_attention"
"""Keys that DeepSpeed 0.19 still knows, to say why they are gone."""

KEYS: dict[str, str] = {key: kind for kind, keys in _KINDS.items() for key in re.findall(r"\w+", keys)}
"""Every top-level key of DeepSpeed 0.19, and ours, with the kind of its value."""

_PLAIN: dict[str, tuple[str, ...]] = {
    "data_types": ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "optimizer": ("type", "params", "legacy_fusion"),
    "torch_autocast": ("enabled", "dtype", "lower_precision_safe_modules"),
}
"""Sections in which DeepSpeed ignores what it does not know, with their keys."""
_DTYPES = ("fp32", "fp16", "bf16")


def check_keys(content: Mapping[str, Any]) -> None:
    """Check every key, and the kind of every value, by itself. "auto" counts as missing, except for an object.

    Raises:
        ValueError: names the key, its value and the cure.
    """
    # 1. Top-level keys and the kinds of their values.
    for key, value in content.items():
        if key not in KEYS and key not in _REMOVED.split():
            raise ValueError(f"unknown key {key!r}, which DeepSpeed would ignore; {_cure(key)}")
        kind = KEYS.get(key)
        if kind is None or (key == "expert_parallel" and value is True):  # refused with its reason
            continue
        if value == "auto" and kind != "object":
            continue
        if not _is(value, kind):
            expected = _EXPECTED[kind].format(_EXAMPLES.get(key, '{"enabled": true}'))
            raise ValueError(f"{key} = {json.dumps(value)}: expected {expected}, or leave it out")
        if kind == "object" and not isinstance(value.get("enabled", False), bool) and value["enabled"] != "auto":
            raise ValueError(f"{key}.enabled = {json.dumps(value['enabled'])}: expected true or false")
    # 2. Values whose range is known.
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if not _is(stage, "integer") or not 0 <= stage <= 3:
        raise ValueError(f"zero_optimization.stage = {json.dumps(stage)} is not valid: use 0, 1, 2 or 3")
    clipping = content.get("gradient_clipping", 0)
    if clipping != "auto" and clipping < 0:
        raise ValueError(f"gradient_clipping = {clipping} is not valid: use a number >= 0; 0 clips nothing")
    every = content.get("steps_per_print", 1)
    if every != "auto" and every < 1:
        raise ValueError(f"steps_per_print = {every} is not valid: use an integer >= 1, or leave it out")
    level = content.get("log_level", "auto")
    if level != "auto" and level.lower() not in log_levels:
        raise ValueError(f"log_level = {json.dumps(level)} is not valid: use one of {', '.join(log_levels)}")
    # 3. Keys of sections.
    for section, known in _PLAIN.items():
        for key in content.get(section, {}):
            if key not in known:
                raise ValueError(f"{section}.{key}: unknown key; {_near(f'{section}.', key, known)}")
    for key, value in content.get("data_types", {}).items():
        if key != "keep_in_fp32_modules" and value not in (None, "auto", *_DTYPES):
            raise ValueError(f"data_types.{key} = {json.dumps(value)} is not valid: use one of {', '.join(_DTYPES)}")
    for key, value in content.get("zero_optimization", {}).items():
        if value == "auto" and key in ("offload_optimizer", "offload_param"):
            raise ValueError(f'zero_optimization.{key} = "auto": expected an object, or leave it out')
        extra = getattr(DeepSpeedZeroConfig.model_fields.get(key), "json_schema_extra", None)
        if isinstance(extra, dict) and extra.get("deprecated"):
            raise ValueError(f"zero_optimization.{key}: an old name; use zero_optimization.{extra.get('new_param')}")


def without_autos(content: Any) -> Any:
    """Return a configuration without the values that are "auto"."""
    if isinstance(content, dict):
        return {key: without_autos(value) for key, value in content.items() if value != "auto"}
    return [without_autos(value) for value in content if value != "auto"] if isinstance(content, list) else content


def _is(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, int) or kind == "integer":  # of 64 bits
            return -(2**63) <= value < 2**63 and value == int(value)
        return math.isfinite(value)
    return isinstance(value, {"object": dict, "boolean": bool, "string": str}[kind])


def _near(prefix: str, key: str, known: Iterable[str]) -> str:
    if close := nearest(key, known := list(known)):
        return f"did you mean {prefix}{close}?"
    return f"known are {', '.join(known)}" if len(known) < 12 else "remove it"


def _cure(key: str) -> str:
    """Return the cure for an unknown top-level key: it is a flag, belongs elsewhere, or is misspelled."""
    if key in {field.name for field in dataclasses.fields(RunArguments)}:
        return f"it is a flag: --{key}"
    if key in {field.name for field in dataclasses.fields(SparseForgeConfig)}:
        return 'it belongs in the "sparseforge" block'
    if key in ("lr", "betas", "eps", "momentum"):
        return "it belongs in optimizer.params"
    if key in DeepSpeedZeroConfig.model_fields:
        return 'it belongs in "zero_optimization"'
    return f"did you mean {close!r}?" if (close := nearest(key, KEYS)) else "remove it"
