"""DeepSpeed JSON of a run: it is read, checked, and every "auto" is filled, before DeepSpeed sees it."""

from __future__ import annotations

import copy
import importlib.util
import json
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfigError
from pydantic import ValidationError

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.batch import BATCH, SEQUENCE, batch_arithmetic, sequence_ranks
from sparseforge_ds.config.deepspeed_keys import check_keys, without_autos
from sparseforge_ds.config.json_file import keys_of_autos, parse_json_file
from sparseforge_ds.config.optimizer_settings import check_optimizer, has_rates_of_muon, has_weight_decay
from sparseforge_ds.config.refused_settings import EXPERTS_DIVIDED, refused_setting
from sparseforge_ds.config.run_file import BLOCK, read_run_file
from sparseforge_ds.config.shipped import configuration_file
from sparseforge_ds.config.strict import merge

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_LOGGERS = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
"""Package that each section of a logger needs."""

_WITHOUT_EFFECT = {
    "activation_checkpointing": "models of transformers do not use it; give --activation_checkpointing instead",
    "autotuning": "it belongs to DeepSpeed's own launcher; remove it",
    "checkpoint.load_universal": "checkpoints of any layout are loaded as they are; remove it",
    "data_efficiency": "the launcher reads its own data; remove it",
    "dataloader_drop_last": "the launcher reads its own data; remove it",
    "hybrid_engine": "nothing is generated while a run trains; remove it",
    "weight_quantization": 'it belongs to inference; use "quantize" in the "sparseforge" block',
}
"""Keys that DeepSpeed knows and a run does not use, with the cure. They are allowed where nothing is switched on."""


def _is_switched_on(values: Any) -> bool:
    """Return True if a value is true, or a section is enabled; without `enabled`, if any of its values is true."""
    if isinstance(values, dict):
        return values["enabled"] is True if "enabled" in values else any(value is True for value in values.values())
    return values is True


def read_deepspeed_json(path: str) -> dict[str, Any]:
    """Read and check the JSON of a path, or of the name of a shipped one.

    Raises:
        ValueError: the file cannot be read, or as `check_deepspeed`.
    """
    try:
        file = configuration_file(path)
    except ValueError as error:
        raise ValueError(f"--deepspeed {error}") from None
    content = parse_json_file(file, f"--deepspeed {path}")
    if not isinstance(content, dict):
        raise ValueError(f"--deepspeed {path}: not a JSON object with keys")
    return _checked(content, f"--deepspeed {path}")


def _checked(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Check a configuration whose name in messages is `name`, and return it with today's spelling of its keys."""
    if "bfloat16" in content:  # DeepSpeed's other spelling
        if "bf16" in content:
            raise ValueError(f"{name}: bf16 and bfloat16 are two spellings of one key; leave one of them out")
        content["bf16"] = content.pop("bfloat16")
    try:
        check_deepspeed(content)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return content


def read_deepspeed(arguments: RunArguments) -> dict[str, Any]:
    """Read and check the DeepSpeed configuration of a run, with the `sparseforge` block of its `--config` merged in.

    Raises:
        ValueError: as `read_deepspeed_json` and `read_run_file`; or there is no `sparseforge` block.
    """
    block: dict[str, Any] = {}
    if arguments.config is None:
        content = read_deepspeed_json(arguments.deepspeed)
    else:
        run_file = read_run_file(arguments.config)
        is_inline = run_file.deepspeed is not None and arguments.deepspeed == arguments.config
        content = (run_file.deepspeed or {}) if is_inline else read_deepspeed_json(arguments.deepspeed)
        if is_inline:
            content = _checked(content, f"--config {arguments.config}: deepspeed")
        block = {BLOCK: run_file.block} if run_file.block is not None else {}
    content = merge(content, block)
    if not isinstance(content.get(BLOCK), dict):
        where = arguments.config or arguments.deepspeed
        raise ValueError(f'{where}: no "sparseforge" block; add "sparseforge": {{}} for the defaults')
    return content


def check_deepspeed(content: dict[str, Any]) -> None:
    """Refuse settings that DeepSpeed would ignore, fail on after models are loaded, or that masks cannot survive.

    Batch sizes and values that are "auto" are not checked.

    Raises:
        ValueError: names the key, its value and the cure.
    """
    # 1. Keys that we refuse, or that have the wrong kind of value.
    if "scheduler" in content:
        raise ValueError(
            'remove the "scheduler" block: the launcher sets the rate of every step itself, as a function of the step; '
            "choose it by --lr_scheduler_type, --learning_rate, --warmup and --min_lr_ratio"
        )
    check_keys(content)
    experts = content.get("expert_parallel")
    if experts and (not isinstance(experts, dict) or experts.get("enabled")):
        raise ValueError(f"expert_parallel = {json.dumps(experts)}: {EXPERTS_DIVIDED}")
    for key in ("nebula", "datastates_ckpt"):
        if key in content:
            raise ValueError(f"remove {key!r}: such saves are not on disk when they say so")
    for where, cure in _WITHOUT_EFFECT.items():
        section, _, key = where.partition(".")
        values = content.get(section) or {}
        if key and isinstance(values, dict):
            values = values.get(key)
        if _is_switched_on(values):
            raise ValueError(f"{where} = {json.dumps(values):.80} has no effect here: {cure}")
    if "writer" in content.get("checkpoint", {}):
        raise ValueError("remove checkpoint.writer: such saves are not on disk when they say so")
    if all(content.get(name, {}).get("enabled") is True for name in _DTYPES):
        raise ValueError("bf16 and fp16 are both enabled; switch one of them off")
    for key, package in _LOGGERS.items():
        if content.get(key, {}).get("enabled") is True and importlib.util.find_spec(package) is None:
            raise ValueError(f"{key}: the package {package} is not installed; pip install {package}, or remove {key!r}")
    check_optimizer(content)
    # 2. DeepSpeed's own checks. Batch sizes are left out, since DeepSpeed compares them with this process's ranks.
    batch = dict.fromkeys(BATCH[1:], 1)
    settled = {
        key: value for key, value in without_autos(content).items() if key not in (*BATCH, SEQUENCE, "sparseforge")
    }
    try:
        settings = deepspeed.DeepSpeedConfig({**settled, **batch})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        value = f"{where} = {json.dumps(first['input'], default=str):.80}: " if where else ""
        raise ValueError(f"DeepSpeed cannot use it: {error.title}: {value}{first['msg']}") from None
    except (AssertionError, AttributeError, DeepSpeedConfigError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"DeepSpeed cannot use it: {' '.join(str(error).split()) or repr(error)}") from None
    # 3. Settings that masks cannot survive.
    if message := refused_setting(settings):
        raise ValueError(message)
    accumulated = settings.grad_accum_dtype
    if int(settings.zero_optimization_stage) == 0 and accumulated not in (None, _SHORT[training_dtype(settled)]):
        raise ValueError(
            f'data_types.grad_accum_dtype = "{accumulated}": without ZeRO, gradients are accumulated in what the model '
            "computes in; remove it, or use stage 1"
        )


def training_dtype(content: dict[str, Any]) -> torch.dtype:
    """Return the dtype that a configuration computes in.

    Raises:
        ValueError: it is still "auto".
    """
    for name, dtype in (*_DTYPES.items(), ("bfloat16", torch.bfloat16)):  # DeepSpeed's other spelling
        enabled = content.get(name, {}).get("enabled", False)
        if not isinstance(enabled, bool):
            raise ValueError(f"{name}.enabled = {enabled!r} in the DeepSpeed configuration: set it to true or false")
        if enabled:
            return dtype
    return torch.float32


def zero_stage(content: dict[str, Any]) -> int:
    """Return the ZeRO stage of a configuration."""
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
    """Fill every "auto", apply the run flags, and check the result.

    Args:
        content: the JSON of `read_deepspeed_json`; it is not changed.
        arguments: the run flags, which win over the JSON.
        config: the parsed `sparseforge` block; the result has it with every value resolved.
        world_size: number of ranks.
        hidden_size: width of the model, which decides bucket sizes and the default learning rate.
        supports_bf16: the accelerator computes in bf16, and faster than in fp32.
        supports_fp16: the same for fp16.
        fuses_optimizer: make torch's AdamW one kernel where the JSON leaves that open.

    Raises:
        ValueError: as `check_deepspeed`; or the batch does not fit, or an "auto" remains.
    """
    # 1. The batch.
    filled = copy.deepcopy(content)
    sequence = sequence_ranks(content, arguments, world_size)
    filled.pop(SEQUENCE, None)
    if sequence > 1:
        filled[SEQUENCE] = sequence
    filled |= batch_arithmetic(content, world_size, sequence)
    # 2. Every other "auto".
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
    # Stop no device for a clock that nobody reads: DeepSpeed's timer of throughput waits for it twice a micro-batch.
    if not {"timers", "steps_per_print"} & filled.keys():
        filled["timers"] = {"throughput": {"enabled": False}}
    # 3. The block, and a check that nothing is open.
    filled["sparseforge"] = config.to_dict()
    if unfilled := keys_of_autos({key: value for key, value in filled.items() if key != "sparseforge"}):
        raise ValueError(f'"auto" is not known for {", ".join(unfilled)}; write a value')
    check_deepspeed(filled)  # again, now that the precision is known
    return filled


def _fill_precision(filled: dict[str, Any], supported: dict[str, bool]) -> None:
    for name in ("bf16", "fp16"):
        if filled.get(name, {}).get("enabled") == "auto":
            taken = any(filled.get(other, {}).get("enabled") is True for other in _DTYPES if other != name)
            filled[name]["enabled"] = supported[name] and not taken


def _fill_optimizer(filled: dict[str, Any], arguments: RunArguments, hidden_size: int, fused: bool) -> None:
    params = filled["optimizer"].setdefault("params", {})
    defaults = {
        "lr": 4e-3 * min(1.0, 64 / hidden_size),
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "fused": fused,
    }
    added = ("lr", "weight_decay") if has_weight_decay(filled["optimizer"]["type"]) else ("lr",)
    # Under Muon with two rates of its own nothing trains at `lr`.
    if has_rates_of_muon(params):
        if (rate := arguments.learning_rate) is not None:
            raise ValueError(
                f"--learning_rate {rate:g} has no effect: matrices train at optimizer.params.muon_lr, and all else at "
                "adam_lr; leave the flag out, or one of these keys"
            )
        params.pop("lr", None)
        del defaults["lr"]
    for name, value in defaults.items():
        if params.get(name, "auto" if name in added else None) == "auto":
            params[name] = value
    if arguments.learning_rate is not None:
        params["lr"] = arguments.learning_rate
    if arguments.weight_decay is not None:
        params["weight_decay"] = arguments.weight_decay
