"""The two runs that are compared: one random Llama on plain DeepSpeed, and the same with a forge."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import sparseforge_ds as sf
from benchmarks.phases import Phases
from sparseforge_ds.config import shipped
from sparseforge_ds.model.distill import distillation_loss
from sparseforge_ds.model.teacher import Teacher
from sparseforge_ds.zero.extra_passes import Closure

WEIGHT_DECAY = 0.01
PHASE_HARDENING = {"heating": (1.0, 1.0), "hardening": (0.0, 1.0), "frozen": (0.0, 0.0)}
"""Ramp of hardening, as fractions of the run, that keeps all of it in one phase."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class StepText:
    """Text of probes with passes of their own: the micro-batches of the step."""

    engine: Any
    batches: list[Batch]

    def passes(self, batch: int) -> list[Closure]:
        """Return the same passes for every probe."""
        return [partial(self._loss, data) for data in self.batches]

    def _loss(self, data: Batch) -> Tensor:
        loss: Tensor = self.engine(**data).loss
        return loss


@dataclass
class Variant:
    """An engine with all that its training step needs."""

    engine: Any
    forge: sf.SparseForge | None
    teacher: Teacher | None
    config: sf.SparseForgeConfig
    phases: Phases

    def step(self, batches: list[Batch]) -> None:
        """Do one optimizer step on as many micro-batches as are accumulated."""
        for batch in batches:
            self.engine.backward(self._loss(batch))
            self.engine.step()
            if self.forge is not None:
                self.forge.step(StepText(self.engine, batches) if self.forge.needs_probe else None)

    def _loss(self, batch: Batch) -> Tensor:
        if self.teacher is None:
            return self.engine(**batch).loss
        part = self.config.distillation
        assert part is not None
        with self.phases.measure("teacher"):
            teacher_logits = self.teacher(batch["input_ids"])
        logits = self.engine(input_ids=batch["input_ids"]).logits
        with self.phases.measure("distillation"):
            loss = distillation_loss(logits, teacher_logits, batch["labels"], part).total
        # Its backward lies between the gradient of the loss and the gradient of the logits.
        loss.register_hook(lambda _: self.phases.begin("distillation"))
        logits.register_hook(lambda _: self.phases.end("distillation"))
        return loss


def forge_config(arguments: argparse.Namespace, steps: int) -> sf.SparseForgeConfig:
    """Return a `sparseforge` block with all `steps` steps in one phase and the T_update of the arguments."""
    return sf.SparseForgeConfig.from_dict(
        {
            "max_steps": steps,
            "pattern": arguments.pattern,
            "importance": arguments.importance,
            "curvature": {"source": arguments.source},
            "method": {"update_every": arguments.update_every, "hardening": PHASE_HARDENING[arguments.phase]},
            "distillation": {} if arguments.teacher else None,
        }
    )


def deepspeed_config(arguments: argparse.Namespace, world_size: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of both variants: that of `ds_configs/`, every "auto" resolved."""
    zero: dict[str, Any] = {"stage": arguments.stage}
    if arguments.stage:
        zero = json.loads((shipped.FOLDER / f"zero{arguments.stage}.json").read_text())["zero_optimization"]
    fused = {"fused": True} if get_accelerator().device_name() == "cuda" else {}  # as "auto" is in ds_configs/
    if arguments.stage == 3:  # as transformers resolves "auto"
        zero["stage3_param_persistence_threshold"] = 10 * arguments.hidden
    return {
        "train_batch_size": arguments.micro_batch * arguments.accumulation * world_size,
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": arguments.dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": WEIGHT_DECAY, "torch_adam": True, **fused},
        },
        "zero_optimization": zero,
    }


def random_llama(arguments: argparse.Namespace, seed: int) -> PreTrainedModel:
    """Build a Llama of the size of the arguments, with grouped-query attention."""
    heads = max(1, arguments.hidden // 64)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=arguments.vocabulary,
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 11 // 4 // 16 * 16,
            num_hidden_layers=arguments.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
            max_position_embeddings=arguments.seq,
            pad_token_id=0,
        )
    )
    return model.to(torch.bfloat16) if arguments.dtype == "bf16" else model


def build(arguments: argparse.Namespace, config: sf.SparseForgeConfig, phases: Phases, with_forge: bool) -> Variant:
    """Start one variant's engine, its forge and its teacher. Collective."""
    model = random_llama(arguments, arguments.seed)
    if with_forge:
        model = sf.prepare(model, config)
    model.train()
    ds_config = deepspeed_config(arguments, deepspeed.comm.get_world_size())
    parameters = sf.param_groups(model, config, weight_decay=WEIGHT_DECAY) if with_forge else model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=ds_config)
    if not with_forge:
        return Variant(engine, None, None, config, phases)
    forge = sf.SparseForge(engine, config)
    phases.wrap_forge(forge)
    teacher = None
    if config.distillation is not None:
        teacher = Teacher(random_llama(arguments, arguments.seed + 1), config.distillation, ds_config)
    return Variant(engine, forge, teacher, config, phases)


def memory(base: int | None = None) -> int | None:
    """Bytes allocated on the accelerator now or, with a `base` from before, the peak since then above it.

    None on a CPU: its resident memory is what the allocator keeps, which the run that is built first pays for.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return None
    if base is None:
        accelerator.reset_peak_memory_stats()
        return accelerator.memory_allocated()
    return accelerator.max_memory_allocated() - base
