"""The norm that DeepSpeed clips by, and logs, is that of the weights that are left, once masks are frozen."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparseforge_ds as sf
from sparseforge_ds.zero.deepspeed_layouts import Zero3Layout, Zero12Layout
from sparseforge_ds.zero.gradient_hooks import mask_before_norm
from tests.distributed import run_distributed
from tests.sparse_folders import bits
from tests.zero.case import MODELS, Case, batch_at, build, build_engine, gathered, probe_of, published, train_step
from tests.zero.test_resume import BF16_MASTERS

FIXED = {"method": "naive_retrain"}
LATER = {"low_rank": {"k": 4, "shift": False, "start": 1.0}}
"""W is kept beyond frozen masks until the last step, for branches to start from."""
OFFLOAD = {
    "zero": {"offload_optimizer": {"device": "cpu"}},
    "more": {"zero_force_ds_cpu_optimizer": False},
}
CLIP = 0.05
"""Far below every norm."""
CASES: dict[str, Case] = {
    **{f"{stage}-fp32": Case(stage=stage, clip=CLIP, config=FIXED) for stage in range(4)},
    **{f"{stage}-bf16": Case(stage=stage, clip=CLIP, dtype="bf16", config=FIXED) for stage in range(4)},
    **{f"{stage}-offload": Case(stage=stage, clip=CLIP, config=FIXED, **OFFLOAD) for stage in (1, 2, 3)},
    "1-fp32-sums": Case(
        stage=1, clip=CLIP, dtype="bf16", config=FIXED, more={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "2-bf16-masters": Case(stage=2, clip=CLIP, dtype="bf16", config=FIXED, more=BF16_MASTERS),
    "3-fp16": Case(stage=3, clip=CLIP, dtype="fp16", config=FIXED, more={"fp16": {"loss_scale": 16}}),
    "3-accumulated": Case(stage=3, clip=CLIP, gas=2, config=FIXED),
    "3-mixture": Case(stage=3, clip=CLIP, model="qwen3_moe", config={**FIXED, "importance": "magnitude"}),
    "2-default": Case(stage=2, clip=CLIP),
    "3-default-later": Case(stage=3, clip=CLIP, config=LATER),
    "1-later": Case(stage=1, clip=CLIP, config={**FIXED, **LATER}),
    "2-later-bf16-masters": Case(stage=2, clip=CLIP, dtype="bf16", config={**FIXED, **LATER}, more=BF16_MASTERS),
}


def expected_norm(weights: dict[str, Tensor], masks: dict[str, Tensor] | None, case: Case, step: int) -> float:
    """Compute in one process, in fp32, the norm of the mean gradient of all micro-batches over kept weights."""
    model = MODELS[case.model]()
    model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    for micro in range(case.gas):
        (model(**batch_at(step * case.gas + micro)).loss / case.gas).backward()
    squares = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mask = None if masks is None else masks.get(name)
        kept = parameter.grad if mask is None else parameter.grad * mask.view(parameter.shape)
        squares += kept.double().square().sum().item()
    return squares**0.5


def norms(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Return for each case's last step the logged norm, that of the stepped gradients, and the expected one."""
    results = {}
    for name, case in cases.items():
        engine, forge = build(case)
        forge.start(probe_of(engine, case, 0))
        of_step: list[float] = []

        def see(optimizer: Any, args: Any, kwargs: Any, squares: list[float] = of_step) -> None:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            squares.extend(grad.double().square().sum().item() for grad in grads)

        engine.basic_optimizer.register_step_pre_hook(see)
        last = 8 if "default" in name else 2
        for step in range(last):
            train_step(engine, case, step)
            forge.step(probe_of(engine, case, step))
        assert forge.sharded.state.released == ("later" not in name)
        weights, masks, dense = published(engine), gathered(forge, "mask"), gathered(forge, "dense")
        of_step.clear()
        train_step(engine, case, last)
        squares = torch.tensor(sum(of_step), dtype=torch.float64)
        if case.stage or case.more.get("data_types"):
            dist.all_reduce(squares)
        results[name] = {
            "logged": engine.get_global_grad_norm(),
            "stepped": squares.item() ** 0.5,
            "kept": expected_norm(weights, masks, case, last),
            "all": expected_norm(weights, None, case, last),
        }
        forge.step(probe_of(engine, case, last))
        moved = gathered(forge, "dense")
        results[name]["pruned moved"] = [n for n in dense if ((moved[n] != dense[n]) & (masks[n] == 0)).any()]
    return results


# 20 x 27 and 27 x 20 begin at elements of a partition that are no multiple of 8, and cut groups.
ODD = {**FIXED, "exclude": ["*down_proj*"]}
BOTH_WAYS: dict[str, Case] = {
    "0": Case(stage=0, clip=CLIP, dtype="bf16", config=FIXED),
    "1": Case(stage=1, clip=CLIP, model="llama_deep", config=ODD),
    "2": Case(stage=2, clip=CLIP, model="llama_deep", dtype="bf16", gas=2, config=ODD),
    "2-fp32-sums": Case(
        stage=2, clip=CLIP, dtype="bf16", gas=2, config=FIXED, more={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "3": Case(stage=3, clip=CLIP, model="llama_deep", dtype="bf16", gas=2, config=ODD),
    "1-later": Case(stage=1, clip=CLIP, config={**FIXED, **LATER}),
    "0-unclipped": Case(stage=0, config=FIXED),
}


def attach_unmasked(*args: Any) -> bool:
    """Attach the hooks, and let the optimizer's hook mask gradients a second time."""
    mask_before_norm(*args)
    return False


def both_ways(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Return losses, norms and weights of each case as it is, and with a hook on every weight and a second mask.

    The hooks of the latter come last.
    """
    results = {}
    for name, case in cases.items():
        runs, hooked = [], []
        for old in (False, True):
            engine = build_engine(case)
            with ExitStack() as patched:
                if old:
                    for kind in (Zero12Layout, Zero3Layout):
                        patched.enter_context(mock.patch.object(kind, "before_norm", lambda self, mask: False))
                    patched.enter_context(mock.patch.object(type(engine), "gradient_clipping", lambda engine: CLIP))
                    patched.enter_context(mock.patch("sparseforge_ds.forge.mask_before_norm", attach_unmasked))
                forge = sf.SparseForge(engine, case.sparseforge)
            hooked.append(sum(bool(parameter._backward_hooks) for parameter in engine.module.parameters()))
            forge.start(probe_of(engine, case, 0))
            observed: list[Any] = []
            for step in range(3):
                observed.append(train_step(engine, case, step))
                norm = engine.get_global_grad_norm()
                observed.append(None if norm is None or not case.clip else float(norm))
                forge.step(probe_of(engine, case, step))
            runs.append([observed, published(engine), gathered(forge, "dense")])
        results[name] = {"runs": runs, "hooked": hooked}
    return results


def test_the_same_bits_as_with_a_hook_on_every_weight() -> None:
    for rank in run_distributed(both_ways, 2, BOTH_WAYS):
        for name, results in rank.items():
            now, before = results["runs"]
            assert now[0] == before[0] and len(now[0]) == 6, name
            for actual, expected in zip(now[1:], before[1:], strict=True):
                assert actual.keys() == expected.keys()
                assert all(torch.equal(bits(actual[key]), bits(expected[key])) for key in actual), name
            none, some = results["hooked"]
            assert some > 0 and none == (some if name == "0" else 0), (name, results["hooked"])


def test_only_kept_weights_count_in_the_norm() -> None:
    for rank in run_distributed(norms, 2, CASES):
        for name, results in rank.items():
            rough = 2e-2 if CASES[name].dtype != "fp32" else 1e-4
            assert results["pruned moved"] == [], name
            assert results["all"] > 1.05 * results["kept"] > 10 * CLIP, (name, results)
            if name != "0-fp32":  # where DeepSpeed logs none
                assert float(results["logged"]) == pytest.approx(results["kept"], rel=rough), (name, results)
            assert results["stepped"] == pytest.approx(CLIP, rel=max(rough, 1e-3)), (name, results)
