"""Whatever stands in a DeepSpeed JSON is either what DeepSpeed does, or one line that says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.config.deepspeed_config import read_deepspeed_json
from sparseforge_ds.config.deepspeed_keys import check_keys
from tests.tiny_folders import deepspeed_json, write_json

SGD = {"type": "SGD", "params": {"lr": 1e-3}}
ZERO = "zero_optimization"
OFFLOAD = f"{ZERO}/offload_optimizer"
PARAMS = "optimizer/params"

# A place in a good JSON, what is put there, and the words of the message.
REFUSED: list[tuple[str, Any, list[str]]] = [
    # keys
    (
        "zero_optimisation",
        {},
        ["unknown key 'zero_optimisation', which DeepSpeed would ignore", "'zero_optimization'?"],
    ),
    ("train_batchsize", 8, ["did you mean 'train_batch_size'?"]),
    ("learning_rate", 1e-3, ["it is a flag: --learning_rate"]),
    ("pattern", "2:4", ['it belongs in the "sparseforge" block']),
    ("stage", 3, ['it belongs in "zero_optimization"']),
    ("lr", 1e-3, ["it belongs in optimizer.params"]),
    ("pipeline", {"stages": 2}, ["unknown key 'pipeline'", "remove it"]),
    ("amp", {"enabled": True}, ["unknown key 'amp'"]),
    ("curriculum_learning", {}, ["has been removed"]),
    (f"{ZERO}/stagee", 1, ["DeepSpeed cannot use it: DeepSpeedZeroConfig: stagee = 1: Extra inputs are not permitted"]),
    (f"{ZERO}/mics_shard_size", 2, [f"'{ZERO}.mics_shard_size' is no longer supported"]),
    (OFFLOAD, {"devise": "cpu"}, ['offload_optimizer.devise = "cpu": Extra inputs']),
    (f"{ZERO}/leaf_module", {"suffixes": []}, ["leaf_module.suffixes = []: Extra inputs"]),
    (f"{ZERO}/cpu_offload", True, [f"{ZERO}.cpu_offload: an old name; use {ZERO}.offload_optimizer"]),
    ("bf16", {"enable": True}, ["DeepSpeedBF16Config: enable = true: Extra inputs"]),
    ("torch_autocast", {"enabeld": True}, ["did you mean torch_autocast.enabled?"]),
    ("data_types", {"grad_accum": "fp32"}, ["did you mean data_types.grad_accum_dtype?"]),
    ("timers", {"throughput": {"enable": True}}, ["DeepSpeedThroughputTimerConfig", "enable"]),
    # types and values
    (f"{ZERO}/stage", 4, [f"{ZERO}.stage = 4 is not valid: use 0, 1, 2 or 3"]),
    *(
        (f"{ZERO}/stage", value, [f"{ZERO}.stage = ", "use 0, 1, 2 or 3"])
        for value in ("3", "auto", 2.5, None, True, -1)
    ),
    *((ZERO, value, [f"{ZERO} = ", 'expected an object, like {"stage": 3}']) for value in (None, [], True, 3)),
    *((key, "auto", [f'{key} = "auto": expected an object']) for key in ("bf16", "fp16", ZERO, "optimizer", "wandb")),
    *((key, "auto", [f'{key} = "auto": expected an']) for key in ("tensorboard", "comet", "checkpoint", "data_types")),
    (OFFLOAD, "auto", [f'{ZERO}.offload_optimizer = "auto": expected an object, or leave it out']),
    (f"{ZERO}/offload_param", "auto", [f'{ZERO}.offload_param = "auto": expected an object']),
    ("gradient_clipping", 10**400, ["100000000000000000000000000000 is too large; write an integer of 64 bits"]),
    (f"{PARAMS}/lr", -(2**63), ["-9223372036854775808 is too large"]),
    (f"{ZERO}/reduce_bucket_size", "5e8", ["reduce_bucket_size", '"5e8"', "integer"]),
    (f"{ZERO}/reduce_bucket_size", 0, ["greater than 0"]),
    (OFFLOAD, "cpu", ['offload_optimizer = "cpu"', "dictionary"]),
    (OFFLOAD, {"device": "gpu"}, ['offload_optimizer.device = "gpu"', "'cpu'"]),
    (f"{ZERO}/leaf_module", 3, ["leaf_module"]),
    (f"{ZERO}/compute_grad_norm", False, ["compute_grad_norm", "Stage 1 or 2"]),
    ("bf16", True, ["bf16 = true: expected an object", "leave it out"]),
    ("bf16", {"enabled": "yes"}, ['bf16.enabled = "yes": expected true or false']),
    ("fp16", None, ["fp16 = null"]),
    ("fp16", {"enabled": True, "loss_scale": "dynamic"}, ["fp16.loss_scale"]),
    ("flops_profiler", {"enabled": "x"}, ["flops_profiler.enabled"]),
    ("gradient_clipping", "1.0", ['gradient_clipping = "1.0": expected a number']),
    ("gradient_clipping", None, ["gradient_clipping = null"]),
    ("gradient_clipping", -1, ["use a number >= 0"]),
    ("steps_per_print", 1.5, ["steps_per_print = 1.5: expected an integer"]),
    ("steps_per_print", 0, ["steps_per_print = 0 is not valid: use an integer >= 1, or leave it out"]),
    ("log_level", "foo", ['log_level = "foo" is not valid: use one of debug, info, warning, error, critical']),
    ("prescale_gradients", "no", ["expected true or false"]),
    ("communication_data_type", "fp99", ["fp99"]),
    ("gradient_allreduce_op", "sum", ["not supported with ZeRO stage 3"]),
    ("data_types", {"grad_accum_dtype": "fp8"}, ["use one of fp32, fp16, bf16"]),
    ("checkpoint", {"tag_validation": "x"}, ["tag_validation"]),
    # optimizers
    ("optimizer", {}, ['no "optimizer" in the DeepSpeed JSON; add {"type": "AdamW"']),
    ("optimizer", None, ["optimizer = null", '"AdamW"']),
    ("optimizer", "AdamW", ['optimizer = "AdamW": expected an object']),
    ("optimizer", {"typ": "AdamW"}, ["did you mean optimizer.type?"]),
    ("optimizer", {"type": 3}, ["optimizer.type = 3: expected a string"]),
    ("optimizer", {"type": "AdamWW"}, ['no such optimizer; did you mean "AdamW"?']),
    ("optimizer", {"type": "adam w"}, ['did you mean "AdamW"?']),
    ("optimizer", {"type": "sgd"}, ['did you mean "SGD"?']),
    ("optimizer", {"type": "lr_scheduler"}, ["no such optimizer"]),
    ("optimizer", SGD, ["ZeRO stage 3 was not made for it", '"AdamW"', "zero_allow_untested_optimizer"]),
    ("optimizer", {"type": "Adagrad"}, ["past the step hooks", "or stage 0"]),
    ("optimizer", {"type": "OneBitAdam"}, ["OneBitAdam communicates compressed moments", "use AdamW"]),
    ("optimizer", {"type": "Muon"}, ["reduce_scatter = true: DeepSpeed's Muon", "set it to false"]),
    (
        "optimizer",
        {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 0.02, "adam_lr": 1e-3}},
        ["optimizer.params.lr = 0.001 has no effect: matrices train at muon_lr", "leave one of the three out"],
    ),
    ("optimizer", {"type": "Muon", "params": {"muon_lr": "0.02"}}, ['params.muon_lr = "0.02": expected a number']),
    ("optimizer", {"type": "Muon", "params": {"muon_lr": 0, "adam_lr": 1e-3}}, ["muon_lr = 0: no matrix would be"]),
    ("optimizer", {"type": "AdamW", "legacy_fusion": True}, ['"legacy_fusion"', "remove it"]),
    ("optimizer", {"type": "AdamW", "params": None}, ["optimizer.params = null"]),
    ("optimizer", {"type": "AdamW", "params": {"fused": "auto"}}, ["FusedAdam has no", 'add "torch_adam": true']),
    (f"{PARAMS}/weight_deacy", 0.1, ["optimizer.params.weight_deacy: AdamW has no", "did you mean weight_decay?"]),
    (f"{PARAMS}/max_grad_norm", 1.0, ["gradient_clipping"]),
    (f"{PARAMS}/lr", "1e-3", ['optimizer.params.lr = "1e-3": expected a number']),
    (f"{PARAMS}/lr", -1, ["optimizer.params.lr = -1", ">= 0"]),
    (f"{PARAMS}/betas", [0.9], ["use two numbers"]),
    (f"{PARAMS}/betas", [0.9, 1.5], ["use two numbers"]),
    (f"{PARAMS}/torch_adam", "true", ["expected true or false"]),
    (PARAMS, {"torch_adam": True, "fused": True, "foreach": True}, ["`fused` and `foreach`"]),
    # what masks do not survive: what `zero.refuse` has of an engine, read off the JSON
    (f"{ZERO}/zenflow", {"topk_ratio": 0.1}, ["zenflow", "remove it"]),
    (OFFLOAD, {"device": "cpu", "super_offload": True}, ["super_offload", "set it to false"]),
    (OFFLOAD, {"device": "cpu", "ratio": 0.5}, ["ratio = 0.5", "set 1.0"]),
    (OFFLOAD, {"device": "nvme", "nvme_path": "/local"}, ['offload_optimizer.device = "nvme"', 'set "cpu"']),
    (
        f"{ZERO}/offload_param",
        {"device": "nvme", "nvme_path": "/local"},
        ['offload_param.device = "nvme"', 'set "cpu"'],
    ),
    (ZERO, {"stage": 1, "offload_param": {"device": "cpu"}}, ["offload_param works from ZeRO stage 3 on", "is 1"]),
    (ZERO, {"stage": 0, "offload_optimizer": {"device": "cpu"}}, ["offload_optimizer works from ZeRO stage 1 on"]),
    (f"{ZERO}/zero_quantized_weights", True, ["zero_quantized_weights", "set it to false"]),
    (f"{ZERO}/zero_quantized_nontrainable_weights", True, ["not the codes that stand in", "set it to false"]),
    ("tensor_parallel", {"autotp_size": 2}, ["tensor_parallel.autotp_size = 2", "remove it"]),
    ("sequence_parallel_size", 2.5, ["sequence_parallel_size = 2.5", "expected an integer"]),
    ("compile", {"deepcompile": True}, ["compile.deepcompile", "set it to false"]),
    ("managed_gradient_accumulation", False, ["managed_gradient_accumulation", "set it to true"]),
    ("torch_autocast", {"enabled": True, "dtype": "float16"}, ["torch_autocast: it keeps weights in fp32", '"bf16"']),
    ("torch_autocast", {"enabled": True, "dtype": "bfloat16"}, ["torch_autocast: it keeps weights in fp32", '"bf16"']),
    # loggers
    ("wandb", {"enabled": True}, ["wandb: the package wandb is not installed; pip install wandb, or remove 'wandb'"]),
    ("comet", {"enabled": True}, ["the package comet_ml is not installed"]),
]


def put(path: str, value: Any) -> dict[str, Any]:
    content = deepspeed_json()
    *parents, key = path.split("/")
    at = content
    for parent in parents:
        at = at[parent]
    at[key] = value
    return content


@pytest.fixture
def without_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that nobody has installed wandb or comet beside the tests."""
    import importlib.util

    find = importlib.util.find_spec
    missing = ("wandb", "comet_ml")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else find(name, *a))


@pytest.mark.parametrize(
    ("path", "value", "words"), REFUSED, ids=[f"{path}={json.dumps(value)}"[:60] for path, value, _ in REFUSED]
)
def test_a_configuration_that_cannot_work_is_one_line(
    tmp_path: Path, without_loggers: None, path: str, value: Any, words: list[str]
) -> None:
    file = write_json(tmp_path / "ds.json", put(path, value))
    with pytest.raises(ValueError) as raised:
        read_deepspeed_json(str(file))
    message = str(raised.value)
    assert message.startswith(f"--deepspeed {file}: ") and "\n" not in message
    assert [word for word in words if word not in message] == [], message


def test_numbers_of_python_are_held_to_64_bits_too() -> None:
    for key, value in (("gradient_clipping", 10**400), ("steps_per_print", 10**400), ("steps_per_print", float("inf"))):
        with pytest.raises(ValueError, match=f"{key} = .*: expected a"):
            check_keys({**deepspeed_json(), key: value})
    check_keys({**deepspeed_json(), "gradient_clipping": 1e300})


def test_two_precisions_are_refused_and_fp16_without_zero(tmp_path: Path) -> None:
    pair = {**deepspeed_json(), "bf16": {"enabled": True}, "fp16": {"enabled": True}}
    for content, words in (
        (pair, "both enabled"),
        ({**pair, "bfloat16": {"enabled": False}}, "bf16 and bfloat16 are two spellings of one key; leave one of them"),
        ({**deepspeed_json(stage=0), "fp16": {"enabled": True}}, 'fp16 at ZeRO stage 0: .*"loss_scale": 1'),
        ({**deepspeed_json(stage=0), "data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype = .*use stage 1"),
    ):
        with pytest.raises(ValueError, match=words):
            read_deepspeed_json(str(write_json(tmp_path / "ds.json", content)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{ZERO}/reduce_bucket_size", 5e8),
        (f"{ZERO}/stage", 0),
        (OFFLOAD, {"device": "cpu"}),
        (OFFLOAD, {"device": "none"}),
        (f"{ZERO}/offload_param", {"device": "cpu", "pin_memory": False}),
        ("optimizer", {"type": "ADAMW", "params": {"lr": "auto", "torch_adam": True, "adam_w_mode": True}}),
        ("optimizer", {"type": "Adam", "params": {"lr": 1e-3, "bias_correction": True}}),
        ("steps_per_print", 1e9),
        ("log_level", "INFO"),
        ("tensorboard", {"enabled": False}),
        ("wandb", {"enabled": False}),
        ("fp16", {"enabled": "auto"}),
        ("gradient_clipping", "auto"),
        ("torch_autocast", {"enabled": False}),
    ],
    ids=str,
)
def test_a_working_configuration_is_left_as_it_is(tmp_path: Path, path: str, value: Any) -> None:
    content = put(path, value)
    assert read_deepspeed_json(str(write_json(tmp_path / "ds.json", content))) == content


def test_an_optimizer_that_zero_does_not_know_is_for_stage_0_or_by_request(tmp_path: Path) -> None:
    for content in (
        {**deepspeed_json(stage=0), "optimizer": SGD},
        {**deepspeed_json(), "optimizer": SGD, "zero_allow_untested_optimizer": True},
        {**deepspeed_json(stage=0), "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}},
    ):
        assert read_deepspeed_json(str(write_json(tmp_path / "ds.json", content))) == content
    for kind, words in (
        ("LBFGS", "doesn't support per-parameter options"),
        ("Adafactor", "keeps sums of rows and col"),
    ):
        content = {**deepspeed_json(stage=0), "optimizer": {"type": kind}}
        with pytest.raises(ValueError, match=f"{kind}.*{words}"):
            read_deepspeed_json(str(write_json(tmp_path / "ds.json", content)))
    flat = {**deepspeed_json(stage=1), "optimizer": {"type": "Adafactor"}, "zero_allow_untested_optimizer": True}
    assert read_deepspeed_json(str(write_json(tmp_path / "ds.json", flat))) == flat


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("  \n", "it is empty"),
        ('{"bf16": {"enabled": true},}', r"line 1 column \d+ .*no comma may stand before } or ]"),
        ('{"a": [1,\n]}', "no comma may stand before } or ]"),
        ('{\n  // the demo\n  "bf16": {}}', "JSON has no comments"),
        ("{'bf16': {}}", "double quotes"),
        ('{"bf16": {}, "bf16": {}}', 'key "bf16" comes twice'),
        ('{"sparseforge": {"seed": 1, "seed": 2}}', 'key "seed" comes twice'),
        ('{"gradient_clipping": NaN}', "NaN is no JSON number"),
        ('{"gradient_clipping": 1e999}', "gradient_clipping = Infinity: expected a number"),
        ('{"steps_per_print": 1e999}', "steps_per_print = Infinity: expected an integer"),
        ('{"gradient_clipping": -Infinity}', "-Infinity is no JSON number"),
        ("[" * 100_000, "nests too deep"),
    ],
)
def test_a_file_that_is_no_json_says_where_and_why(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as raised:
        read_deepspeed_json(str(path))
    assert str(raised.value).startswith(f"--deepspeed {path}: ") and "\n" not in str(raised.value)


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("\ufeff" + json.dumps(deepspeed_json()), encoding="utf-8")
    assert read_deepspeed_json(str(path)) == deepspeed_json()
