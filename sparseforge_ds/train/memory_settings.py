"""Numbers of a resolved DeepSpeed configuration that decide about memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.batch import SEQUENCE
from sparseforge_ds.config.deepspeed_config import training_dtype

_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}


@dataclass(frozen=True)
class MemorySettings:
    """Layout of one run over its ranks. Sizes are in elements, as in DeepSpeed."""

    forge: SparseForgeConfig
    stage: int
    ranks: int
    dtype: torch.dtype
    gradient_bytes: int
    """Bytes of an element while gradients are reduced and kept."""
    micro_batch: int
    accumulation: int
    seq_length: int
    sequence_parallel: int
    """Ranks that share a sequence."""
    checkpointing: bool
    teacher: bool
    optimizer_on_host: bool
    weights_on_host: bool
    fused_optimizer: bool
    """True if the optimizer's step needs no temporary tensors."""
    bucket: int
    """reduce_bucket_size."""
    contiguous: bool
    """contiguous_gradients."""
    overlapped: bool
    """overlap_comm."""
    prefetch: int
    persistence: int
    """stage3_param_persistence_threshold."""
    max_live: int
    max_reuse: int
    sub_group: int
    bf16_states: bool
    """bf16_master_weights_and_grads and bf16_optimizer_states: only the states of masks are in fp32."""
    sequential: bool
    """stage3_allgather_sequential: each weight is gathered where it stays."""
    moments: tuple[int, int] = (2, 2)
    """Numbers that the optimizer keeps for an element of a weight under a mask, and of another one."""

    @property
    def low(self) -> int:
        """Bytes of an element of the weights that the network sees."""
        return self.dtype.itemsize

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.tokens_at_once * self.accumulation * self.ranks

    @property
    def tokens_at_once(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.seq_length // self.sequence_parallel

    @property
    def of_master(self) -> int:
        """Bytes of an element of the masters; 0 in fp32 without ZeRO, where they are the weights themselves."""
        return (2 if self.bf16_states else 4) if self.stage > 0 or self.low < 4 else 0

    @property
    def divided_teacher(self) -> bool:
        """True if ZeRO-3 divides the teacher, whatever the stage of the student is."""
        return self.teacher and self.forge.distillation is not None and self.forge.distillation.hold == "zero3"

    @property
    def whole_gradients(self) -> bool:
        """True if every rank keeps fp32 gradients of the whole model between steps.

        DeepSpeed's BF16_Optimizer does.
        """
        bf16 = self.dtype == torch.bfloat16 and self.gradient_bytes == 4
        return bf16 and self.stage == 1 and not self.optimizer_on_host

    @property
    def always_frozen(self) -> bool:
        """True if masks are fixed before the first step."""
        return self.forge.max_steps > 0 and self.forge.release_step == 0


def settings(
    resolved: dict[str, Any],
    forge: SparseForgeConfig,
    *,
    ranks: int,
    seq_length: int,
    checkpointing: bool,
) -> MemorySettings:
    """Read the settings of a run from its configuration.

    Args:
        resolved: DeepSpeed's configuration without "auto" (`config.deepspeed_config.resolve`).
        forge: the `sparseforge` block in it.
        ranks: number of processes.
        seq_length: tokens of a sequence.
        checkpointing: True if activations are computed again in the backward pass.
    """
    zero = DeepSpeedZeroConfig(**resolved.get("zero_optimization", {}))
    dtype = training_dtype(resolved)
    on_host = [part is not None and part.device != "none" for part in (zero.offload_optimizer, zero.offload_param)]
    gradient_dtype = (resolved.get("data_types") or {}).get("grad_accum_dtype")
    params = resolved.get("optimizer", {}).get("params", {})
    return MemorySettings(
        forge=forge,
        stage=int(zero.stage),
        ranks=ranks,
        dtype=dtype,
        gradient_bytes=dtype.itemsize if gradient_dtype is None else _BYTES[str(gradient_dtype)],
        micro_batch=int(resolved["train_micro_batch_size_per_gpu"]),
        accumulation=int(resolved["gradient_accumulation_steps"]),
        seq_length=seq_length,
        sequence_parallel=int(resolved.get(SEQUENCE, 1)),
        checkpointing=checkpointing,
        teacher=forge.distillation is not None,
        optimizer_on_host=on_host[0],
        weights_on_host=on_host[1],
        # DeepSpeed's own Adam is a fused kernel; torch's is one when it is told so.
        fused_optimizer=not params.get("torch_adam", False) or bool(params.get("fused", False)),
        bucket=zero.reduce_bucket_size,
        contiguous=zero.contiguous_gradients,
        overlapped=bool(zero.overlap_comm),
        prefetch=zero.prefetch_bucket_size,
        persistence=zero.param_persistence_threshold,
        max_live=zero.max_live_parameters,
        max_reuse=zero.max_reuse_distance,
        sub_group=zero.sub_group_size,
        bf16_states=bool((resolved.get("bf16") or {}).get("bf16_optimizer_states")),
        sequential=zero.allgather_sequential,
        moments=_moments(resolved.get("optimizer", {})),
    )


def _moments(optimizer: dict[str, Any]) -> tuple[int, int]:
    """Return `MemorySettings.moments` of an optimizer; of one that is not known here, those of Adam."""
    name = str(optimizer.get("type", "")).lower()
    if name == "muon":  # momentum for matrices, and Adam for the rest
        return 1, 2
    if name == "sgd":
        count = int(bool(optimizer.get("params", {}).get("momentum", 0)))
    else:
        count = 1 if name in ("lion", "adagrad") else 2
    return count, count


def leaf_suffixes(resolved: dict[str, Any]) -> tuple[str, ...]:
    """Return the ends of the names of modules that ZeRO-3 gathers as a whole."""
    return tuple((resolved.get("zero_optimization", {}).get("leaf_module") or {}).get("name_suffixes", ()))
