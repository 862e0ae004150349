"""Batch arithmetic, and every "auto" of a DeepSpeed JSON."""

from __future__ import annotations

import json
from pathlib import Path

import deepspeed
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.batch import BATCH, batch_arithmetic, with_batch
from sparseforge_ds.config.deepspeed_config import read_deepspeed_json, resolve, training_dtype, zero_stage
from tests.tiny_folders import deepspeed_json, write_json

SHIPPED = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))


def filled(content, world_size=2, bf16=False, fp16=False, fuses_optimizer=False, **flags):
    config = SparseForgeConfig.from_dict(content.get("sparseforge", {}))
    arguments = RunArguments(deepspeed="x.json", **flags)
    return resolve(
        content,
        arguments,
        config,
        world_size=world_size,
        hidden_size=64,
        supports_bf16=bf16,
        supports_fp16=fp16,
        fuses_optimizer=fuses_optimizer,
    )


def batch(train="auto", micro="auto", accumulation="auto", world_size=2):
    given_keys = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    return batch_arithmetic({key: value for key, value in given_keys.items() if value is not None}, world_size)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((8, "auto", "auto"), (8, 4, 1)),
        ((8, None, 2), (8, 2, 2)),
        ((8, 1, None), (8, 1, 4)),
        ((8, 2, 2), (8, 2, 2)),
        (("auto", 3, 2), (12, 3, 2)),
        ((None, 3, None), (6, 3, 1)),
        ((None, None, None), (2, 1, 1)),
    ],
)
def test_missing_batch_keys_are_computed(keys, expected):
    assert batch(*keys) == dict(zip(BATCH, expected, strict=True))


@pytest.mark.parametrize(
    ("keys", "world_size"), [((8, "auto", "auto"), 3), ((8, 3, None), 2), ((8, 4, 4), 2), ((1, "auto", 1), 2)]
)
def test_a_batch_that_cannot_be_divided_names_ones_that_can(keys, world_size):
    with pytest.raises(ValueError, match=f"train_batch_size = {keys[0]} .* {world_size} ranks.*use ") as caught:
        batch(*keys, world_size=world_size)
    for suggestion in str(caught.value).split("): use ")[1].split(",")[0].split(" or "):
        batch(int(suggestion), *keys[1:], world_size=world_size)


@given(
    train=st.integers(1, 64),
    micro=st.none() | st.integers(1, 8),
    accumulation=st.none() | st.integers(1, 8),
    world_size=st.integers(1, 8),
)
def test_accepted_batches_add_up(train, micro, accumulation, world_size):
    try:
        result = batch(train, micro, accumulation, world_size)
    except ValueError:
        assume(False)
        return
    its_train, its_micro, its_accumulation = (result[name] for name in BATCH)
    assert its_train == train == its_micro * its_accumulation * world_size
    assert micro in (None, its_micro)
    assert accumulation in (None, its_accumulation)


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", True])
def test_an_impossible_batch_size_is_refused(value):
    with pytest.raises(ValueError, match="train_batch_size = .* not valid"):
        batch(train=value)


@pytest.mark.parametrize(
    ("given_keys", "flags", "expected"),
    [
        ((8, "auto", "auto"), (64, None), (64, 8, 1)),
        ((8, "auto", "auto"), (64, 2), (64, 2, 4)),
        ((8, 1, 1), (None, 1), (8, 1, 1)),
        ((8, 2, 4), (64, None), (64, 2, 4)),
        (("auto", "auto", 4), (64, None), (64, 2, 4)),
        ((16, 2, 4), (16, None), (16, 2, 1)),  # as the JSON has it, on other ranks
        ((8, 8, 1), (8, 1), (8, 1, 1)),
        (("auto", 2, 3), (None, 4), (96, 4, 3)),
        ((8, "auto", "auto"), (None, 2, 3), (48, 2, 3)),  # as transformers has it
        ((8, 4, "auto"), (None, None, 3), (96, 4, 3)),
        ((8, 1, 1), (64, None, 4), (64, 2, 4)),
    ],
)
def test_flags_win_over_the_batch_of_the_json(given_keys, flags, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    content = dict(zip(names, given_keys, strict=True))
    if flags == (None, 1):
        assert with_batch(content, None, None) == content
    assert batch_arithmetic(with_batch(content, *flags), 8) == dict(zip(BATCH, expected, strict=True))


def test_the_optimizer_is_fused_where_that_is_left_open():
    content = deepspeed_json()
    content["optimizer"]["params"] |= {"torch_adam": True, "fused": "auto"}
    assert filled(content)["optimizer"]["params"]["fused"] is False
    assert filled(content, fuses_optimizer=True)["optimizer"]["params"]["fused"] is True


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, False), ({"steps_per_print": 10}, True), ({"timers": {}}, True)],
)
def test_the_clock_of_throughput_stops_no_device_unless_it_is_read(keys, expected):
    settings = deepspeed.DeepSpeedConfig({**filled({**deepspeed_json(), **keys}, world_size=1), "sparseforge": {}})
    assert settings.timers_config.enabled is expected


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
@pytest.mark.parametrize("accelerated", [False, True])
def test_shipped_configurations_resolve(path, accelerated):
    content = read_deepspeed_json(str(path))
    result = filled(content, bf16=accelerated)
    assert "auto" not in json.dumps(result)
    assert training_dtype(result) == (torch.bfloat16 if accelerated else torch.float32)
    assert zero_stage(result) == int(path.name[4])
    assert result["optimizer"]["params"]["lr"] == 4e-3
    assert result["train_batch_size"] == 8
    assert SparseForgeConfig.from_dict(result["sparseforge"]) == SparseForgeConfig.from_json(path)
    assert read_deepspeed_json(str(path)) == content, "the input is not changed"


def test_all_stages_are_shipped():
    assert [path.name for path in SHIPPED] == ["zero1.json", "zero2.json", "zero3.json", "zero3_offload.json"]


def test_flags_win_over_the_file_and_the_file_over_defaults():
    content = deepspeed_json()
    content["optimizer"]["params"] = {"lr": 3e-4, "weight_decay": 0.1, "betas": "auto"}
    assert filled(content)["optimizer"]["params"] == {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.999]}
    for kind, has_decay in (("Rprop", False), ("NAdam", True)):
        params = filled({**content, "optimizer": {"type": kind}, "zero_allow_untested_optimizer": True})["optimizer"][
            "params"
        ]
        assert ("weight_decay" in params) == has_decay, kind
    params = filled(content, learning_rate=1e-5, weight_decay=0.0)["optimizer"]["params"]
    assert (params["lr"], params["weight_decay"]) == (1e-5, 0.0)


def test_the_default_learning_rate_shrinks_with_width():
    def rate(hidden_size):
        content = deepspeed_json()
        config = SparseForgeConfig.from_dict(content["sparseforge"])
        result = resolve(
            content,
            RunArguments(deepspeed="x"),
            config,
            world_size=1,
            hidden_size=hidden_size,
            supports_bf16=False,
            supports_fp16=False,
        )
        return result["optimizer"]["params"]["lr"]

    assert rate(32) == rate(64) == 4e-3
    assert rate(4096) == pytest.approx(4e-3 / 64)


def test_precision_is_chosen_by_what_the_accelerator_can_do():
    pair = {**deepspeed_json(), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    assert training_dtype(filled(pair, bf16=True, fp16=True)) == torch.bfloat16
    assert training_dtype(filled(pair, fp16=True)) == torch.float16
    assert training_dtype(filled(pair)) == torch.float32
    assert training_dtype(filled({**pair, "fp16": {"enabled": True}}, bf16=True)) == torch.float16


def test_an_auto_that_nobody_knows_is_named():
    content = deepspeed_json()
    content["zero_optimization"]["sub_group_size"] = "auto"
    with pytest.raises(ValueError, match="zero_optimization.sub_group_size"):
        filled(content)


def test_what_hardware_decides_is_checked_when_it_is_known():
    content = {**deepspeed_json(stage=0), "fp16": {"enabled": "auto"}}
    assert training_dtype(filled(content)) == torch.float32
    with pytest.raises(ValueError, match="fp16 at ZeRO stage 0"):
        filled(content, fp16=True)


def test_the_file_must_be_there_and_be_json(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json: no such file.* zero3, zero3_offload$"):
        read_deepspeed_json(str(tmp_path / "nowhere.json"))
    for name, text in (("cut.json", '{"train_batch_size": '), ("binary.json", "\udcff")):
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match=f"{name}: not a readable JSON"):
            read_deepspeed_json(str(tmp_path / name))
    with pytest.raises(ValueError, match="not a readable JSON"):
        read_deepspeed_json(str(tmp_path))
    with pytest.raises(ValueError, match="not a JSON object"):
        read_deepspeed_json(str(write_json(tmp_path / "list.json", [])))


def test_a_scheduler_of_deepspeed_is_refused(tmp_path):
    with pytest.raises(ValueError, match='remove the "scheduler" block: .* choose it by --lr_scheduler_type'):
        read_deepspeed_json(str(write_json(tmp_path / "a.json", {"scheduler": {"type": "WarmupLR"}})))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "activation_checkpointing",
            {"partition_activations": True},
            "models of transformers do not use it; ",
        ),
        ("data_efficiency", {"enabled": True, "seed": 3}, "the launcher reads its own data; remove it"),
        ("checkpoint", {"load_universal": True}, "checkpoints of any layout are loaded as they are; remove it"),
        ("dataloader_drop_last", True, "the launcher reads its own data; remove it"),
    ],
)
def test_what_a_run_does_not_use_is_refused_where_it_is_switched_on(tmp_path, key, value, message):
    with pytest.raises(ValueError, match=f"{key}.* has no effect here: {message}"):
        read_deepspeed_json(str(write_json(tmp_path / "a.json", {**deepspeed_json(), key: value})))
    off = {**value, next(iter(value)): False, "size": 3} if isinstance(value, dict) else False
    assert read_deepspeed_json(str(write_json(tmp_path / "b.json", {**deepspeed_json(), key: off})))[key] == off


@pytest.mark.parametrize("block", [{"enabled": True, "autoep_size": 2}, True])
def test_expert_parallelism_is_refused_before_deepspeed_sees_it(tmp_path, block):
    with pytest.raises(ValueError, match="expert_parallel = .*remove it: ZeRO stage 3"):
        read_deepspeed_json(str(write_json(tmp_path / "a.json", {"expert_parallel": block})))


def test_expert_parallelism_that_is_switched_off_is_none(tmp_path):
    content = {**deepspeed_json(), "expert_parallel": {"enabled": False, "autoep_size": 2}}
    assert read_deepspeed_json(str(write_json(tmp_path / "a.json", content))) == content


@pytest.mark.parametrize(
    "block", [{"nebula": {}}, {"datastates_ckpt": {}}, {"checkpoint": {"writer": {"type": "fast"}}}]
)
def test_a_writer_that_saves_in_the_background_is_refused(tmp_path, block):
    with pytest.raises(ValueError, match="remove .*not on disk when they say so"):
        read_deepspeed_json(str(write_json(tmp_path / "a.json", block)))
