"""From the resolved settings to a DeepSpeed engine with a forge on it, a teacher and a stream of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import set_seed

import sparseforge_ds as sf
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.permutation.apply import permute_model
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.objective import Objective
from sparseforge_ds.train.permuting import settle_permutation
from sparseforge_ds.train.pretrained import load_model
from sparseforge_ds.train.sequence_parallel import SequenceParallel
from sparseforge_ds.train.spec import RunSpec
from sparseforge_ds.train.teacher import Teacher, teacher_ds_config


@dataclass
class TrainContext:
    """What the loop works with."""

    spec: RunSpec
    ranks: Ranks
    engine: Any
    forge: sf.SparseForge
    objective: Objective
    batches: Batches
    device: torch.device


def build(spec: RunSpec, ranks: Ranks, batches: Batches) -> TrainContext:
    """Load the models and start DeepSpeed and the forge.

    Raises:
        ValueError: weights are missing, or the forge cannot work with this DeepSpeed configuration.
    """
    permutation = settle_permutation(spec, ranks, batches)
    set_seed((spec.arguments.seed + ranks.rank) % 2**32)  # ranks differ, so that dropout does
    partition = spec.deepspeed if spec.stage == 3 else None
    attention = {"attn_implementation": spec.arguments.attn_implementation}
    model = load_model(spec.model.folder, f"--model {spec.model.name}", spec.dtype, partition, **attention)
    if permutation is not None:
        permute_model(model, permutation)
    if spec.arguments.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = sf.prepare(model, spec.config)
    model.train()
    sequence = SequenceParallel(spec.sequence_parallel) if spec.sequence_parallel > 1 else None
    if sequence is not None:
        sequence.divide(model)
    weight_decay = spec.deepspeed["optimizer"]["params"].get("weight_decay", 0.0)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=sf.param_groups(model, spec.config, weight_decay=weight_decay),
        config=spec.deepspeed,
    )
    if sequence is not None:
        sequence.prove(model, f"--model {spec.model.name}")
    forge = sf.SparseForge(engine, spec.config)
    teacher, distillation = None, spec.config.distillation
    if spec.teacher is not None and distillation is not None:
        partition = teacher_ds_config(spec.deepspeed) if distillation.hold == "zero3" else None
        loaded = load_model(spec.teacher.folder, f"--teacher {spec.teacher.name}", spec.dtype, partition, **attention)
        if permutation is not None and distillation.hidden is not None:  # their states are compared channel by channel
            permute_model(loaded, permutation)
        if sequence is not None:
            sequence.divide(loaded)
        teacher = Teacher(loaded, distillation, spec.deepspeed)
        if sequence is not None and spec.teacher is not spec.model:
            sequence.prove(loaded, f"--teacher {spec.teacher.name}")
    return TrainContext(
        spec=spec,
        ranks=ranks,
        engine=engine,
        forge=forge,
        objective=Objective(engine, teacher, spec.config),
        batches=batches,
        device=torch.device(get_accelerator().current_device_name()),
    )
