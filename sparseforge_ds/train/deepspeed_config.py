"""The DeepSpeed JSON of a run: read, checked and with every "auto" filled, before DeepSpeed sees it."""

from __future__ import annotations

import copy
import difflib
import json
import re
from dataclasses import dataclass
from typing import Any

import torch

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.shipped import configuration_file
from sparseforge_ds.train.arguments import RunArguments
from sparseforge_ds.zero.refuse import EXPERTS_DIVIDED

# Top-level keys of DeepSpeed 0.19: it ignores all others in silence, and "zero_optimisation" trains stage 0.
_KEYS = tuple(
    re.findall(
        r"\w+",
        """
        activation_checkpointing aio autotuning bf16 checkpoint comms_config comms_logger
        communication_data_type compile csv_monitor curriculum_learning data_efficiency data_types
        dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity
        expert_parallel flops_profiler seq_parallel_communication_data_type use_data_before_expert_parallelism
        vocabulary_size
        fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
        hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula optimizer
        prescale_gradients progressive_layer_drop quantize_training scheduler sequence_parallel_size
        sparse_attention sparse_gradients sparseforge steps_per_print tensor_parallel tensorboard timers
        torch_autocast train_batch_size train_micro_batch_size_per_gpu use_node_rank wall_clock_breakdown wandb
        comet weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
        """,
    )
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Batch:
    """The batch arithmetic of a run: train = micro * accumulation * world."""

    train: int
    micro: int
    accumulation: int


def read_deepspeed_json(path: str) -> dict[str, Any]:
    """The parsed file, or that of the package which has this name.

    Raises:
        ValueError: the file is missing or no JSON object, a key is misspelled, or it has a scheduler.
    """
    try:
        file = configuration_file(path)
    except ValueError as error:
        raise ValueError(f"--deepspeed {error}") from None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--deepspeed {path}: not a readable JSON file ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"--deepspeed {path}: not a JSON object with keys")
    if "bfloat16" in content:  # DeepSpeed's other spelling
        content.setdefault("bf16", content.pop("bfloat16"))
    for key in sorted(set(content) - set(_KEYS)):
        (near,) = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.0)
        raise ValueError(
            f"--deepspeed {path}: unknown key {key!r}, which DeepSpeed would ignore; did you mean {near!r}?"
        )
    for key in ("bf16", "fp16", "zero_optimization", "optimizer", "sparseforge"):
        if not isinstance(content.get(key, {}), dict):
            raise ValueError(
                f'--deepspeed {path}: {key} = {content[key]!r}: expected an object, like {{"enabled": true}}'
            )
    if "scheduler" in content:
        raise ValueError(
            f'--deepspeed {path}: remove the "scheduler" block; '
            "--learning_rate, --warmup and --min_lr_ratio set the learning rate"
        )
    experts = content.get("expert_parallel")
    if experts and (not isinstance(experts, dict) or experts.get("enabled")):
        raise ValueError(f"--deepspeed {path}: expert_parallel = {json.dumps(experts)}: {EXPERTS_DIVIDED}")
    for key in ("nebula", "datastates_ckpt"):
        if key in content:
            raise ValueError(f"--deepspeed {path}: remove {key!r}: such saves are not on disk when they say so")
    if isinstance(content.get("checkpoint"), dict) and "writer" in content["checkpoint"]:
        raise ValueError(f"--deepspeed {path}: remove checkpoint.writer: such saves are not on disk when they say so")
    return content


def with_batch(content: dict[str, Any], global_batch: int | None, micro_batch: int | None) -> dict[str, Any]:
    """The same configuration with another batch; None keeps what it says.

    Args:
        content: a DeepSpeed configuration; it is not changed.
        global_batch: sequences of a step on all ranks.
        micro_batch: sequences of a rank at a time.
    """
    changed = dict(content)
    if global_batch is not None:
        changed["train_batch_size"] = global_batch
    if micro_batch is not None:
        changed["train_micro_batch_size_per_gpu"] = micro_batch
    if changed != content and changed.get("train_batch_size", "auto") != "auto":
        changed["gradient_accumulation_steps"] = "auto"  # what the other two leave over
    return changed


def batch_arithmetic(content: dict[str, Any], world_size: int) -> Batch:
    """Divide the batch over the ranks.

    Given are one, two or all three of train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps;
    "auto" counts as not given.

    Raises:
        ValueError: they do not fit each other and the number of ranks.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, accumulation = (None if content.get(name) == "auto" else content.get(name) for name in names)
    for name, value in zip(names, (train, micro, accumulation), strict=True):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f'{name} = {json.dumps(value)} is not valid: use an integer >= 1 or "auto"')
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    assert accumulation is not None
    if train != micro * accumulation * world_size or train == 0:
        unit = max(1, micro if content.get(names[1]) != "auto" and names[1] in content else 1)
        unit *= world_size * (accumulation if content.get(names[2]) not in (None, "auto") else 1)
        near = sorted({max(unit, train // unit * unit), (train // unit + 1) * unit})
        raise ValueError(
            f"train_batch_size = {train} cannot be divided into micro-batches for {world_size} ranks "
            f"(train_micro_batch_size_per_gpu {content.get(names[1], 'auto')}, gradient_accumulation_steps "
            f'{content.get(names[2], "auto")}): use {" or ".join(map(str, near))}, set the other two keys to "auto", '
            "or change the number of ranks; --global_batch and --micro_batch win over the JSON"
        )
    return Batch(train, micro, accumulation)


def training_dtype(content: dict[str, Any]) -> torch.dtype:
    """What a resolved configuration computes in."""
    for name, dtype in _DTYPES.items():
        if content.get(name, {}).get("enabled"):
            return dtype
    return torch.float32


def zero_stage(content: dict[str, Any]) -> int:
    """The ZeRO stage of a configuration."""
    return int(content.get("zero_optimization", {}).get("stage", 0))


def resolve(
    content: dict[str, Any],
    arguments: RunArguments,
    config: SparseForgeConfig,
    *,
    world_size: int,
    hidden_size: int,
    supports_bf16: bool,
    supports_fp16: bool,
    fuses_optimizer: bool = False,
) -> dict[str, Any]:
    """Fill every "auto", let the run flags win, and check what can be checked.

    Args:
        content: what `read_deepspeed_json` gave; it is not changed.
        arguments: the run flags.
        config: the parsed sparseforge block; the result carries it with every value spelled out.
        world_size: number of ranks.
        hidden_size: width of the model, which decides bucket sizes and the default learning rate.
        supports_bf16: whether the accelerator computes in bf16 faster than in fp32.
        supports_fp16: the same for fp16.
        fuses_optimizer: whether torch's AdamW is to be one kernel where the JSON leaves that open.

    Raises:
        ValueError: the batch does not fit, two precisions are on, the optimizer is missing, or an "auto" stays open.
    """
    filled = copy.deepcopy(content)
    batch = batch_arithmetic(content, world_size)
    filled["train_batch_size"] = batch.train
    filled["train_micro_batch_size_per_gpu"] = batch.micro
    filled["gradient_accumulation_steps"] = batch.accumulation
    if filled.get("gradient_clipping", 0) == "auto":
        filled["gradient_clipping"] = 1.0
    _fill_precision(filled, {"bf16": supports_bf16, "fp16": supports_fp16})
    _fill_optimizer(filled, arguments, hidden_size, fuses_optimizer)
    zero = filled.get("zero_optimization", {})
    for name, value in (
        ("reduce_bucket_size", hidden_size**2),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden_size**2)),
        ("stage3_param_persistence_threshold", 10 * hidden_size),
    ):
        if zero.get(name) == "auto":
            zero[name] = value
    filled["sparseforge"] = config.to_dict()
    if unfilled := list(_autos({key: value for key, value in filled.items() if key != "sparseforge"}, "")):
        raise ValueError(f'"auto" is not known for {", ".join(unfilled)}; write a value')
    return filled


def _fill_precision(filled: dict[str, Any], supported: dict[str, bool]) -> None:
    for name in ("bf16", "fp16"):
        if filled.get(name, {}).get("enabled") == "auto":
            taken = any(filled.get(other, {}).get("enabled") is True for other in _DTYPES if other != name)
            filled[name]["enabled"] = supported[name] and not taken
    if all(filled.get(name, {}).get("enabled") for name in _DTYPES):
        raise ValueError("bf16 and fp16 are both enabled; switch one of them off")


def _fill_optimizer(filled: dict[str, Any], arguments: RunArguments, hidden_size: int, fused: bool) -> None:
    optimizer = filled.get("optimizer")
    if not isinstance(optimizer, dict) or "type" not in optimizer:
        raise ValueError('no "optimizer" in the DeepSpeed JSON; add {"type": "AdamW", "params": {"lr": "auto"}}')
    params = optimizer.setdefault("params", {})
    defaults = {
        "lr": 1e-3 * min(1.0, 128 / hidden_size),
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "fused": fused,
    }
    for name, value in defaults.items():
        if params.get(name, "auto" if name in ("lr", "weight_decay") else None) == "auto":
            params[name] = value
    if arguments.learning_rate is not None:
        params["lr"] = arguments.learning_rate
    if arguments.weight_decay is not None:
        params["weight_decay"] = arguments.weight_decay


def _autos(content: Any, where: str) -> list[str]:
    if isinstance(content, dict):
        return [found for key, value in content.items() for found in _autos(value, f"{where}.{key}" if where else key)]
    if isinstance(content, list):
        return [found for value in content for found in _autos(value, where)]
    return [where] if content == "auto" else []
