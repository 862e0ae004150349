"""Refusal of engines with which masks cannot be trained, before the first step."""

from __future__ import annotations

import torch
from deepspeed import DeepSpeedEngine

from sparseforge_ds.config.refused_settings import COMPRESSED, EXPERTS_DIVIDED, refused_setting
from sparseforge_ds.zero.shard import OTHER_ENGINES


def _describe_no_engine(value: object) -> str:
    """Return a message about a value that is no DeepSpeed engine, with the cure."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, tuple):
        return (
            f"not a DeepSpeed engine, but a tuple of {len(value)}: pass the first thing that deepspeed.initialize gives"
        )
    if isinstance(getattr(value, "module", None), torch.nn.Module):
        name += f" around a {type(value.module).__name__}"  # type: ignore[attr-defined]
    return (
        f"not a DeepSpeed engine, but a {name}: pass the first thing that deepspeed.initialize gives. Under accelerate "
        "that is what prepare() gives with a DeepSpeed plugin (`accelerate launch --use_deepspeed "
        "--deepspeed_config_file JSON`, or Accelerator(deepspeed_plugin=...)); without one it prepares the model for "
        "something else"
    )


def uses_muon(inner: torch.optim.Optimizer) -> bool:
    """Return True if an engine's inner optimizer is DeepSpeed's Muon."""
    return any(group.get("use_muon") for group in inner.param_groups)


def refuse_unsupported(engine: DeepSpeedEngine) -> None:
    """Refuse an engine whose settings or parts would break the training of masks.

    Raises:
        ValueError: the message says what is set, why it cannot work, and what to set instead.
    """
    attached = "a SparseForge is attached to it already, and its hooks stay; make a new engine"
    if type(engine) in OTHER_ENGINES:
        if getattr(engine, "has_sparseforge", False):
            raise ValueError(f"cannot train a mask with this engine: {attached}")
        return
    if not isinstance(engine, DeepSpeedEngine):
        raise ValueError(_describe_no_engine(engine))
    inner = getattr(engine, "basic_optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ValueError(
            f"the engine's optimizer is {type(inner).__name__}, not a torch.optim.Optimizer, so it has no step hooks; "
            'configure "optimizer" in the DeepSpeed JSON or pass a torch optimizer to deepspeed.initialize'
        )
    if message := refused_setting(engine._config):
        raise ValueError(f"cannot train a mask with this engine: {message}")
    # Parts of the engine that were made outside of its configuration.
    refusals = [
        (getattr(engine, "has_sparseforge", False), f"{attached} with deepspeed.initialize"),
        (
            engine.sequence_parallel_size > 1 and engine.mesh_device is not None,
            f"sequence_parallel_size = {engine.sequence_parallel_size} by a device mesh, over whose rows alone "
            "gradients are reduced; leave data_parallel_size and mesh_param out, and give deepspeed.initialize the mpu "
            "that UlyssesSPAttentionHF.register_with_transformers returns",
        ),
        (
            engine.has_moe_layers,  # layers that route between ranks: AutoEP's, or deepspeed.moe's own
            f"expert_parallel, or layers of deepspeed.moe: {EXPERTS_DIVIDED}",
        ),
        (
            # From stage 1 on, ZeRO keeps masters in fp32.
            not engine.zero_optimization_stage()
            and not (engine.fp16_enabled() or engine.bfloat16_enabled())
            and any(p.dtype == torch.float16 and p.requires_grad for p in engine.module.parameters()),
            'weights in float16 at ZeRO stage 0, and no "bf16" section in the JSON: squares of gradients and the '
            'epsilon of Adam would be 0 there; add "bf16": {"enabled": true}, or load the model in float32',
        ),
        (
            bool(getattr(engine, "pipeline_parallelism", False)),
            "pipeline parallelism is not supported; use ZeRO stages 0 to 3",
        ),
        (
            type(inner).__name__.lower() in COMPRESSED,
            f"optimizer {type(inner).__name__} communicates compressed moments inside its step; use AdamW",
        ),
        (
            getattr(engine.optimizer, "optimizer", inner) is not inner,
            f"optimizer {type(inner).__name__}: ZeRO put another one in its place, past the step hooks that publish "
            "masks; use AdamW",
        ),
        (
            uses_muon(inner) and engine._config.optimizer_name != "muon",
            "Muon that is made by hand, whose weights DeepSpeed does not orthogonalize; choose it by "
            '"optimizer": {"type": "Muon"} in the DeepSpeed JSON, or use AdamW',
        ),
    ]
    for is_set, message in refusals:
        if is_set:
            raise ValueError(f"cannot train a mask with this engine: {message}")
