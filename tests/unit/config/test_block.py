"""The `sparseforge` block: strict, presets, and errors that name the key, the value and the cure."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.config import PRESETS, BlockStartConfig, DistillationConfig, LowRankConfig, SparseForgeConfig
from sparseforge_ds.config.soft_mask_config import SoftMaskConfig


def build(**block: Any) -> SparseForgeConfig:
    return SparseForgeConfig.from_dict(block)


def test_empty_block_is_the_default():
    assert build() == SparseForgeConfig()
    assert build().pattern == "2:4"
    assert isinstance(build().distillation, DistillationConfig)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_and_survives_a_round_trip(preset: str):
    config = build(preset=preset, max_steps=1000)
    assert SparseForgeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_quantization_begins_where_from_says():
    block = {"max_steps": 100, "quantize": {"from": 0.5}}
    config = build(**block)
    assert SparseForgeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict()["quantize"] == {"bits": 4, "group_size": 64, "from": 0.5}
    assert [step for step in (0, 49, 50, 100) if config.is_quantized(step)] == [50, 100]
    frozen = build(max_steps=100, quantize={})
    assert frozen.quantize_step == frozen.resolved_schedule.freeze_step == 20
    assert frozen.is_quantized(10, hard=True) and not frozen.is_quantized(10) and not config.is_quantized(10, hard=True)
    assert not build().is_quantized(100) and build(method="naive_retrain", quantize={}).quantize_step == 0


def test_a_run_that_would_train_no_quantized_weights_is_refused():
    message = 'sparseforge.quantize.from = "freeze": masks of method "sr_ste" freeze with the last step, 100'
    with pytest.raises(ValueError, match=re.escape(message)):
        build(method="sr_ste", max_steps=100, quantize={}).check_length()
    for method, key in (("sr_ste", "a larger method.frozen"), ({"hardening": [0, 1]}, "an earlier end of method.h")):
        with pytest.raises(ValueError, match=f"use a fraction of max_steps, or {key}"):
            build(method=method, max_steps=100, quantize={}).check_length()
    build(method="sr_ste", max_steps=100, quantize={"from": 0.5}).check_length()
    build(method={"name": "sr_ste", "frozen": 0.2}, max_steps=100, quantize={}).check_length()


def test_given_keys_win_over_the_preset_and_leave_its_neighbours():
    config = build(preset="paper_like", method={"update_every": 7}, low_rank={"k": 32})
    assert config.method.update_every == 7
    assert config.method.hardening == tuple(PRESETS["paper_like"]["method"]["hardening"])
    assert config.low_rank == LowRankConfig(k=32, shift=False, start=0.1)
    assert build(preset="paper_like", low_rank=None).low_rank is None
    assert build(preset="paper_like_no_low_rank").low_rank is None
    assert build(preset="paper_like").method.threshold == "nth"  # type: ignore[union-attr]
    assert build(distillation=None).distillation is None


def test_a_preset_may_name_a_method():
    config = build(preset="sparse_llama")
    assert (config.method.name, config.importance, config.curvature.first_probes) == ("naive_retrain", "sparsegpt", 16)
    assert config.distillation is not None and config.distillation.hidden is not None
    assert build(preset="sparse_llama", method="naive_retrain") == config


def test_a_preset_is_not_changed_by_what_is_built_from_it():
    before = json.dumps(PRESETS)
    build(preset="paper_like", method={"update_every": 3}, curvature={"decay": 0.5})
    assert json.dumps(PRESETS) == before


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"patern": "2:4"}, ["sparseforge.patern", "unknown key", "sparseforge.pattern"]),
    ({"method": {"hardning": [0, 1]}}, ["sparseforge.method.hardning", "sparseforge.method.hardening"]),
    ({"low_rank": {"K": 16}}, ["sparseforge.low_rank.K", "sparseforge.low_rank.k"]),
    ({"curvature": {"ema": 0.9}}, ["sparseforge.curvature.ema", "unknown key"]),
    ({"preset": "papr"}, ["sparseforge.preset", "'papr'", "paper"]),
    ({"preset": ["paper_like"]}, ["sparseforge.preset", "['paper_like']", "paper"]),
    ({"pattern": "2of4"}, ["'2of4'", "2:4"]),
    ({"pattern": "4:2"}, ["4:2", "0 < n < m"]),
    ({"pattern": "0:4"}, ["0:4", "0 < n < m"]),
    ({"pattern": "4:4"}, ["4:4", "n < m", "naive_retrain"]),
    ({"pattern": 24}, ["sparseforge.pattern", "24", "str"]),
    (
        {"importance": "hutchinson", "curvature": {"factored": False}},
        ["sparseforge.curvature.factored", "false", '"per_token": false'],
    ),
    (
        {"importance": "wanda", "curvature": {"factored": False}},
        ["sparseforge.curvature.factored", "false", "product of row and column sums", "leave it out"],
    ),
    ({"curvature": {"radius": 0.3}}, ["sparseforge.curvature.radius", "0.3", '"hutchinson" alone', "leave it out"]),
    *(
        (
            {**block, "curvature": {"factored": True}},
            ["sparseforge.curvature.factored = true", f'importance "{block["importance"]}"', "leave it out"],
        )
        for block in (
            {"importance": "magnitude"},
            {"method": "naive_retrain", "importance": "sparsegpt"},
        )
    ),
    *(
        ({"quantize": {"bits": bits}}, [f"sparseforge.quantize.bits = {bits} is not valid", "use 2 to 8"])
        for bits in (1, 9)
    ),
    ({"quantize": {"group_size": 0}}, ["sparseforge.quantize.group_size = 0 is not valid", "null or an integer >= 1"]),
    (
        {"quantize": {"group_size": 3}},
        ["sparseforge.quantize.group_size = 3: 3 kept values are no whole number of groups of 2:4"],
    ),
    ({"quantize": {"from": "frozen"}}, ["sparseforge.quantize.from = 'frozen' is not valid: use one of freeze"]),
    ({"quantize": {"from": 1.5}}, ["sparseforge.quantize.from = 1.5", '"freeze", or a fraction from 0 to 1']),
    ({"quantize": {"from": True}}, ["sparseforge.quantize.from = True", "expected a number"]),
    ({"quantize": {"from_": 0.5}}, ["sparseforge.quantize.from_: unknown key", "sparseforge.quantize.from?"]),
    ({"importance": "hessian"}, ["sparseforge.importance", "'hessian'", "hutchinson", "magnitude"]),
    ({"importance": ["fisher"]}, ["sparseforge.importance", "fisher"]),
    ({"method": {"threshold": "median"}}, ["sparseforge.method.threshold", "midpoint, nth"]),
    ({"max_steps": -1}, ["sparseforge.max_steps", "-1", ">= 0"]),
    ({"max_steps": 10.5}, ["sparseforge.max_steps", "10.5", "int"]),
    ({"max_steps": True}, ["sparseforge.max_steps", "True", "int"]),
    ({"max_steps": "400"}, ["sparseforge.max_steps", "'400'", "int"]),
    ({"max_steps": 1000.0}, ["sparseforge.max_steps", "1000.0", "an integer"]),
    ({"max_steps": 10**400}, ["sparseforge.max_steps = 100000000", "...: expected an integer of 64 bits"]),
    ({"seed": -1}, ["sparseforge.seed", "-1", "2^32"]),
    ({"seed": 2**32}, ["sparseforge.seed", "2^32"]),
    ({"method": {"temperature": 10**400}}, ["sparseforge.method.temperature = 1000", "expected a number of 64 bits"]),
    ({"distillation": {"temperature": 1e300}}, ["distillation.temperature = 1e+300", "from 1e-06 to 1e+06"]),
    ({"distillation": {"temperature": 1e-300}}, ["distillation.temperature = 1e-300", "from 1e-06 to 1e+06"]),
    ({"distillation": {"task_weight": 1e300}}, ["distillation.task_weight = 1e+300", "at most 1e+06"]),
    ({"distillation": {"hidden": {"weight": 1e300}}}, ["distillation.hidden.weight = 1e+300", "at most 1e+06"]),
    ({"curvature": {"sequences": 10**15}}, ["curvature.sequences = 1000000000000000", "at most 1,000,000,000"]),
    ({"curvature": {"source": "training", "sequences": 8}}, ["curvature.sequences = 8", 'or use source "probe"']),
    ({"seed": None}, ["sparseforge.seed", "None", "int"]),
    ({"method": {"hardening": ["0", 1]}}, ["sparseforge.method.hardening = '0'", "a number"]),
    ({"curvature": {"radius": "1"}}, ["sparseforge.curvature.radius = '1'", "a number, or null"]),
    ({"distillation": False}, ["sparseforge.distillation = False", "an object", "or null"]),
    ({"include": "*.q_proj.weight"}, ["sparseforge.include", "list"]),
    ({"exclude": [3]}, ["sparseforge.exclude[0]", "3", "str"]),
    ({"method": []}, ["sparseforge.method", "[]", "object"]),
    ({"method": {"update_every": 0}}, ["sparseforge.method.update_every", "0", ">= 1"]),
    ({"method": {"temperature": "hot"}}, ["sparseforge.method.temperature", "'hot'", "a number"]),
    ({"method": {"temperature": 0.01}}, ["sparseforge.method.temperature", "0.01", "temperature_min = 0.05"]),
    ({"method": {"temperature": float("inf")}}, ["sparseforge.method.temperature", "inf", "finite"]),
    ({"method": {"mid_penalty": float("nan")}}, ["sparseforge.method.mid_penalty", "nan", "finite"]),
    ({"method": {"temperature_min": 0}}, ["sparseforge.method.temperature_min", "> 0"]),
    ({"method": {"temperature_decay": 1.5}}, ["sparseforge.method.temperature_decay", "1.5", "gamma"]),
    ({"method": {"hardening": [0.3, 0.1]}}, ["sparseforge.method.hardening", "[0.3, 0.1]", "start <= stop"]),
    ({"method": {"hardening": [0.1]}}, ["sparseforge.method.hardening", "2 values"]),
    ({"method": {"hardening": 0.3}}, ["sparseforge.method.hardening", "0.3", "list"]),
    ({"method": {"blend": [0, 1.2]}}, ["sparseforge.method.blend", "1.2"]),
    ({"method": {"mid_penalty_ramp": [-0.1, 1]}}, ["sparseforge.method.mid_penalty_ramp", "-0.1"]),
    ({"method": {"mid_penalty": -1}}, ["sparseforge.method.mid_penalty", ">= 0"]),
    ({"method": {"penalty_rate": -1}}, ["sparseforge.method.penalty_rate", ">= 0"]),
    ({"method": {"mask_rate": 0}}, ["sparseforge.method.mask_rate", "alpha"]),
    ({"method": {"mask_rate": 1.1}}, ["sparseforge.method.mask_rate", "1.1"]),
    ({"curvature": {"decay": 1.0}}, ["sparseforge.curvature.decay", "1.0", "< 1"]),
    ({"curvature": {"probes": 0}}, ["sparseforge.curvature.probes", ">= 1"]),
    ({"curvature": {"first_probes": 0}}, ["sparseforge.curvature.first_probes", ">= 1"]),
    ({"curvature": {"damping": -1e-3}}, ["sparseforge.curvature.damping", ">= 0"]),
    ({"curvature": {"radius": 0}}, ["sparseforge.curvature.radius", "null or a value > 0"]),
    ({"curvature": {"per_token": False}}, ["sparseforge.curvature.per_token", "false", "leave it out", "hutchinson"]),
    (
        {"curvature": {"source": "training"}, "importance": "hutchinson"},
        ['sparseforge.curvature.source = "training"', "only sparseforge with a soft mask", '"probe"'],
    ),
    ({"curvature": {"per_token": 1}}, ["sparseforge.curvature.per_token", "true or false"]),
    ({"low_rank": {"k": 1}}, ["sparseforge.low_rank.k", "1", ">= 2"]),
    ({"low_rank": {"start": 2}}, ["sparseforge.low_rank.start", "0 <= start <= 1"]),
    ({"low_rank": {"learned": True, "shift": False}}, ["low_rank.shift", "false", '"learned": false']),
    ({"low_rank": {"learned": True, "start": 0.5}}, ["low_rank.start", "0.5", '"learned": false']),
    ({"low_rank": True}, ["sparseforge.low_rank", "True", "object", "or null"]),
    ({"distillation": {"weight": 0, "task_weight": 0}}, ["sparseforge.distillation.weight", "> 0"]),
    ({"distillation": {"hidden": {"until": 1.5}}}, ["sparseforge.distillation.hidden.until", "0 < until <= 1"]),
    ({"distillation": {"hidden": {"weight": 0}}}, ["sparseforge.distillation.hidden.weight = 0", "> 0"]),
    ({"distillation": {"hidden": {"every": 0}}}, ["sparseforge.distillation.hidden.every = 0", "integer >= 1"]),
    ({"distillation": {"temperature": 0}}, ["sparseforge.distillation.temperature", "from 1e-06 to 1e+06"]),
    ({"distillation": {"hold": "gpu"}}, ["sparseforge.distillation.hold", "'gpu'", "zero3, replicated"]),
    ({"monitor": {"gap_every": -1}}, ["sparseforge.monitor.gap_every", ">= 0"]),
    # A mask that would be projected before its first update would keep the first two of every four by index.
    ({"max_steps": 10, "method": {"update_every": 5}}, ["sparseforge.method.update_every", "step 2", "[0, 0]"]),
    (
        {"max_steps": 50, "method": {"update_every": 5, "hardening": [0.0, 0.1]}},
        ["sparseforge.method.update_every", "step 5", "[0, 0]"],
    ),
    (
        {"max_steps": 3, "importance": "magnitude", "method": {"update_every": 5, "hardening": [0.5, 1.0]}},
        ["sparseforge.method.update_every", "step 3", "at least 6 steps", "[0, 0]"],
    ),
    ({"max_steps": 1}, ["sparseforge.max_steps = 1 ", "at least 2 steps", "[0, 0]"]),
    ({"max_steps": 12, "preset": "paper_like"}, ["update_every = 10 ", "at least 13 steps"]),
    ({"max_steps": 13, "preset": "paper_like"}, ["low_rank.start = 0.1 ", "step 1 of 13", "more steps"]),
    ({"max_steps": 9, "method": "ast"}, ["method.every = 10 ", "at least 10 steps", '"naive_retrain"']),
    ({"max_steps": 10, "method": "cast"}, ["method.every = 10 ", "step 9 of 10", "at least 11 steps"]),
]


@pytest.mark.parametrize(("block", "words"), BAD, ids=[json.dumps(block)[:60] for block, _ in BAD])
def test_bad_value_is_an_error_that_names_it(block: dict[str, Any], words: list[str]):
    with pytest.raises(ValueError) as error:
        build(**block).check_length()
    assert [word for word in words if word not in str(error.value)] == []


def test_an_integer_stands_for_a_float():
    assert build(method={"temperature": 2, "hardening": [0, 1]}).method == SoftMaskConfig(
        temperature=2.0, hardening=(0.0, 1.0)
    )


def test_ramps_become_steps():
    schedule = build(max_steps=1000, method={"hardening": [0.1, 0.3], "blend": [0, 0.25]}).resolved_schedule
    assert schedule.hardening == (100, 300)
    assert schedule.blend == (0, 250)
    assert schedule.freeze_step == 300


@pytest.mark.parametrize("max_steps", [2, 3, 4, 5, 6, 7])
def test_the_shortest_runs_heat_harden_and_freeze(max_steps: int) -> None:
    schedule = build(max_steps=max_steps).resolved_schedule
    assert (schedule.hardening, schedule.update_every) == ((0, 2), 1)
    assert [step for step in range(max_steps + 1) if schedule.is_update(step)] == [1]
    assert [step for step in range(max_steps + 1) if schedule.is_projection(step)] == [2]
    late = build(max_steps=max_steps, method={"hardening": [0.0, 0.01]}).resolved_schedule
    assert late.freeze_step == 2, "a ramp that rounds to nothing is not a fixed mask"


@pytest.mark.parametrize("max_steps", [100, 101, 137, 400, 20000])
def test_longer_runs_keep_their_steps(max_steps: int) -> None:
    for block in ({}, {"preset": "paper_like"}, {"method": {"hardening": [0.3, 0.62]}}):
        config = build(max_steps=max_steps, **block)
        start, stop = config.method.hardening
        assert config.resolved_schedule.hardening == (round(start * max_steps), round(stop * max_steps))


@pytest.mark.parametrize("every", [2, 5, 10, 33])
@pytest.mark.parametrize("stop", [0.03, 0.2, 0.5, 1.0])
def test_the_minimum_of_steps_in_the_message_is_the_minimum(every: int, stop: float) -> None:
    schedule = {"update_every": every, "hardening": [0.0, stop]}
    with pytest.raises(ValueError, match="use at least") as raised:
        build(max_steps=2, method=schedule).check_length()
    least = int(str(raised.value).split("use at least ")[1].split(" ")[0])
    enough = build(max_steps=least, method=schedule)
    enough.check_length()
    assert enough.resolved_schedule.freeze_step == every + 1
    with pytest.raises(ValueError, match=f"use at least {least} steps"):
        build(max_steps=least - 1, method=schedule).check_length()


def test_a_block_is_read_before_the_length_of_its_run_is_known() -> None:
    block = {"method": {"update_every": 100}}
    SparseForgeConfig.from_dict({**block, "max_steps": 20_000}).check_length()
    early = SparseForgeConfig.from_dict(block)
    with pytest.raises(ValueError, match="update_every = 100 .* masks are frozen at step 80 of 400"):
        early.check_length()
    replace(early, max_steps=20_000).check_length()


def test_fixed_masks_and_runs_of_no_steps_are_valid():
    assert build(method="naive_retrain", max_steps=1).resolved_schedule.freeze_step == 0
    assert build(method={"hardening": [0, 0]}, max_steps=1).resolved_schedule.freeze_step == 0
    assert build(max_steps=0).resolved_schedule.freeze_step == 0
    assert build(max_steps=4, method={"name": "maskllm", "frozen": 0.9}).resolved_schedule.freeze_step == 1


def test_a_block_is_read_from_a_file(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {}, "sparseforge": {"pattern": "1:4", "method": {"update_every": 3}}}))
    config = SparseForgeConfig.from_json(path, max_steps=200, method={"mask_rate": 0.2})
    assert (config.pattern, config.max_steps) == ("1:4", 200)
    assert (config.method.update_every, config.method.mask_rate) == (3, 0.2)


def test_auto_is_named_where_a_loop_of_ones_own_reads_its_json(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSpeed itself ends in a TypeError that names no key."""
    path = tmp_path / "ds.json"
    content = {"train_batch_size": 8, "optimizer": {"params": {"lr": 1e-4}}, "sparseforge": {}}
    path.write_text(json.dumps(content))
    SparseForgeConfig.from_json(path)
    assert not caplog.messages
    path.write_text(json.dumps({**content, "train_batch_size": "auto", "optimizer": {"params": {"lr": "auto"}}}))
    SparseForgeConfig.from_json(path)
    assert f'{path}: "auto" in train_batch_size, optimizer.params.lr; the launcher' in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no such file", "zero3"]),
        (b"{", ["not a readable JSON file"]),
        (b"\xff\xfe\x00", ["not a readable JSON file"]),
        (b"[]", ['no "sparseforge" block', '"sparseforge": {}']),
        (b"{}", ['no "sparseforge" block', '"sparseforge": {}']),
        (b'{"sparseforge": 3}', ['no "sparseforge" block']),
        (b'{"sparseforge": {"seeds": 1}}', ["sparseforge.seeds", "sparseforge.seed"]),
    ],
)
def test_errors_about_a_file_name_the_file_or_the_key(tmp_path: Path, content: bytes | None, words: list[str]):
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        SparseForgeConfig.from_json(path)
    assert [word for word in words if word not in str(error.value)] == []


def test_a_folder_is_refused_as_a_file(tmp_path: Path):
    with pytest.raises(ValueError, match="not a readable JSON file"):
        SparseForgeConfig.from_json(tmp_path)


def test_an_unknown_override_is_an_error(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text('{"sparseforge": {}}')
    with pytest.raises(ValueError, match="sparseforge.steps"):
        SparseForgeConfig.from_json(path, steps=3)


def test_a_preset_is_what_it_stands_for() -> None:
    applied = SparseForgeConfig.from_dict({"preset": "paper_like"})
    assert (applied.importance, applied.method) == ("hutchinson", SoftMaskConfig(**PRESETS["paper_like"]["method"]))
    assert SparseForgeConfig.from_dict(PRESETS["paper_like"]) == applied
    assert SparseForgeConfig.from_dict(applied.to_dict()) == applied


@pytest.mark.parametrize(("max_steps", "every"), [(10, 1), (150, 2), (300, 4), (375, 5), (20000, 266)])
def test_a_run_of_any_length_has_as_many_updates(max_steps: int, every: int) -> None:
    assert SparseForgeConfig(max_steps=max_steps).resolved_schedule.update_every == every
    arguments = SparseForgeConfig.from_dict({"max_steps": max_steps * 100, "method": {"update_every": 3}})
    assert arguments.resolved_schedule.update_every == 3


def test_branches_are_there_from_the_start_where_weights_are_shifted_into_them() -> None:
    block = {"max_steps": 100, "low_rank": {"k": 4}}
    for more, shifts in [
        ({}, True),
        ({"method": "naive_retrain"}, True),
        ({"method": "ast"}, False),
        ({"method": "ast", "low_rank": {"k": 4, "shift": True}}, True),
        ({"method": "ast", "low_rank": {"k": 4, "learned": True}}, True),
        ({"low_rank": {"k": 4, "shift": False}}, False),
        ({"low_rank": {"k": 4, "start": 0.5}}, False),
        ({"preset": "paper_like"}, False),
        ({"low_rank": None}, False),
    ]:
        config = SparseForgeConfig.from_dict({**block, **more})
        assert config.moves_weights_into_branches == shifts, more
        assert not shifts or config.branch_step == 0


def test_a_shift_needs_runs_of_whole_groups() -> None:
    block = {"max_steps": 100, "low_rank": {"k": 6}}
    with pytest.raises(ValueError, match=r"low_rank.k = 6 .*whole groups.*2:4.*\"shift\": false"):
        SparseForgeConfig.from_dict(block)
    for k in (16, 256):  # a tile has 256 weights, of 16 outputs
        with pytest.raises(ValueError, match="whole groups of the pattern, here block16"):
            SparseForgeConfig.from_dict({**block, "low_rank": {"k": k}, "pattern": "block16"})
    SparseForgeConfig.from_dict({**block, "low_rank": {"k": 6, "shift": False}})
    SparseForgeConfig.from_dict({**block, "low_rank": {"k": 6}, "pattern": "1:2"})
    SparseForgeConfig.from_dict({**block, "low_rank": {"k": 2}, "pattern": "1:2"})
    SparseForgeConfig.from_dict({**block, "low_rank": {"k": 6, "learned": True}, "pattern": "block16"})


def test_branches_come_in_when_there_is_something_to_make_up_for() -> None:
    block = {"max_steps": 100, "low_rank": {"k": 4, "shift": False}}
    assert SparseForgeConfig.from_dict(block).branch_step == 20
    assert SparseForgeConfig.from_dict({**block, "low_rank": {"k": 4, "start": 0.5}}).branch_step == 50
    assert SparseForgeConfig.from_dict({"max_steps": 100}).branch_step == -1
    fixed = {**block, "method": {"hardening": [0.0, 0.0]}}
    assert SparseForgeConfig.from_dict(fixed).branch_step == 0
    soon = {"method": {"update_every": 10, "hardening": [0.0, 0.6]}}  # masks stay 1 until their first update
    assert SparseForgeConfig.from_dict({**block, **soon, "low_rank": {"k": 4, "start": 0.1}}).branch_step == 10
    for start in (0.0, 0.05):
        with pytest.raises(ValueError, match="no mask has removed anything yet"):
            SparseForgeConfig.from_dict({**block, **soon, "low_rank": {"k": 4, "start": start}}).check_length()
    with pytest.raises(ValueError, match="low_rank.start.*the branch is there from the first step"):
        SparseForgeConfig.from_dict({**block, "low_rank": {"k": 4, "shift": True, "start": 0.5}})


def test_the_last_steps_before_a_mask_update_are_measured() -> None:
    def heard(source: str = "training", **curvature: int) -> list[int]:
        block = {"max_steps": 40, "method": {"update_every": 5, "hardening": [0.1, 0.5]}}
        config = SparseForgeConfig.from_dict({**block, "curvature": {"source": source, **curvature}})
        return [step for step in range(50) if config.measures_in_step(step)]

    assert heard() == [2, 3, 4, 5, 10, 15]  # and frozen from 20 on
    assert heard(first_probes=9, probes=2) == [1, 2, 3, 4, 5, 9, 10, 14, 15]
    assert heard(first_probes=1, probes=9) == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert heard("probe") == []


def test_the_curvature_is_measured_in_training_steps_where_possible() -> None:
    """Choose by default, but for passes that are asked for and a loss without a gradient at first."""
    fixed = {"method": {"hardening": [0.0, 0.0]}}
    by_elements: dict[str, Any] = {"curvature": {"factored": False}}
    own: list[dict[str, Any]] = [
        {"curvature": {"source": "probe"}},
        {"curvature": {"sequences": 4}},
        by_elements,
        fixed,
    ]
    own += [
        {"distillation": {"task_weight": 0.0}},
        {"method": "ast"},
        {"preset": "paper_like"},
    ]
    listening: list[dict[str, Any]] = [
        {},
        {"distillation": None},
        {"low_rank": {}},
        {"curvature": {"source": "training"}},
    ]
    for block, listens in [(block, False) for block in own] + [(block, True) for block in listening]:
        config = SparseForgeConfig.from_dict({"max_steps": 100, **block})
        assert config.from_training_step is listens, block
        assert SparseForgeConfig.from_dict(config.to_dict()).from_training_step is listens


def test_a_start_divides_its_tokens_into_512_steps_where_they_suffice() -> None:
    default = BlockStartConfig()
    assert default.sequences_of_step(131_072, 256) == 4
    assert default.sequences_of_step(2_000_000, 2048) == 7
    assert default.sequences_of_step(64_000_000, 2048) == 8, "at most 16,384 tokens"
    assert BlockStartConfig(epochs=1).sequences_of_step(65_536, 256) == 1, "one sequence at least"
    assert BlockStartConfig(epochs=4096).sequences_of_step(1_024, 32) == 32, "no more than are read"
    assert BlockStartConfig(epochs=0).sequences_of_step(524_288, 256) == 4
    assert BlockStartConfig(batch=3).sequences_of_step(131_072, 256) == 3
    assert BlockStartConfig(batch=10**15).sequences_of_step(1_000, 256) == 4, "no more than are read"
    assert BlockStartConfig(batch=2).sequences_of_step(256, 256) == 1, "no more than are read"
    assert BlockStartConfig(epochs=0, soft=0.0).soft_steps(100) == 0, "a share of 0 says the same"
    # (ranks, largest micro-batch): (sequences of a micro-batch, micro-batches).
    expected = {(1, 8): (4, 1), (2, 8): (2, 1), (3, 8): (2, 1), (1, 3): (2, 2), (2, 1): (1, 2), (64, 8): (1, 1)}
    assert {case: default.micro_batches(131_072, 256, *case) for case in expected} == expected
    assert BlockStartConfig(batch=12).micro_batches(131_072, 256, 1, 8) == (6, 2), "no rounding that is not needed"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16, 64, 163, 256, 1024])
@pytest.mark.parametrize(
    ("tokens", "length", "of_step", "on_one_rank"),
    [(2_000_000, 4096, 3, 652), (2_000_000, 32_768, 1, 248), (131_072, 4096, 1, 128), (1_180_000, 1024, 9, 516)],
)
def test_many_ranks_take_as_many_steps_in_a_start_as_one(
    tokens: int, length: int, of_step: int, on_one_rank: int, ranks: int
) -> None:
    """Each needs a sequence, where a step of one rank has few."""
    default = BlockStartConfig()
    assert default.sequences_of_step(tokens, length) == of_step
    size, count = default.micro_batches(tokens, length, ranks, 1)
    batches = -(-tokens // length // (size * count * ranks))  # as many as are read
    steps = default.passes(tokens, length, ranks) * max(1, batches)
    assert 0.7 * on_one_rank <= steps <= 1.15 * on_one_rank + 4
    assert BlockStartConfig(epochs=0).passes(tokens, length, ranks) == 0
    assert BlockStartConfig(batch=1024).passes(tokens, length, ranks) == 4
