"""Settings of a DeepSpeed configuration under which masks could not be published or kept.

Launcher, dry run and planner check them when they read the JSON. `zero.refuse` checks them when a forge is attached,
together with what only an engine knows.
"""

from __future__ import annotations

from deepspeed import DeepSpeedConfig

EXPERTS_DIVIDED = (
    "expert parallelism gives ranks different experts under the same names, but masks, their statistics and "
    'checkpoints need weights that all ranks share; remove it: ZeRO stage 3 ("zero_optimization": '
    '{"stage": 3}) divides the experts over the ranks too'
)
"""Reason and cure for expert parallelism, which cannot be pruned."""
MUON = (
    "Muon with masks is known to be exact at ZeRO stage 3, and at stage 0 in fp32, without offload_optimizer and "
    "zero_quantized_gradients; use one of these, or AdamW"
)
"""Reason and cure where Muon is not exact."""
COMPRESSED = {"onebitadam": "OneBitAdam", "onebitlamb": "OneBitLamb", "zerooneadam": "ZeroOneAdam"}
"""Optimizers whose ranks exchange compressed moments, by their names in lower case."""


def refused_setting(config: DeepSpeedConfig) -> str | None:
    """Return the first setting that masks cannot survive, with reason and cure; None if there is none."""
    zero = config.zero_config
    stage = int(config.zero_optimization_stage)
    optimizer = zero.offload_optimizer
    optimizer_device, param_device = (
        str(getattr(offload and offload.device, "value", offload and offload.device))
        for offload in (optimizer, zero.offload_param)
    )
    name = str(config.optimizer_name or "").lower()
    # Each row is a condition and the message if it holds. The reference page lists the messages.
    refusals = [
        (
            zero.zenflow is not None,
            "zero_optimization.zenflow: its selective optimizer writes weights past the optimizer hooks; remove it",
        ),
        (
            optimizer is not None and optimizer.super_offload,
            "offload_optimizer.super_offload: its worker process owns another optimizer; set it to false",
        ),
        (
            optimizer is not None and optimizer.ratio < 1.0,
            f"offload_optimizer.ratio = {optimizer and optimizer.ratio}: partial offload steps a second optimizer; "
            "set 1.0",
        ),
        (
            optimizer_device == "nvme",
            'offload_optimizer.device = "nvme": masks swapped to disk are not supported; set "cpu"',
        ),
        (
            optimizer_device == "cpu" and stage < 1,
            f"offload_optimizer works from ZeRO stage 1 on, and the stage is {stage}; raise the stage or remove it",
        ),
        (
            param_device == "nvme",
            'offload_param.device = "nvme": weights are published into memory, and not to a disk; set "cpu"',
        ),
        (
            param_device == "cpu" and stage < 3,
            f"offload_param works from ZeRO stage 3 on, and the stage is {stage}; raise the stage or remove it",
        ),
        (
            config.optimizer_legacy_fusion,
            'optimizer "legacy_fusion": it writes low-precision weights inside the kernel; remove it',
        ),
        (
            config.torch_autocast_enabled,
            "torch_autocast: it keeps weights in fp32 and computes in another dtype, while curvature, starts and "
            'teachers go by the dtype of the weights; use "bf16", whose masters are fp32, or "fp16"',
        ),
        (
            config.float16_config.enabled and stage == 0 and config.float16_config.loss_scale != 1,
            "fp16 at ZeRO stage 0: DeepSpeed divides the gradients by a loss scale that its backward never applied; "
            'use stage 1, bf16, or "fp16": {"loss_scale": 1}',
        ),
        (
            not config.managed_gradient_accumulation,
            "managed_gradient_accumulation = false: the curvature probe sets the boundary itself; set it to true",
        ),
        (
            bool(zero.elastic_checkpoint),
            "zero_optimization.elastic_checkpoint: it saves states without the numbers of their parameters; set it to "
            "false, any number of ranks goes on from a checkpoint all the same",
        ),
        (
            bool(zero.zero_quantized_weights),
            "zero_quantized_weights: a quantised gather need not keep exact zeros; set it to false",
        ),
        (
            bool(zero.zero_quantized_nontrainable_weights),
            "zero_quantized_nontrainable_weights: checkpoints and starts read weights, and not the codes that stand in "
            "their place; set it to false",
        ),
        (
            bool(config.data_efficiency_enabled),
            "data_efficiency: a resumed run would begin its sampling and its token dropping anew, since what "
            "DeepSpeed saves of them is not read; remove it",
        ),
        (
            config.tensor_parallel_config.autotp_size > 1,
            f"tensor_parallel.autotp_size = {config.tensor_parallel_config.autotp_size}: layers cut by tensor "
            "parallelism are not supported; remove it",
        ),
        (
            config.compile_config.deepcompile,
            "compile.deepcompile: its passes have not been tried with published weights; set it to false",
        ),
        (
            name in COMPRESSED,
            f"optimizer {COMPRESSED.get(name)} communicates compressed moments inside its step; use AdamW",
        ),
        (
            name == "muon"
            and (
                optimizer_device == "cpu"
                or bool(zero.zero_quantized_gradients)
                or stage in (1, 2)
                or (stage == 0 and (config.float16_config.enabled or config.bfloat16_config.enabled))
            ),
            MUON,
        ),
        (
            name == "muon" and stage == 3 and zero.reduce_scatter,
            "zero_optimization.reduce_scatter = true: DeepSpeed's Muon reduces whole gradients; set it to false",
        ),
    ]
    return next((message for is_set, message in refusals if is_set), None)
