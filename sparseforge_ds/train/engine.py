"""From a plan to a DeepSpeed engine with a forge on it, a teacher and a stream of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import sparseforge_ds as sf
from sparseforge_ds.data.batches import Batches
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.objective import Objective
from sparseforge_ds.train.plan import Plan
from sparseforge_ds.train.pretrained import load_model
from sparseforge_ds.train.random_state import seed_everything
from sparseforge_ds.train.teacher import Teacher, teacher_ds_config


@dataclass
class TrainContext:
    """What the loop works with."""

    plan: Plan
    ranks: Ranks
    engine: Any
    forge: sf.SparseForge
    objective: Objective
    batches: Batches
    device: torch.device


def build(plan: Plan, ranks: Ranks, batches: Batches) -> TrainContext:
    """Load the models and start DeepSpeed and the forge.

    Raises:
        ValueError: weights are missing, or the forge cannot work with this DeepSpeed configuration.
    """
    seed_everything(plan.arguments.seed + ranks.rank)  # ranks differ, so that dropout does
    loaded = load_model(plan.model, plan.dtype, plan.deepspeed if plan.stage == 3 else None)
    ranks.all_or_raise(loaded.check)
    model = loaded.model
    if plan.arguments.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = sf.prepare(model, plan.config)
    model.train()
    weight_decay = plan.deepspeed["optimizer"]["params"].get("weight_decay", 0.0)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=sf.param_groups(model, plan.config, weight_decay=weight_decay),
        config=plan.deepspeed,
    )
    forge = sf.SparseForge(engine, plan.config)
    return TrainContext(
        plan=plan,
        ranks=ranks,
        engine=engine,
        forge=forge,
        objective=Objective(engine, _teacher(plan, ranks), plan.config),
        batches=batches,
        device=torch.device(get_accelerator().current_device_name()),
    )


def _teacher(plan: Plan, ranks: Ranks) -> Teacher | None:
    if plan.teacher is None or plan.config.distillation is None:
        return None
    partitioned = plan.config.distillation.hold == "zero3"
    loaded = load_model(plan.teacher, plan.dtype, teacher_ds_config(plan.deepspeed) if partitioned else None)
    ranks.all_or_raise(loaded.check)
    return Teacher(loaded.model, plan.config.distillation, plan.deepspeed)
