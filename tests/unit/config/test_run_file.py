"""A whole run in one YAML file: what wins, what is refused, and that a printed one makes the same run."""

from __future__ import annotations

import json

import pytest
import yaml

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.command_line import parse_arguments
from sparseforge_ds.config.deepspeed_config import read_deepspeed
from sparseforge_ds.config.run_file import run_file_text
from sparseforge_ds.train.spec import settings_of
from tests.distributed import ROOT
from tests.tiny_folders import deepspeed_json, write_json

WHOLE = """\
model: some/model
dataset: [a.jsonl=0.7, "b.jsonl=0.3"]
report_to: none
learning_rate: 1e-4      # YAML 1.1 would read text
project: yes             # and here true
per-device-train-batch-size: 2
keep_best: true
lr_scheduler_type: warmup_stable_decay
lr_scheduler_kwargs: {num_decay_steps: 4}
eval_dataset: stdlib:heldout
resume: auto
deepspeed: {json}
sparseforge:
  pattern: 2:4           # and here the number 124
  seed: 3
"""


@pytest.fixture
def run_file(tmp_path):
    """Return a function that writes a run file, with the path of a DeepSpeed JSON in place of {json}."""
    write_json(tmp_path / "ds.json", deepspeed_json(batch=4))

    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text.replace("{json}", str(tmp_path / "ds.json")), encoding="utf-8")
        return str(tmp_path / "run.yaml")

    return write


def test_a_file_has_flags_and_block_and_the_path_of_the_rest(run_file, tmp_path):
    path = run_file(WHOLE)
    arguments = parse_arguments(["--config", path])
    assert arguments == RunArguments(
        str(tmp_path / "ds.json"),
        "some/model",
        dataset=["a.jsonl=0.7", "b.jsonl=0.3"],
        report_to=["none"],
        learning_rate=1e-4,
        project="yes",
        micro_batch=2,
        keep_best=True,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs='{"num_decay_steps": 4}',
        eval_dataset="stdlib:heldout",
        resume="auto",
        config=path,
    )
    content, config = settings_of(arguments)
    assert content["train_micro_batch_size_per_gpu"] == 2 and content["train_batch_size"] == 4
    assert (config.pattern, config.seed, config.max_steps) == ("2:4", 3, 8), "other keys are those of the JSON"


def test_flags_of_the_command_line_win(run_file):
    path = run_file(WHOLE)
    line = "--model=m --dataset c --keep_best False --max_steps=3 --deepspeed=zero1"
    arguments = parse_arguments(["--config", path, *line.split()])
    assert (arguments.model, arguments.dataset, arguments.keep_best) == ("m", ["c"], False)
    content, config = settings_of(arguments)
    assert content["zero_optimization"]["stage"] == 1
    assert (config.max_steps, config.seed) == (3, 3)


@pytest.mark.parametrize("is_inline", [True, False])
def test_a_printed_run_is_the_same_run(run_file, tmp_path, is_inline):
    full_json = deepspeed_json(stage=2, batch=8, low_rank={"k": 16}, allow_dense=["*.a"])
    text = WHOLE.replace("project: yes", "project: '1e-4'\nallow_dense: ['*.b']\nsplit: 'no'")
    if is_inline:
        text = text.replace("{json}", json.dumps(full_json))
    first = parse_arguments(["--config", run_file(text), "--seed", "7", "--global_batch=16"])
    content, config = settings_of(first)
    printed = tmp_path / "printed.yaml"
    printed.write_text(run_file_text(first, content, config.to_dict()), encoding="utf-8")

    second = parse_arguments(["--config", str(printed)])
    assert (second.seed, second.project, second.split) == (7, "1e-4", "no")
    same = {"deepspeed": "", "config": ""}
    assert RunArguments(**{**vars(first), **same}) == RunArguments(**{**vars(second), **same})
    again, config_again = settings_of(second)
    assert config_again == config and "*.b" in config.allow_dense
    del content["sparseforge"], again["sparseforge"]
    assert again == content
    assert yaml.safe_load(printed.read_text(encoding="utf-8"))["sparseforge"]["pattern"] == "2:4", "to any reader"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stepz: 3", "--max_stepz: unknown flag; did you mean --max_steps?"),
        ("deepseed: zero1", "--deepseed: unknown flag; did you mean --deepspeed?"),
        ("pattern: 2:4", '--pattern: not a flag, but a key of the "sparseforge" block'),
        ("bf16: {}", '--bf16: not a flag, but a key of the DeepSpeed JSON: "bf16"'),
        ("num_gpus: 2", "--num_gpus: the deepspeed launcher has this flag"),
        ("print_config: true", "print_config belongs to the command line alone; remove it"),
        ("max_steps: many", "max_steps = 'many': expected an integer, or null"),
        ("seq_length: 1.5", "seq_length = 1.5: expected an integer"),
        ("keep_best: yes", "keep_best = 'yes': expected true or false"),
        ("document_frame: bs", "document_frame = 'bs' is not valid: use one of auto, bos, eos, both"),
        ("learning_rate: .inf", "learning_rate = '.inf': expected a number, or null"),
        ("lr: 1\nlearning_rate: 1", 'key "learning_rate" is learning_rate, which comes twice; keep one of them'),
        ("seed: 1\nseed: 2", 'not a readable YAML file (key "seed" comes twice in one object; keep one'),
        ("sparseforge: [1]", "sparseforge = [1]: expected an object with keys"),
        ("seed: [", "not a readable YAML file (while parsing"),
        ("model: !!python/object:os.system {}", "not a readable YAML file (could not determine a constructor"),
        ("dataset: &a [*a]", "not a readable YAML file (Circular reference"),
        ("model: 2026-01-01\nsplit: !!timestamp 2026-01-01", "not a readable YAML file (Object of type date"),
        ("- seed", "no keys; write flags as keys, like max_steps: 400"),
        ("", "no keys; write flags as keys, like max_steps: 400"),
        ("seed: 1", "key deepspeed is missing: give the DeepSpeed JSON, for example --deepspeed ds_configs/zero3.json"),
    ],
)
def test_a_wrong_file_is_one_line(run_file, text, message):
    path = run_file(text)
    with pytest.raises(ValueError) as raised:
        parse_arguments(["--config", path])
    assert str(raised.value).startswith(f"--config {path}: {message}") and "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="--config .*none.yaml: no such file; give a YAML file, as --print_config"):
        parse_arguments(["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deepspeed: {zero_optimisation: {}}", "unknown key 'zero_optimisation', which DeepSpeed would ignore"),
        (
            "deepspeed: {json}\nsparseforge: {patern: 2:4}",
            "sparseforge.patern: unknown key; did you mean sparseforge.pat",
        ),
        ("deepspeed: {train_batch_size: 2, optimizer: {type: AdamW}}", 'no "sparseforge" block'),
    ],
)
def test_a_wrong_key_below_the_flags_is_named(run_file, text, message):
    arguments = parse_arguments(["--config", run_file(text)])
    with pytest.raises(ValueError) as raised:
        settings_of(arguments)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_the_example_can_be_read():
    arguments = parse_arguments(["--config", str(ROOT / "examples" / "run.yaml")])
    assert read_deepspeed(arguments)["zero_optimization"]["stage"] == 3


def test_a_seed_beside_a_printed_run_is_that_of_everything(tmp_path):
    first = parse_arguments(["--deepspeed", "zero1", "--max_steps", "7"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(run_file_text(first, settings_of(first)[0], settings_of(first)[1].to_dict()))
    again = parse_arguments(["--config", str(printed), "--seed", "1"])
    assert again.seed == settings_of(again)[1].seed == 1


def test_a_file_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("deepspeed: ~/ds.json")
    arguments = parse_arguments(["--config=~/run.yaml"])
    assert (arguments.config, arguments.deepspeed) == (f"{tmp_path}/run.yaml", f"{tmp_path}/ds.json")


@pytest.mark.parametrize(("in_file", "flag"), [("epochs: 2", "max_steps"), ("max_steps: 7", "epochs")])
def test_a_length_of_the_command_line_replaces_that_of_the_file(run_file, in_file, flag):
    path = run_file(f"deepspeed: zero1\n{in_file}")
    arguments = parse_arguments(["--config", path, f"--{flag}=3"])
    assert {"max_steps": arguments.max_steps, "epochs": arguments.epochs} == {
        "max_steps": None,
        "epochs": None,
        flag: 3,
    }
