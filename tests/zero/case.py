"""One training run of the forge on a real engine, described by plain values, and what a test wants to know of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import FalconConfig, Llama4TextConfig, Qwen3MoeConfig

import sparseforge_ds as sf
from sparseforge_ds.config import METHODS
from sparseforge_ds.config.block import method_name
from tests import tiny_models

Key = TypeVar("Key")
GLOBAL_BATCH = 12
"""Sequences of a micro-batch over all ranks: the same on 1, 2, 3 and 4 of them."""
LENGTH = 6

_SMALL = {"vocab_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, Callable[[], Any]] = {
    # 20 x 20, 10 x 20 and 28 x 20: three ranks cut groups of four, ZeRO-1/2 on two ranks as well.
    "llama": lambda: tiny_models.tiny_llama(hidden_size=20, intermediate_size=28, **_SMALL),
    # 27 x 20: two ranks of ZeRO-3 cut a group; down_proj has 27 inputs and must stay dense.
    "llama_odd": lambda: tiny_models.tiny_llama(hidden_size=20, intermediate_size=27, **_SMALL),
    "llama_deep": lambda: tiny_models.tiny_llama(
        hidden_size=20, intermediate_size=27, **_SMALL | {"num_hidden_layers": 2}
    ),
    # 24 = 3 * 8.
    "llama_24": lambda: tiny_models.tiny_llama(hidden_size=24, intermediate_size=40, **_SMALL),
    # Tiles of 16 x 16 in 32 x 32, 16 x 32, 48 x 32.
    "llama_tiles": lambda: tiny_models.tiny_llama(hidden_size=32, intermediate_size=48, **_SMALL),
    "qwen3_moe": lambda: tiny_models.tiny_mixture(Qwen3MoeConfig, vocab_size=40),
    # Of 24 experts, some have no token in the first steps.
    "qwen3_moe_idle": lambda: tiny_models.tiny_mixture(
        Qwen3MoeConfig, vocab_size=40, num_experts=24, num_experts_per_tok=1, moe_intermediate_size=8
    ),
    # Conv1D (in, out): 20 x 60, 20 x 20, 20 x 80, 80 x 20.
    "gpt2": lambda: tiny_models.tiny_gpt2(n_embd=20, n_layer=1, n_head=2, vocab_size=40, n_positions=16),
    # Families which change outputs of linear layers in place.
    "falcon": lambda: tiny_models.tiny_dense(FalconConfig, num_hidden_layers=1),
    "falcon_new": lambda: tiny_models.tiny_dense(
        FalconConfig, num_hidden_layers=1, new_decoder_architecture=True, num_kv_heads=2
    ),
    "llama4": lambda: tiny_models.tiny_mixture(Llama4TextConfig),
}

SCHEDULE = {
    "update_every": 2,
    "blend": [0.0, 0.4],
    "mid_penalty_ramp": [0.0, 0.4],
    "hardening": [0.3, 0.7],
    "mask_rate": 0.4,
}
"""Ten steps: updates at 2, 4 and 6, hardening from 3, frozen from 7."""
SHORT = {"update_every": 1, "blend": [0.0, 0.2], "mid_penalty_ramp": [0.0, 0.2], "hardening": [0.2, 0.4]}
"""The same phases in 5 steps, over `SCHEDULE`: updates at 1, 2 and 3, hardening from 2, frozen from 4."""


@dataclass(frozen=True)
class Case:
    """A run. Everything here is pickled to the ranks."""

    stage: int = 0
    dtype: str = "fp32"
    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    gas: int = 1
    clip: float = 0.0
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    client: bool = False
    lr: float = 3e-3
    eps: float = 1e-8
    weight_decay: float = 0.1
    steps: int = 8

    @cached_property
    def sparseforge(self) -> sf.SparseForgeConfig:
        """Return the `sparseforge` block, over short defaults."""
        block = {"max_steps": 10, "distillation": None, **self.config}
        if method_name(block) == "sparseforge":
            block["method"] = {**SCHEDULE, **block.get("method", {})}
        # Masks that stay as a start has left them measure no curvature.
        hardening = block["method"].get("hardening") if isinstance(block.get("method"), dict) else None
        stays = method_name(block) == "naive_retrain" or hardening in ([0, 0], [0.0, 0.0])
        if "curvature" in METHODS[method_name(block)].reads and (block.get("start") is None or not stays):
            block["curvature"] = {"first_probes": 2, "source": "probe", **self.config.get("curvature", {})}
        return sf.SparseForgeConfig.from_dict(block)

    def deepspeed(self) -> dict[str, Any]:
        """Return the DeepSpeed JSON."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
            "gradient_accumulation_steps": self.gas,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, **self.zero},
            **self.more,
        }
        if self.client:
            config["zero_allow_untested_optimizer"] = True
            config["zero_force_ds_cpu_optimizer"] = False
        else:
            config.setdefault(
                "optimizer",
                {"type": "AdamW", "params": {"lr": self.lr, "eps": self.eps, "torch_adam": True}},
            )
        if self.dtype != "fp32":
            unscaled = {"loss_scale": 1} if (self.dtype, self.stage) == ("fp16", 0) else {}  # refused with a scale
            config[self.dtype] = {"enabled": True, **unscaled, **config.get(self.dtype, {})}
        return config


def short(case: Case) -> Case:
    """Return the case with the whole life of a mask in 5 steps, for tests to which their number is nothing."""
    return replace(case, steps=5, config={**case.config, "method": SHORT})


def batch_at(number: int) -> dict[str, Tensor]:
    """Return the global micro-batch `number`: (GLOBAL_BATCH, LENGTH) token ids and equal labels."""
    generator = torch.Generator().manual_seed(1000 + number)
    ids = torch.randint(3, 40, (GLOBAL_BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def my_part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's rows."""
    size = GLOBAL_BATCH // dist.get_world_size()
    rank = dist.get_rank()
    device = get_accelerator().current_device_name()
    return {key: value[rank * size : (rank + 1) * size].to(device) for key, value in batch.items()}


def build_engine(case: Case, model: Any = None, param_groups: Any = None) -> Any:
    """Build a DeepSpeed engine over the case's model, which is the same on every rank."""
    import deepspeed

    model = sf.prepare(MODELS[case.model]() if model is None else model, case.sparseforge)
    if param_groups is None:
        param_groups = sf.param_groups(model, case.sparseforge, weight_decay=case.weight_decay)
    optimizer = torch.optim.AdamW(param_groups, lr=case.lr, eps=case.eps) if case.client else None
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups, optimizer=optimizer, config=case.deepspeed()
    )
    return engine


def build(case: Case, model: Any = None) -> tuple[Any, sf.SparseForge]:
    """Engine and forge."""
    engine = build_engine(case, model)
    return engine, sf.SparseForge(engine, case.sparseforge)


def train_step(engine: Any, case: Case, step: int) -> float:
    """Train on all micro-batches of optimizer step `step` (from 0), and return the mean loss over ranks."""
    losses = []
    for micro in range(case.gas):
        loss = engine(**my_part(batch_at(step * case.gas + micro))).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def probe_of(engine: Any, case: Case, step: int) -> Callable[[], Tensor]:
    """Return the closure for `forge.step` after optimizer step `step`."""
    batch = my_part(batch_at(step * case.gas))
    return lambda: engine(**batch).loss


@dataclass(frozen=True)
class StepText:
    """Text that probes after optimizer step `step` read: its micro-batches."""

    engine: Any
    case: Case
    step: int

    def passes(self, batch: int) -> list[Callable[[], Tensor]]:
        """Return the same passes for every probe."""
        numbers = range(self.step * self.case.gas, (self.step + 1) * self.case.gas)
        return [partial(self._loss, number) for number in numbers]

    def _loss(self, number: int) -> Tensor:
        loss: Tensor = self.engine(**my_part(batch_at(number))).loss
        return loss


def moved_by_pruning(case: Case, model: Any = None) -> float:
    """Return the square of what one-shot pruning moves the logits by, summed over the ranks' means. Collective."""
    engine, forge = build(case, model)
    batch = my_part(batch_at(0))
    dense = engine(**batch).logits.detach()
    forge.start(None)
    forge.finish()
    moved = (engine(**batch).logits.detach() - dense).square().mean()
    dist.all_reduce(moved)
    return moved.item()


def gathered(forge: sf.SparseForge, key: str) -> dict[str, Tensor]:
    """Return one of `states`."""
    return states(forge, key)[key]


def states(forge: sf.SparseForge, *keys: str) -> dict[str, dict[str, Tensor]]:
    """`dense` (what trains), `mask`, `curvature` or other states of every prunable weight, whole. Collective.

    Where row and column sums are kept, the curvature is the product that scores take.
    """
    curvatures: dict[str, Tensor] = {}
    if "curvature" in keys:
        for chunk, values in forge.curvature.chunks():
            if values is None:
                continue  # released
            numel = forge.sharded.prunable[chunk.name].numel
            complete = curvatures.setdefault(chunk.name, torch.zeros(numel, device=values.device))
            complete[chunk.start : chunk.stop] = values
    read = {"dense": forge.sharded.state.dense, "mask": forge.sharded.state.mask}
    parts = {}
    for key, (name, shard) in itertools.product(keys, forge.sharded.shards.items()):
        full = parts[key, name] = torch.zeros(forge.sharded.prunable[name].numel, device=forge.sharded.layout.device)
        if key != "curvature":
            stored = read[key](shard) if key in read else forge.sharded.state.state_view(shard, key)
            full[shard.start : shard.stop] = stored.detach().float().to(full.device)
        elif name in curvatures:
            full += curvatures[name].to(full.device)
    complete = added_up(parts, forge.sharded.layout.replicated)
    return {key: {name: complete[key, name] for name in forge.sharded.shards} for key in keys}


def added_up(parts: dict[Key, Tensor], replicated: bool) -> dict[Key, Tensor]:
    """Tensors of which every rank holds its part among zeros, whole and on the CPU.

    One collective sums all of them: a small one takes a millisecond of every rank, whatever its size.
    """
    full = torch.cat([part.flatten() for part in parts.values()])
    if not replicated:
        dist.all_reduce(full)
    sizes = [part.numel() for part in parts.values()]
    return {name: value.view_as(parts[name]) for name, value in zip(parts, full.cpu().split(sizes), strict=True)}


def published(engine: Any) -> dict[str, Tensor]:
    """Return the model's weights as the next forward sees them, in full. Collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def republish(forge: sf.SparseForge, hard: bool = False) -> None:
    """Show the network the present masks, or with `hard` what they are if hardened now. Collective."""
    forge.method.write_masters(hard)
    forge.sharded.layout.push()


def run(case: Case) -> dict[str, Any]:
    """Train `case.steps` steps; losses, masks and curvature after every update, and the final state. Collective."""
    engine, forge = build(case)
    config = case.sparseforge
    forge.start(StepText(engine, case, 0))
    record: dict[str, Any] = {"losses": [], "updates": [], "metrics": []}
    for step in range(case.steps):
        record["losses"].append(train_step(engine, case, step))
        if forge.step(StepText(engine, case, step)):
            keys = ["mask", "dense"]
            if config.keeps_sums or (config.keeps_elements and not forge.sharded.state.released):
                keys.append("curvature")
            record["updates"].append({"step": step + 1, **states(forge, *keys)})
            record["metrics"].append(dict(forge.metrics))
    record["cut"] = forge.sharded.halo.any_cut
    record |= states(forge, "mask", "dense")
    record["published"] = published(engine)
    return record


def run_all(cases: list[Case]) -> list[dict[str, Any]]:
    """`run` for each case; only rank 0 returns the tensors."""
    records = [run(case) for case in cases]
    return records if dist.get_rank() == 0 else []
