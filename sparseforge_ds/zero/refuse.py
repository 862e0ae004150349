"""Engine settings that would break the journey of a weight, refused before the first step."""

from __future__ import annotations

import torch
from deepspeed import DeepSpeedEngine

EXPERTS_DIVIDED = (
    "expert parallelism gives every rank other experts under the same names, while masks, their statistics and "
    'checkpoints are of whole weights that all ranks share; remove it: ZeRO stage 3 ("zero_optimization": '
    '{"stage": 3}) divides the experts over the ranks too'
)
"""Why experts that live on one rank each cannot be pruned, and what to do."""


def _no_engine(given: object) -> str:
    """What to do about something that DeepSpeed did not make."""
    name = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
    if isinstance(given, tuple):
        return (
            f"not a DeepSpeed engine, but a tuple of {len(given)}: pass the first thing that deepspeed.initialize gives"
        )
    if isinstance(getattr(given, "module", None), torch.nn.Module):
        name += f" around a {type(given.module).__name__}"  # type: ignore[attr-defined]
    return (
        f"not a DeepSpeed engine, but a {name}: pass the first thing that deepspeed.initialize gives. Under accelerate "
        "that is what prepare() gives with a DeepSpeed plugin (`accelerate launch --use_deepspeed "
        "--deepspeed_config_file JSON`, or Accelerator(deepspeed_plugin=...)); without one it prepares the model for "
        "something else"
    )


def refuse_unsupported(engine: DeepSpeedEngine) -> None:
    """Stop at attach time when DeepSpeed is set up in a way that masks cannot survive.

    Raises:
        ValueError: what is set, why it cannot work, and what to set instead.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise ValueError(_no_engine(engine))
    inner = getattr(engine, "basic_optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ValueError(
            f"the engine's optimizer is {type(inner).__name__}, not a torch.optim.Optimizer, so it has no step hooks; "
            'configure "optimizer" in the DeepSpeed JSON or pass a torch optimizer to deepspeed.initialize'
        )
    zero = engine._config.zero_config
    offload = zero.offload_optimizer
    refusals = [
        (
            getattr(engine, "zenflow", False),
            "zero_optimization.zenflow: its selective optimizer writes weights past the optimizer hooks; remove it",
        ),
        (
            offload is not None and offload.super_offload,
            "offload_optimizer.super_offload: its worker process owns another optimizer; set it to false",
        ),
        (
            offload is not None and offload.ratio < 1.0,
            f"offload_optimizer.ratio = {offload and offload.ratio}: partial offload steps a second optimizer; set 1.0",
        ),
        (
            offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme",
            'offload_optimizer.device = "nvme": masks swapped to disk are not supported; set "cpu"',
        ),
        (
            engine.optimizer_legacy_fusion(),
            'optimizer "legacy_fusion": it writes low-precision weights inside the kernel; remove it',
        ),
        (
            engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16,
            'torch_autocast with float16: its scaler may skip a step on one rank only; use "fp16" or "bf16"',
        ),
        (
            engine.fp16_enabled() and zero.stage == 0 and engine.optimizer.loss_scale not in (None, 1),
            "fp16 at ZeRO stage 0: DeepSpeed divides the gradients by a loss scale that its backward never applied; "
            'use stage 1, bf16, or "fp16": {"loss_scale": 1}',
        ),
        (
            not engine.managed_gradient_accumulation(),
            "managed_gradient_accumulation = false: the curvature probe sets the boundary itself; set it to true",
        ),
        (
            bool(zero.zero_quantized_weights),
            "zero_quantized_weights: a quantised gather need not keep exact zeros; set it to false",
        ),
        (
            engine.autotp_size() > 1,
            f"tensor_parallel.autotp_size = {engine.autotp_size()}: layers cut by tensor parallelism are not "
            "supported; remove it",
        ),
        (
            engine.sequence_parallel_size > 1,
            f"sequence_parallel_size = {engine.sequence_parallel_size}: curvature is averaged over data-parallel ranks "
            "only; remove it",
        ),
        (
            engine.has_moe_layers,  # layers that route between ranks: AutoEP's, or deepspeed.moe's own
            f"expert_parallel, or layers of deepspeed.moe: {EXPERTS_DIVIDED}",
        ),
        (
            engine.is_deepcompile_enabled(),
            "compile.deepcompile: its passes have not been tried with published weights; set it to false",
        ),
        (
            bool(getattr(engine, "pipeline_parallelism", False)),
            "pipeline parallelism is not supported; use ZeRO stages 0 to 3",
        ),
        (
            type(inner).__name__ in {"OnebitAdam", "OnebitLamb", "ZeroOneAdam"},
            f"optimizer {type(inner).__name__} communicates compressed moments inside its step; use AdamW",
        ),
        (
            any(group.get("use_muon") for group in inner.param_groups),
            "Muon orthogonalizes whole matrices before the step hooks see the gradient; use AdamW",
        ),
    ]
    for is_set, message in refusals:
        if is_set:
            raise ValueError(f"cannot train a mask with this engine: {message}")
