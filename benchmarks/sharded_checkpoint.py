"""A run with a ZeRO-3 checkpoint in DeepSpeed's own file format, made of random numbers, without training.

Shapes come from a model's config; at most one rank's partition is in memory. Names, types, dtypes and sizes are
those of a finished 2:4 run in bf16 with AdamW, which a test holds against a run that DeepSpeed saved.
"""

from __future__ import annotations

import base64
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed import __version__ as deepspeed_version
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

import sparseforge_ds as sf
from sparseforge_ds.checkpoint.zero_partitions import KEPT
from sparseforge_ds.config.run_state import STATE_VERSION
from sparseforge_ds.mask.kernels.bits import pack
from sparseforge_ds.mask.kernels.groups import top_n
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.saved_state import VERSIONS

STEPS = 100
_STATES = ("exp_avg", "exp_avg_sq", "master")


def write_run(folder: Path, model_config: PretrainedConfig, ranks: int, seed: int = 0) -> Path:
    """Write `folder` with a model config and one checkpoint.

    Args:
        folder: the run folder, which must not exist.
        model_config: shapes of the model.
        ranks: world size; every file holds 1/ranks of every weight.
        seed: seed of the random numbers.

    Returns:
        The checkpoint's folder, `folder/checkpoints/step_000100`.
    """
    checkpoint = folder / "checkpoints" / f"step_{STEPS:06d}"
    checkpoint.mkdir(parents=True)
    model_config.save_pretrained(folder / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16, trust_remote_code=False)
    config = sf.SparseForgeConfig.from_dict({"max_steps": STEPS, "distillation": None, "method": {"update_every": 5}})
    param_groups = sf.param_groups(model, config, weight_decay=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shapes = [OrderedDict((names[id(p)], p.shape) for p in group["params"]) for group in param_groups]
    weights = prunable_weights(model, config)
    sums = numpy.ones(sum(w.matrices * sum(w.matrix) for w in weights), "<f4")
    state = {
        "version": STATE_VERSION,
        "config": config.to_dict(),
        "weights": [{"name": w.name, "shape": list(w.shape), "input_axis": w.input_axis} for w in weights],
        "param_groups": [list(stored) for stored in shapes],
        "step": STEPS,
        "refreshes": 1,
        "without_gradient": False,
        "unseen": [],
        "curvature_sums": base64.b64encode(sums.tobytes()).decode("ascii"),
        "versions": VERSIONS,
        "started": True,
    }
    (folder / "sparseforge.json").write_text(json.dumps({"config": config.to_dict(), "coverage": {}}))
    deepspeed = _deepspeed_config(ranks)
    for rank in range(ranks):
        torch.save(
            _model_file(model, shapes, deepspeed, rank, ranks, state),
            checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
        torch.save(
            _optimizer_file(param_groups, shapes, deepspeed, rank, ranks, seed),
            checkpoint / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return checkpoint


def _deepspeed_config(ranks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "bf16": {"enabled": True},
    }


def _model_file(
    model: nn.Module,
    shapes: list[OrderedDict[str, torch.Size]],
    deepspeed: dict[str, Any],
    rank: int,
    ranks: int,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Names without data, as ZeRO-3 saves them, and the client state."""
    tied = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in model.state_dict()),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict(),
        "shared_params": tied if rank == 0 else {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": STEPS,
        "global_samples": STEPS * ranks,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": deepspeed,
        "ds_version": deepspeed_version,
        "sparseforge": state,
    }


def _optimizer_file(
    param_groups: list[dict[str, Any]],
    shapes: list[OrderedDict[str, torch.Size]],
    deepspeed: dict[str, Any],
    rank: int,
    ranks: int,
    seed: int,
) -> dict[str, Any]:
    """Return a rank's optimizer file with its partition of every group; pruned elements are 0."""
    masters = []
    states = {}
    settings = []
    for number, (group, stored) in enumerate(zip(param_groups, shapes, strict=True)):
        prunable = group.get("sparseforge") == "prunable"
        sizes = {name: math.ceil(shape.numel() / ranks) for name, shape in stored.items()}
        flats = {key: torch.empty(sum(sizes.values())) for key in _STATES}
        offset = 0
        for index, (name, size) in enumerate(sizes.items()):
            values = _values(stored[name].numel(), prunable, hash((seed, number, index)))
            for key, flat in flats.items():
                chunk = values[key][rank * size : (rank + 1) * size]
                flat[offset : offset + chunk.numel()] = chunk
                flat[offset + chunk.numel() : offset + size] = 0.0
            offset += size
        masters.append(flats.pop("master"))
        states[number] = {"step": torch.tensor(float(STEPS)), **flats}
        if prunable:
            states[number][KEPT] = pack(masters[-1] != 0)
        settings.append({**group, **_ADAM, "params": [number]})
    return {
        "optimizer_state_dict": {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(1.0),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": states, "param_groups": settings},
            "fp32_flat_groups": masters,
        },
        "ds_config": deepspeed,
        "ds_version": deepspeed_version,
    }


_ADAM = {
    "lr": 1e-4,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def _values(numel: int, prunable: bool, seed: int) -> dict[str, Tensor]:
    """Return random states of AdamW and the forge for a weight, of plausible size."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(numel, generator=generator) * 0.02
    values = {"master": dense, "exp_avg": dense.flip(0) * 1e-3, "exp_avg_sq": dense.roll(1).square() * 1e-3}
    if prunable:
        pruned = ~top_n(dense.view(-1, 4).abs(), 2).view(-1)
        values = {key: value.masked_fill(pruned, 0.0) for key, value in values.items()}
    return values
