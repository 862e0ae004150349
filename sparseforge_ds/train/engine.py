"""The objects of a run: a DeepSpeed engine with a forge on it, and its objective with a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from transformers import PreTrainedModel, set_seed

import sparseforge_ds as sf
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.model.pretrained import load_pretrained
from sparseforge_ds.model.teacher import Teacher, teacher_ds_config
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.document_attention import check_documents_apart, separate_documents_in_flash
from sparseforge_ds.train.objective import Objective
from sparseforge_ds.train.spec import RunSpec
from sparseforge_ds.train.ulysses import SequenceParallel
from sparseforge_ds.transformers_internals import checkpoint_activations


@dataclass(frozen=True)
class Beginning:
    """Cost of a run's start, and size of the weights that it began with."""

    tokens: int
    """Tokens that the start has read, over all ranks; 0 without one."""
    epochs: int
    """Passes of the start over these tokens, at least 1."""
    seconds: float
    """Time of the start."""
    rms: float
    """Root mean square of the weights under a mask, before the start."""


@dataclass
class TrainContext:
    """Objects that the training loop works with."""

    spec: RunSpec
    ranks: Ranks
    engine: Any
    forge: sf.SparseForge
    objective: Objective
    batches: Batches
    device: torch.device
    beginning: Beginning | None = None
    """None before the start, and after a resume from a checkpoint that has none."""
    rates: float = 0.0
    """Sum of the learning rates of all steps so far."""


def build_context(spec: RunSpec, ranks: Ranks, batches: Batches) -> TrainContext:
    """Load the models and start DeepSpeed and the forge.

    Raises:
        ValueError: weights are missing, or the forge cannot work with this DeepSpeed configuration.
    """
    # Load the student, partitioned where ZeRO-3 will train it.
    set_seed((spec.arguments.seed + ranks.rank) % 2**32)  # ranks differ, so that dropout does
    partition = spec.deepspeed if spec.stage == 3 else None
    attention = {"attn_implementation": spec.arguments.attn_implementation}
    model = load_pretrained(spec.model.folder, f"--model {spec.model.name}", spec.dtype, partition, **attention)
    if spec.arguments.activation_checkpointing:
        checkpoint_activations(model)
    model = sf.prepare(model, spec.config)
    model.train()

    # Divide sequences over ranks, and keep documents apart, where the run asks for it.
    documents = spec.arguments.document_attention
    size = spec.sequence_parallel
    sequence_parallel = SequenceParallel(size, documents) if size > 1 else None
    _limit_attention(model, sequence_parallel, documents)

    # Start the engine, with a forge on it.
    weight_decay = spec.deepspeed["optimizer"]["params"].get("weight_decay", 0.0)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=sf.param_groups(model, spec.config, weight_decay=weight_decay),
        config=spec.deepspeed,
    )
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        scaler.raise_error_at_min_scale = False  # a bare Exception; the loop says what overflows and stops by itself
    _check_attention_scope(model, f"--model {spec.model.name}", sequence_parallel, documents)
    forge = sf.SparseForge(engine, spec.config)

    # Load the teacher.
    teacher = None
    distillation = spec.config.distillation
    if spec.teacher is not None and distillation is not None:
        partition = teacher_ds_config(spec.deepspeed) if distillation.hold == "zero3" else None
        loaded = load_pretrained(
            spec.teacher.folder, f"--teacher {spec.teacher.name}", spec.dtype, partition, **attention
        )
        _limit_attention(loaded, sequence_parallel, documents)
        teacher = Teacher(loaded, distillation, spec.deepspeed)
        if spec.teacher is not spec.model:
            _check_attention_scope(loaded, f"--teacher {spec.teacher.name}", sequence_parallel, documents)
    return TrainContext(
        spec=spec,
        ranks=ranks,
        engine=engine,
        forge=forge,
        objective=Objective(engine, teacher, spec.config),
        batches=batches,
        device=torch.device(get_accelerator().current_device_name()),
    )


def _limit_attention(model: PreTrainedModel, sequence_parallel: SequenceParallel | None, documents: bool) -> None:
    """Let attention connect the tokens that the run lets see each other, and no others."""
    if sequence_parallel is not None:
        sequence_parallel.divide(model)
    elif documents:
        separate_documents_in_flash(model)


def _check_attention_scope(
    model: PreTrainedModel, who: str, sequence_parallel: SequenceParallel | None, documents: bool
) -> None:
    """Try on a loaded model that attention connects those tokens only. Collective; raises AgreedError."""
    if sequence_parallel is not None:
        sequence_parallel.check_division(model, who)
    if documents:
        rank, size = (0, 1) if sequence_parallel is None else (sequence_parallel.rank, sequence_parallel.size)
        check_documents_apart(model, who, rank, size)
