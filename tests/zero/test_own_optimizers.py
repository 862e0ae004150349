"""DeepSpeed's own optimizers under the hooks: FusedAdam and DeepSpeedCPUAdam. The first launch compiles them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import sparseforge_ds as sf
from tests.distributed import run_distributed
from tests.zero.case import MODELS, Case, build, build_engine, gathered, probe_of, published, train_step

OWN: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
PAIRS: dict[str, tuple[str, Case, Case]] = {
    f"{name} {dtype} at stage {stage}": (
        kind,
        Case(stage=stage, dtype=dtype, zero=zero, more=OWN),
        Case(
            stage=stage,
            dtype=dtype,
            zero=zero,
            lr=3e-3,
            more={"zero_force_ds_cpu_optimizer": False},
        ),
    )
    for name, kind, stage, dtype, zero in (
        ("fused", "FusedAdam", 0, "fp32", {}),
        ("fused", "FusedAdam", 0, "bf16", {}),
        ("fused", "FusedAdam", 1, "fp32", {}),
        ("fused", "FusedAdam", 3, "bf16", {}),
        ("offloaded", "DeepSpeedCPUAdam", 2, "fp32", {"offload_optimizer": {"device": "cpu"}}),
        ("offloaded", "DeepSpeedCPUAdam", 3, "fp32", {"offload_optimizer": {"device": "cpu"}}),
    )
}


def train(case: Case) -> tuple[str, dict[str, Any], dict[str, Any]]:
    engine, forge = build(case)
    for step in range(case.steps):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
    forge.finish()
    return type(engine.basic_optimizer).__name__, gathered(forge, "mask"), published(engine)


def train_all() -> dict[str, Any]:
    return {name: (train(own), train(torch_adam)) for name, (_, own, torch_adam) in PAIRS.items()}


def test_masks_and_weights_are_those_of_torch_adamw() -> None:
    for name, (own, torch_adam) in run_distributed(train_all, 2)[0].items():
        assert own[0] == PAIRS[name][0] and torch_adam[0] == "AdamW"
        for weight, mask in torch_adam[1].items():
            assert set(own[1][weight].unique().tolist()) == {0.0, 1.0}, (name, weight)
            assert (own[1][weight] == mask).float().mean() > (0.99 if "fp32" in name else 0.95), (name, weight)
        for weight, value in torch_adam[2].items():
            close = (own[2][weight] - value).abs() < (1e-4 if "fp32" in name else 2e-2)
            assert close.float().mean() > 0.95, (name, weight, close.float().mean())


WORN = {"name": "cast", "every": 2, "decay": 1.0, "ramp": [0, 0], "frozen": 0.2, "scaling": False}


def of_every_optimizer() -> tuple[dict[str, dict[str, float]], list[str], list[float]]:
    """Return how large the weights are that CAST wears away, by optimizer; why others are refused; decays of groups.

    The decay is that of each param group of README's loop.
    """
    # CAST's decay reaches the weights under both of the Adams.
    largest = {}
    for name, params in (("DeepSpeed's", {}), ("torch's", {"torch_adam": True})):
        more = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, **params}}}
        case = Case(model="llama_24", config={"method": WORN, "importance": "magnitude"}, more=more)
        engine, forge = build(case)
        forge.start()
        for step in range(6):
            train_step(engine, case, step)
            forge.step()
        mask = gathered(forge, "mask")
        dense = gathered(forge, "dense")
        largest[name] = {key: dense[key][mask[key] == 0].abs().max().item() for key in mask}
    # Optimizers under which it would not.
    refused = []
    coupled = {"torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1}
    for kind, method, params in (
        ("Adamax", WORN, {}),
        ("Adafactor", "naive_retrain", {}),
        ("NAdam", WORN, {}),
        ("Adam", "ast", coupled),
        ("AdamW", WORN, {"bias_correction": False}),
    ):
        more = {"optimizer": {"type": kind, "params": {"lr": 3e-3, **params}}}
        case = Case(model="llama_24", config={"method": method, "importance": "magnitude"}, more=more)
        try:
            engine, forge = build(case)
            forge.start()
            train_step(engine, case, 0)
        except ValueError as error:
            refused.append(str(error))
    # The decay of the JSON, in each param group.
    decaying = Case(more={"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.3}}})
    model = sf.prepare(MODELS[decaying.model](), decaying.sparseforge)
    engine = build_engine(decaying, model, sf.param_groups(model, decaying.sparseforge))
    return largest, refused, [group["weight_decay"] for group in engine.basic_optimizer.param_groups]


def test_every_weight_is_worn_away_and_what_no_checkpoint_holds_is_refused() -> None:
    largest, refused, decays = run_distributed(of_every_optimizer, 2)[0]
    for name, weights in largest.items():
        assert len(weights) == 7 and set(weights.values()) == {0.0}, (name, weights)
    assert decays == [0.3, 0.3, 0.0], "the JSON's, but for norms"
    adamax, adafactor, nadam, adam, uncorrected = refused
    assert "works on the moments of Adam, which NAdam does not keep" in nadam
    assert 'method "ast" decays weights as AdamW does, and Adam adds weight_decay 0.1 to gradients; use' in adam
    assert 'method "cast" works on the moments of Adam, which Adamax does not keep' in adamax
    assert 'method "cast" repeats the step of Adam with bias_correction; leave bias_correction out' in uncorrected
    assert "optimizer Adafactor keeps row_var of shape" in adafactor and "which cannot be cut into shards" in adafactor


@pytest.mark.gpu
def test_a_gpu_runs_the_whole_life_of_a_mask() -> None:
    assert run_distributed(on_a_gpu, 1, (0, 1, 2, 3), device="cuda") == [[]]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs, for NCCL between two ranks")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_gpus_end_where_one_does(stage: int) -> None:
    assert run_distributed(on_a_gpu, 2, (stage,), device="cuda") == [[], []]
    first, second = (run_distributed(by_elements, ranks, stage, device="cuda")[0] for ranks in (1, 2))
    assert agreement(first, second) > 0.99


def by_elements(stage: int) -> dict[str, torch.Tensor]:
    """Masks by a curvature of every weight, which whole matrices of each rank are summed to."""
    return train(Case(stage=stage, config={"curvature": {"factored": False}}, more=OWN))[1]


def agreement(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Share of entries that are the same, in the weight where it is lowest."""
    return min((second[name] == mask).float().mean().item() for name, mask in first.items())


def on_a_gpu(stages: tuple[int, ...]) -> list[str]:
    """Train every importance and both patterns in bf16 with FusedAdam: N of M at the end, histograms that add up.

    In one process: what a GPU compiles, in seconds each, is the same at all stages.
    """
    problems = []
    importances = ("fisher", "hutchinson", "wanda", "magnitude")
    for stage, importance, pattern in itertools.product(stages, importances, ("2:4", "1:4")):
        case = Case(stage=stage, dtype="bf16", config={"importance": importance, "pattern": pattern}, more=OWN)
        engine, forge = build(case)
        for step in range(case.steps):
            train_step(engine, case, step)
            forge.step(probe_of(engine, case, step))
        counts = forge.histograms(4)
        for weight in forge.weights:
            subject = f"stage {stage}, {importance} {pattern} {weight.name}"
            mask = gathered(forge, "mask")[weight.name]
            kept = forge.pattern.to_groups(mask, weight.shape, weight.input_axis).sum(1)
            if not torch.all(kept == forge.pattern.kept_count):
                problems.append(f"{subject}: groups of {kept.unique().tolist()}")
            if sum(counts[f"mask/{weight.name}"][0]) != weight.numel:
                problems.append(f"{subject}: histogram")
    return problems
