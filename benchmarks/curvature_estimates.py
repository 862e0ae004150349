"""The estimates that `benchmarks/curvature.py` compares: the product's own on a one-rank engine, and exact ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparseforge_ds as sf
from benchmarks.curvature_quality import Diagonal
from sparseforge_ds.curvature.running_curvature import ESTIMATORS, SUMS_ESTIMATORS
from sparseforge_ds.mask.random_numbers import counter_key, rademacher
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.train.launcher import set_default_environment
from sparseforge_ds.zero.extra_passes import batches_of


@dataclass(frozen=True)
class Own:
    """An importance of the product, with its settings."""

    name: str
    importance: str
    curvature: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


@dataclass(frozen=True)
class Exact:
    """v (H v) by double backward; of a probe only some of the signs, the others 0."""

    name: str
    restricted_to: str = "all"
    """all; member: of every group, in turn; kind, block or layer: of layers, in turn."""


Estimate = Own | Exact

_BY_WEIGHTS = {"per_token": False}
ESTIMATES: tuple[Estimate, ...] = (
    *(Own(f"outputs, radius {radius}", "hutchinson", {"radius": radius}) for radius in (0.03, 0.1, 0.3)),
    *(Own(f"outputs, radius {r}, bf16", "hutchinson", {"radius": r}, "bfloat16") for r in (0.03, 0.1, 0.3)),
    *(Own(f"weights, radius {r}", "hutchinson", {**_BY_WEIGHTS, "radius": r}) for r in (1e-4, 1e-3, 1e-2, 1e-1)),
    *(
        Own(f"weights, radius {r}, bf16", "hutchinson", {**_BY_WEIGHTS, "radius": r}, "bfloat16")
        for r in (3e-2, 1e-1, 3e-1)
    ),
    Exact("weights, exact"),
    Exact("weights, exact, one member", "member"),
    Exact("weights, exact, one kind of layer", "kind"),
    Exact("weights, exact, one block", "block"),
    Exact("weights, exact, one layer", "layer"),
    Own("fisher, per token", "fisher"),
    Own("fisher, per token, bf16", "fisher", {}, "bfloat16"),
    Own("wanda", "wanda"),
)


def additive(row_R: Tensor, column_C: Tensor) -> Tensor:
    """(R * C,) fp32: the elements of r / C + c / R - total / RC, a matrix with these sums, linear in them."""
    full_RC = ((row_R - row_R.mean()) / len(column_C))[:, None] + column_C / len(row_R)
    return full_RC.flatten().float()


class OneRank:
    """The product's estimators on an engine of this process alone; its learning rate is 0."""

    def __init__(self, model: Any, dtype: str, batch: int) -> None:
        never = {"update_every": 10**5}
        self.config = sf.SparseForgeConfig.from_dict({"distillation": None, "max_steps": 10**6, "method": never})
        config = {
            "train_batch_size": batch,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": dtype == "bfloat16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        }
        model = sf.prepare(model, self.config)
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=sf.param_groups(model, self.config, weight_decay=0.0), config=config
        )
        self.forge = sf.SparseForge(self.engine, self.config)

    def samples(self, estimate: Own, batches: list[Tensor]) -> Iterator[tuple[Diagonal, float]]:
        """Yield samples of one refresh after the other, each on the next batch, with their seconds."""
        curvature: dict[str, Any] = {"first_probes": 1, **estimate.curvature}
        if estimate.importance == "fisher":
            curvature["factored"] = False  # its elements are judged; the judge forms their sums
        config = sf.SparseForgeConfig.from_dict(
            {**self.config.to_dict(), "importance": estimate.importance, "curvature": curvature}
        )
        shards = self.forge.curvature.context
        sums = SUMS_ESTIMATORS[config.importance](shards, config) if config.keeps_sums else None
        elements = None if config.keeps_sums else ESTIMATORS[config.importance](shards, config)
        step = 0
        while True:
            batch_BS = batches[step % len(batches)]
            began = seconds()
            sample = shards.zeros()
            probe = batches_of(partial(self._loss, batch_BS))
            if elements is not None:
                applied = elements.refresh(probe, step, 1, sample, self.forge.method.write_masters)
            else:
                assert sums is not None
                applied = sums.refresh(probe, step, 1)
                result, counts = sums.finish()
                for name in sample:
                    (matrix,) = result.matrices.rows[name]
                    sample[name] = additive(*(first / counts[matrix] for first in result.matrix_sums(matrix)))
            spent = seconds() - began
            assert applied, "neither fp32 nor bf16 overflows"
            yield {name: value.cpu() for name, value in sample.items()}, spent
            step += 1

    def step_seconds(self, batch_BS: Tensor, repeats: int) -> float:
        """Median time of a training step on one batch."""
        times = []
        for _ in range(repeats + 1):
            began = seconds()
            self.engine.backward(self._loss(batch_BS))
            self.engine.step()
            self.forge.step()
            times.append(seconds() - began)
        return sorted(times[1:])[repeats // 2]

    def _loss(self, batch_BS: Tensor) -> Tensor:
        batch_BS = batch_BS.to(self.engine.device)
        return self.engine(input_ids=batch_BS, labels=batch_BS).loss


def be_one_rank() -> None:
    """Start a process group of this process alone, unless a launcher has started one."""
    set_default_environment()
    deepspeed.init_distributed()


def exact_samples(
    model: Any,
    weights: list[PrunableWeight],
    batches: list[Tensor],
    restricted_to: str = "all",
    seed: int = 0,
    first: int = 0,
) -> Iterator[tuple[Diagonal, float]]:
    """Yield exact samples from probe number `first` on, each on the next batch, with their seconds."""
    parameters = [model.get_parameter(weight.name) for weight in weights]
    parts, count = _parts(weights, restricted_to)
    probe = first
    while True:
        batch_BS = batches[probe % len(batches)].to(parameters[0].device)
        began = seconds()
        vectors = []
        for weight, parameter, part in zip(weights, parameters, parts, strict=True):
            sign = rademacher(counter_key(seed, 0, probe, weight.name), 0, weight.numel, parameter.device)
            if restricted_to == "member":
                index = torch.arange(weight.numel, device=parameter.device)
                position = index if weight.input_axis % 2 else index // weight.shape[1]
                sign *= position % 4 == probe % count
            vectors.append(sign.view_as(parameter) * (restricted_to == "member" or part == probe % count))
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(input_ids=batch_BS, labels=batch_BS).loss
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            products = torch.autograd.grad(gradients, parameters, grad_outputs=vectors)
        sample = {
            weight.name: (vector * product).detach().flatten().cpu() * count
            for weight, vector, product in zip(weights, vectors, products, strict=True)
        }
        yield sample, seconds() - began
        probe += 1


def rounds(weights: list[PrunableWeight], restricted_to: str) -> int:
    """Probes after which every weight has had a sign as often as every other."""
    return _parts(weights, restricted_to)[1]


def seconds() -> float:
    """Return the time: on a CPU that of this process's work, on a GPU that of the wall clock after its work."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return time.process_time()
    accelerator.synchronize()
    return time.perf_counter()


def _parts(weights: list[PrunableWeight], restricted_to: str) -> tuple[list[int], int]:
    """Number of the part that each weight is of, and how many parts are probed in turn."""
    if restricted_to in ("all", "member"):
        return [0] * len(weights), 4 if restricted_to == "member" else 1
    keys = []
    for weight in weights:
        # "model.layers.3.mlp.up_proj" -> block "model.layers.3", kind "mlp.up_proj"
        words = weight.name.removesuffix(".weight").split(".")
        number = next(i for i, word in enumerate(words) if word.isdigit())
        keys.append(
            {"block": ".".join(words[: number + 1]), "kind": ".".join(words[number + 1 :]), "layer": weight.name}[
                restricted_to
            ]
        )
    order = list(dict.fromkeys(keys))
    return [order.index(key) for key in keys], len(order)
