"""From a plan to a DeepSpeed engine with a forge on it, a teacher and a stream of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import sparseforge_ds as sf
from sparseforge_ds.model.distill import Teacher, teacher_ds_config
from sparseforge_ds.train.data import Batches, Layout
from sparseforge_ds.train.packing import Packed, pack
from sparseforge_ds.train.plan import Plan
from sparseforge_ds.train.pretrained import load_model
from sparseforge_ds.train.random_state import seed_everything
from sparseforge_ds.train.ranks import Ranks


@dataclass
class Workshop:
    """What the loop works with."""

    plan: Plan
    ranks: Ranks
    engine: Any
    forge: sf.SparseForge
    teacher: Teacher | None
    batches: Batches
    device: torch.device


def pack_text(plan: Plan, ranks: Ranks) -> Packed:
    """Tokenise the text on rank 0, or find it done, and check it on every rank.

    Raises:
        AgreedError: the text is unreadable or does not suit the model, or the disk is full.
    """
    enough = (plan.config.max_steps + 1) * plan.tokens_per_step
    packed = ranks.on_first(lambda: pack(plan.documents, plan.tokenizer, plan.folder / "data", enough))

    def check() -> None:
        vocabulary = plan.model.config.get_text_config().vocab_size
        if packed.largest_id >= vocabulary:
            raise ValueError(
                f"--model {plan.model.name}: its tokenizer gives token {packed.largest_id}, but the model knows "
                f"{vocabulary}; tokenizer and weights do not belong together"
            )
        make_batches(plan, ranks, packed)

    ranks.everywhere(check)
    return packed


def make_batches(plan: Plan, ranks: Ranks, packed: Packed) -> Batches:
    """The stream of this rank's micro-batches, at its beginning.

    Raises:
        ValueError: the text is shorter than one global batch.
    """
    layout = Layout(
        micro_batch=plan.deepspeed["train_micro_batch_size_per_gpu"],
        accumulation=plan.deepspeed["gradient_accumulation_steps"],
        world_size=ranks.world_size,
        rank=ranks.rank,
    )
    return Batches(packed.open(), packed.key, plan.arguments.seq_length, layout, plan.arguments.seed)


def build(plan: Plan, ranks: Ranks, batches: Batches) -> Workshop:
    """Load the models and start DeepSpeed and the forge.

    Raises:
        ValueError: weights are missing, or the forge cannot work with this DeepSpeed configuration.
    """
    seed_everything(plan.arguments.seed + ranks.rank)  # ranks differ, so that dropout does
    loaded = load_model(plan.model, plan.dtype, plan.deepspeed if plan.stage == 3 else None)
    ranks.everywhere(loaded.check)
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
    return Workshop(
        plan=plan,
        ranks=ranks,
        engine=engine,
        forge=forge,
        teacher=_teacher(plan, ranks),
        batches=batches,
        device=torch.device(get_accelerator().current_device_name()),
    )


def _teacher(plan: Plan, ranks: Ranks) -> Teacher | None:
    if plan.teacher is None or plan.config.distillation is None:
        return None
    partitioned = plan.config.distillation.hold == "zero3"
    loaded = load_model(plan.teacher, plan.dtype, teacher_ds_config(plan.deepspeed) if partitioned else None)
    ranks.everywhere(loaded.check)
    return Teacher(loaded.model, plan.config.distillation, plan.deepspeed)
