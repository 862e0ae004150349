"""The `method` key: what each method starts from, and that it takes no key that it has no use for."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from sparseforge_ds.config import METHODS, DistillationConfig, SparseForgeConfig
from sparseforge_ds.config.block_sections import BlockStartConfig, CurvatureConfig
from sparseforge_ds.config.method_config import MethodConfig
from sparseforge_ds.config.methods import AstConfig, CastConfig, ElsaConfig, MaskLLMConfig, PatConfig, SrSteConfig
from sparseforge_ds.config.soft_mask_config import SoftMaskConfig

FROZEN = {"method": {"hardening": [0, 0]}}
RETRAIN = {"method": "naive_retrain"}
"""`sparseforge` with masks that are frozen from the first step on."""


def build(**block: Any) -> SparseForgeConfig:
    return SparseForgeConfig.from_dict(block)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_builds_by_its_name_alone_and_survives_a_round_trip(method: str) -> None:
    config = build(method=method)
    assert SparseForgeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.method.name == method
    assert build(method={"name": method}) == config


def test_settings_are_as_published() -> None:
    assert build(method="sr_ste").method == SrSteConfig(every=1, decay=2e-4, ramp=(0.0, 0.0), frozen=0.0)
    ast = build(method="ast", low_rank={"k": 16})
    assert ast.distillation == DistillationConfig(weight=2 / 3, task_weight=1 / 3, temperature=2.0)
    assert ast.method == AstConfig(every=10, decay=6e-5, ramp=(0.0, 0.25), frozen=0.0)
    assert build(method="cast").distillation == ast.distillation
    assert ast.branch_step == 0, "AST's branches are there from the start"
    assert build(method="cast").method == CastConfig(every=10, decay=1e-4, ramp=(0.0, 0.5), frozen=0.1, scaling=True)
    assert build(method="elsa").method == ElsaConfig(every=32, decay=0.01, ramp=(0.0, 0.0), frozen=0.0)
    assert build(method="pat").method == PatConfig(every=1, decay=0.0, warmup=0.0, frozen=0.0)
    maskllm = build(method="maskllm").method
    assert maskllm == MaskLLMConfig(scale=(100.0, 500.0), temperature=(4.0, 0.05), prior=3.0)
    for method in ("sr_ste", "elsa", "pat", "maskllm"):
        assert build(method=method).distillation is None
    for method in set(METHODS) - {"sparseforge"}:
        config = build(method=method)
        assert (config.importance, config.curvature.first_probes) == ("magnitude", 16)


def test_keys_without_a_name_are_of_the_default_method() -> None:
    assert build(method={"threshold": "nth"}).method == SoftMaskConfig(threshold="nth")
    assert build(method={}) == build(method="sparseforge") == build()


def test_masks_freeze_at_the_step_of_their_method() -> None:
    assert build(method="ast", max_steps=200).resolved_schedule.freeze_step == 200
    cast = build(max_steps=200, method={"name": "cast", "every": 3, "frozen": 0.25}).resolved_schedule
    assert (cast.freeze_step, cast.update_every) == (150, 12), "a report every 10 steps, at a choice of the mask"
    assert build(method="naive_retrain").resolved_schedule.freeze_step == 0


def test_masks_move_after_a_start_as_they_do_without_it() -> None:
    config = build(start={}, max_steps=100)
    plain = build(max_steps=100)
    assert config.resolved_schedule == plain.resolved_schedule and config.keeps_curvature and config.starts_by_block
    assert config.from_training_step == plain.from_training_step
    assert build(start={}, pattern="block16", importance="wanda").keeps_curvature


def test_a_fixed_mask_of_a_start_needs_no_curvature() -> None:
    for block in (FROZEN, {"method": "naive_retrain"}, {"method": "naive_retrain", "importance": "sparsegpt"}):
        config = build(start={"mask": "sparsegpt"}, max_steps=100, **block)
        assert config.resolved_schedule.freeze_step == config.release_step == 0
        assert not config.keeps_curvature and not config.from_training_step and config.starts_by_block
        assert SparseForgeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        config.check_length()


def test_every_method_has_its_states() -> None:
    assert build(method="ast").state_keys == build(method="pat").state_keys == ()
    assert build(method="elsa").state_keys == ("split",)
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
    ({"method": ["ast"]}, ["sparseforge.method", "['ast']", "an object"]),
    ({"method": None}, ["sparseforge.method = None", "a name, or an object"]),
    ({"method": {"name": ["ast"]}}, ["sparseforge.method = ['ast']", "sr_ste"]),
    ({"method": {"name": "ast", "mask_rate": 0.2}}, ["sparseforge.method.mask_rate", '"ast"', "only sparseforge does"]),
    ({"method": {"name": "ast", "threshold": "nth"}}, ["sparseforge.method.threshold", '"ast"', "leave it out"]),
    ({"method": {"name": "ast", "prior": 1}}, ["sparseforge.method.prior", "only maskllm does", "leave it out"]),
    ({"method": {"name": "maskllm", "every": 2}}, ["sparseforge.method.every", '"maskllm"', "cast, elsa, pat do"]),
    ({"method": {"every": 2}}, ["sparseforge.method.every", '"sparseforge" does not use it']),
    ({"method": {"name": "ast", "evry": 2}}, ["sparseforge.method.evry", "unknown", "sparseforge.method.every"]),
    ({"hardening": [0, 0.3]}, ["sparseforge.hardening: unknown key", "sparseforge.method.hardening"]),
    ({"probes": 2}, ["sparseforge.probes: unknown key", "sparseforge.curvature.probes"]),
    (
        {"preset": "paper_like", "method": "ast"},
        ["sparseforge.preset", '"paper_like"', '"sparseforge"', '"ast"', "leave one"],
    ),
    ({"preset": "sparse_llama", "method": {"hard": True}}, ["sparseforge.preset", '"naive_retrain"', '"sparseforge"']),
    ({"method": "cast", "low_rank": {}}, ["sparseforge.low_rank", '"cast"', "null"]),
    ({"method": "elsa", "low_rank": {}}, ["sparseforge.low_rank", '"elsa"', "null"]),
    ({"method": {"name": "pat", "warmup": 0.6, "frozen": 0.4}}, ["method.warmup = 0.6", "< 1 - frozen"]),
    ({"method": "elsa", "max_steps": 30}, ["method.every = 32", "step 30 of 30", "at least 32 steps"]),
    ({"method": "maskllm", "low_rank": {}}, ["sparseforge.low_rank", '"maskllm"', "sr_ste, ast do"]),
    ({"method": "oneshot"}, ["sparseforge.method = 'oneshot' is not valid", "naive_retrain"]),
    ({"method": {"name": "ast", "scaling": True}}, ["sparseforge.method.scaling", "only cast"]),
    ({"method": {"name": "ast", "every": 0}}, ["sparseforge.method.every = 0", ">= 1"]),
    ({"method": {"name": "ast", "decay": -1}}, ["sparseforge.method.decay", ">= 0"]),
    ({"method": {"name": "ast", "ramp": [0.5, 0.2]}}, ["sparseforge.method.ramp", "start <= stop"]),
    ({"method": {"name": "cast", "frozen": 1}}, ["sparseforge.method.frozen", "< 1"]),
    ({"method": {"name": "maskllm", "temperature": [4, 0]}}, ["sparseforge.method.temperature", "> 0"]),
    ({"method": {"name": "maskllm", "prior": -1}}, ["sparseforge.method.prior", ">= 0"]),
    ({"method": {"name": "maskllm", "frozen": -0.1}}, ["sparseforge.method.frozen", "frozen"]),
    ({"method": "maskllm", "pattern": "16:32"}, ["sparseforge.pattern = 16:32", "more than 1,000", "like 2:4 or 4:8"]),
    ({"method": "maskllm", "pattern": "8:16"}, ["sparseforge.pattern = 8:16"]),
    ({"method": {"name": "elsa", "ramp": [0, 0.5]}}, ["sparseforge.method.ramp", "lambda of ADMM is constant"]),
    ({"method": "cast", "pattern": "block16"}, ["sparseforge.method.scaling", "block16 has tiles", '"scaling": false']),
    ({"method": "maskllm", "pattern": "block16"}, ["sparseforge.pattern = block16", "n:m"]),
    ({"importance": "sparsegpt"}, ["sparsegpt", "starting mask", "fisher"]),
    ({**RETRAIN, "importance": "sparsegpt", "pattern": "block16"}, ["sparsegpt", "block16"]),
    ({"start": {}, "method": "ast"}, ["sparseforge.start", '"ast" does not use it', "null", "naive_retrain"]),
    ({"start": {}, **FROZEN, "importance": "wanda"}, ['importance = "wanda"', "start.mask", "leave it out"]),
    ({"start": {"mask": "sparsegpt"}, "pattern": "block16"}, ["start.mask", "block16", "wanda"]),
    ({"start": {}, **FROZEN, "low_rank": {"shift": False}}, ["sparseforge.low_rank", '"shift": true']),
    ({"start": {"soft": 1.5}}, ["start.soft = 1.5", "fraction"]),
    ({"start": {"epochs": 0, "rate": 0.5}}, ["start.rate = 0.5", '"epochs": 0 trains nothing']),
    ({"start": {"epochs": 0, "soft": 0.9}}, ["start.soft = 0.9", '"epochs": 0 trains nothing']),
    ({"start": {"mask": "wanda", "damping": 0.5}}, ["start.damping = 0.5", 'mask "wanda" does not use it']),
    ({"start": {}, "method": "naive_retrain", "curvature": {"sequences": 64}}, ["sparseforge.curvature", "measured"]),
    ({"start": {}, **FROZEN, "curvature": {"decay": 0.5}}, ["sparseforge.curvature", '"start" to null']),
]


@pytest.mark.parametrize(("block", "words"), BAD, ids=[json.dumps(block)[:60] for block, _ in BAD])
def test_a_key_that_does_not_fit_the_method_is_named(block: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        build(**block).check_length()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_a_new_method_refuses_what_it_does_not_say_that_it_reads() -> None:
    new = MethodConfig("new")
    config = SparseForgeConfig(method=new, importance="magnitude")  # type: ignore[arg-type]
    assert not config.keeps_curvature
    for key, value in {
        "importance": "wanda",
        "curvature": CurvatureConfig(probes=2),
        "start": BlockStartConfig(),
    }.items():
        with pytest.raises(ValueError, match=f'sparseforge.{key}: method "new" does not use it, only .*leave it out'):
            dataclasses.replace(config, **{key: value})


def test_a_method_is_built_from_its_settings_and_never_only_named() -> None:
    with pytest.raises(ValueError, match="from_dict"):
        SparseForgeConfig(method="ast")
