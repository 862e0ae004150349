"""The `method` key: what each method starts from, and that it takes no key that it has no use for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparseforge_ds.config import METHODS, DistillationConfig, RefreshConfig, SparseForgeConfig


def build(**block: Any) -> SparseForgeConfig:
    return SparseForgeConfig.from_dict(block)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_builds_by_its_name_alone_and_survives_a_round_trip(method: str) -> None:
    config = build(method=method)
    assert SparseForgeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.method == method


def test_published_settings() -> None:
    assert build(method="sr_ste").refresh == RefreshConfig(every=1, decay=2e-4)
    ast = build(method="ast", low_rank={"k": 16})
    assert ast.distillation == DistillationConfig(weight=2 / 3, task_weight=1 / 3, temperature=2.0)
    assert ast.refresh is not None and (ast.refresh.every, ast.refresh.decay) == (10, 6e-5)
    assert ast.branch_step == 0, "AST's branches are there from the start"
    assert build(method="cast").refresh.scaling  # type: ignore[union-attr]
    maskllm = build(method="maskllm").sampling
    assert maskllm is not None
    assert (maskllm.scale, maskllm.temperature, maskllm.prior) == ((100.0, 500.0), (4.0, 0.05), 3.0)


def test_naive_retrain_is_what_the_fixed_presets_are() -> None:
    for importance in ("magnitude", "wanda"):
        retrain = build(method="naive_retrain", importance=importance, max_steps=100)
        preset = build(preset=f"fixed_{importance}", max_steps=100)
        assert retrain.resolved_schedule.freeze_step == preset.resolved_schedule.freeze_step == 0
        assert retrain.importance == preset.importance
        assert retrain.distillation == preset.distillation


def test_when_masks_freeze() -> None:
    assert build(method="ast", max_steps=200).resolved_schedule.freeze_step == 200
    cast = build(method="cast", max_steps=200, refresh={"every": 3, "frozen": 0.25}).resolved_schedule
    assert (cast.freeze_step, cast.update_every) == (150, 12), "a report every 10 steps, at a choice of the mask"
    assert build(method="oneshot").resolved_schedule.freeze_step == 0


def test_states_of_a_method() -> None:
    assert build(method="ast").state_keys == ()
    assert build().state_keys == (), "row and column sums are no state of an element"
    assert build(curvature={"factored": False}).state_keys == ("curvature",)
    assert build(method="naive_retrain", importance="sparsegpt").state_keys == ()
    assert build(method="maskllm").state_keys == (
        *("logit_0", "logit_1"),
        *("logit_avg_0", "logit_avg_1"),
        *("logit_sq_0", "logit_sq_1"),
    )
    assert len(build(method="maskllm", pattern="4:8").state_keys) == 3 * 9


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"method": "srste"}, ["sparseforge.method", "'srste'", "sr_ste"]),
    ({"method": ["ast"]}, ["sparseforge.method", "['ast']"]),
    ({"method": "ast", "schedule": {"mask_rate": 0.2}}, ["sparseforge.schedule", '"ast"', "only sparseforge do"]),
    ({"method": "ast", "threshold": "nth"}, ["sparseforge.threshold", '"ast"']),
    ({"method": "ast", "sampling": {}}, ["sparseforge.sampling", "only maskllm do", "null"]),
    ({"method": "maskllm", "refresh": {}}, ["sparseforge.refresh", "sr_ste, ast, cast"]),
    ({"refresh": {"every": 2}}, ["sparseforge.refresh", '"sparseforge" does not use it']),
    ({"method": "cast", "low_rank": {}}, ["sparseforge.low_rank", '"cast"']),
    ({"method": "oneshot", "max_steps": 10}, ["sparseforge.max_steps = 10", "trains nothing", "0"]),
    ({"method": "oneshot", "distillation": {}}, ["sparseforge.distillation", "null"]),
    ({"method": "ast", "refresh": None}, ["sparseforge.refresh = null", "from_dict"]),
    ({"method": "ast", "refresh": {"scaling": True}}, ["sparseforge.refresh.scaling", "only cast"]),
    ({"method": "ast", "refresh": {"every": 0}}, ["sparseforge.refresh.every = 0", ">= 1"]),
    ({"method": "ast", "refresh": {"decay": -1}}, ["sparseforge.refresh.decay", ">= 0"]),
    ({"method": "ast", "refresh": {"ramp": [0.5, 0.2]}}, ["sparseforge.refresh.ramp", "start <= stop"]),
    ({"method": "cast", "refresh": {"frozen": 1}}, ["sparseforge.refresh.frozen", "< 1"]),
    ({"method": "maskllm", "sampling": {"temperature": [4, 0]}}, ["sparseforge.sampling.temperature", "> 0"]),
    ({"method": "maskllm", "sampling": {"prior": -1}}, ["sparseforge.sampling.prior", ">= 0"]),
    ({"method": "maskllm", "sampling": {"frozen": -0.1}}, ["sparseforge.sampling.frozen", "frozen"]),
    ({"method": "maskllm", "pattern": "block16"}, ["sparseforge.pattern = block16", "n:m"]),
    ({"importance": "sparsegpt"}, ["sparsegpt", "starting mask", "fisher"]),
    ({"method": "oneshot", "importance": "sparsegpt", "pattern": "block16"}, ["sparsegpt", "block16"]),
    ({"method": "oneshot", "reconstruction": {}}, ["sparseforge.reconstruction", "magnitude"]),
    ({"method": "oneshot", "importance": "sparsegpt", "reconstruction": {"damping": 0}}, ["reconstruction.damping"]),
    ({"method": "oneshot", "importance": "sparsegpt", "reconstruction": {"block": 0}}, ["reconstruction.block"]),
]


@pytest.mark.parametrize(("block", "words"), BAD, ids=[json.dumps(block)[:60] for block, _ in BAD])
def test_what_does_not_fit_the_method_is_an_error_that_names_it(block: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        build(**block)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_a_method_is_built_from_its_settings_and_never_only_named() -> None:
    with pytest.raises(ValueError, match="from_dict"):
        SparseForgeConfig(method="ast")
