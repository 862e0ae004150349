"""Bad input on two real ranks: the same program that the launcher starts, ending with one clear error on all of them.

Each test asserts the thing and the cure in the message, exit code 1 on every rank (a hang is a timeout), and that
nothing half-written has a final name. Ranks agree on the errors of a function in one place, for which one of them is
enough here; the others are in the tests of that function, such as `make_spec` and `check_run_folder`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparseforge_ds.checkpoint.manifest import fingerprint
from tests.distributed import run_distributed
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_json, write_model, write_text
from tests.tiny_models import tiny_llama

UNUSED_TOKEN = 1
"""A byte that no text here has."""


def _main(command_line: list[str], largest_file: int | None = None) -> tuple[int, str]:
    """Exit code and stderr of the trainer's main function."""
    from sparseforge_ds.extras.planner.dry_run import dry_run
    from sparseforge_ds.train.trainer import main

    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = main(command_line, dry_run)
    if code and largest_file is not None:
        os._exit(code)  # like the launched process: without saying goodbye to ranks that still wait
    return code, stderr.getvalue()


def _main_that_loses_weights(command_line: list[str]) -> tuple[int, str]:
    """Do `_main`; the second step writes infinities to the embedding of a token that no text has.

    No layer has a hook of ours afterwards, though the next step would have measured.
    """
    from deepspeed import DeepSpeedEngine

    step = DeepSpeedEngine.step
    hooks = []

    def lossy_step(engine: DeepSpeedEngine) -> None:
        hooks.append(engine.module.model.layers[0].mlp.up_proj._forward_hooks)
        step(engine)
        if engine.global_steps == 2:
            engine.module.get_input_embeddings().weight.data[UNUSED_TOKEN] = torch.inf

    with mock.patch.object(DeepSpeedEngine, "step", lossy_step):
        outcome = _main(command_line)
    assert hooks and not hooks[0]
    return outcome


def _mains(command_lines: list[list[str]]) -> list[tuple[int, str]]:
    return [_main(line) for line in command_lines]


class Inputs:
    """A good run of eight steps, to be spoiled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self.text = write_text(folder / "text.jsonl", documents=200)
        self.run = folder / "run"
        self.content = deepspeed_json(batch=8)
        self.flags = {
            "model": str(self.model),
            "dataset": str(self.text),
            "output_dir": str(self.run),
            "seq_length": "32",
            "log_every": "1",
            "learning_rate": "1e-3",
        }

    def command_line(self, *switches: str) -> list[str]:
        path = write_json(self.folder / "ds.json", self.content)
        return ["--deepspeed", str(path), *(f"--{name}={value}" for name, value in self.flags.items()), *switches]

    def train(self, *switches: str, ranks: int = 2, main: Any = _main) -> list[tuple[int, str]]:
        return run_distributed(main, ranks, self.command_line(*switches))

    def refused(self, *switches: str, ranks: int = 2, main: Any = _main) -> str:
        """Return the one message of a run that ends with code 1 everywhere."""
        outcomes = self.train(*switches, ranks=ranks, main=main)
        assert [code for code, _ in outcomes] == [1] * ranks
        assert outcomes[0][1].startswith("error: ")
        assert outcomes[0][1].count("error: ") == 1
        assert [message for _, message in outcomes[1:]] == [""] * (ranks - 1), "one message, not one per rank"
        assert not list(self.folder.rglob("*.tmp"))
        return outcomes[0][1]


@pytest.fixture
def inputs(tmp_path):
    return Inputs(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train a run to its end, which each test copies before it spoils it."""
    inputs = Inputs(tmp_path_factory.mktemp("finished"))
    inputs.flags["save_every"] = "4"
    assert [code for code, _ in inputs.train()] == [0, 0]
    return inputs


@pytest.fixture
def resumable(finished, tmp_path):
    """Copy the finished run, gone back to its first checkpoint."""
    shutil.copytree(finished.folder, tmp_path, dirs_exist_ok=True)
    inputs = object.__new__(Inputs)
    inputs.__dict__.update(finished.__dict__)
    inputs.folder = tmp_path
    inputs.run = tmp_path / "run"
    inputs.content = json.loads(json.dumps(finished.content))
    inputs.flags = {**finished.flags, "output_dir": str(inputs.run)}
    shutil.rmtree(inputs.run / "checkpoints" / "step_000008")
    return inputs


def test_a_missing_model_is_refused_by_name(inputs):
    inputs.flags["model"] = str(inputs.folder / "nowhere")
    message = inputs.refused()
    assert (
        "--model" in message
        and "nowhere: no such folder or file; give a Hugging Face model folder or a hub id" in message
    )
    assert not inputs.run.exists()


def test_weights_of_another_model_are_refused(inputs):
    weights = load_file(inputs.model / "model.safetensors")
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, inputs.model / "model.safetensors", metadata={"format": "pt"})
    assert "hold no model.layers.0.mlp.up_proj.weight" in inputs.refused()
    assert not (inputs.run / "checkpoints").exists()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_a_weight_that_is_no_float(inputs, dtype):
    """Buffers that old files keep as bool are no weights, and are left alone."""
    name = "model.layers.0.mlp.up_proj.weight"
    weights = load_file(inputs.model / "model.safetensors")
    old_mask = {"model.layers.0.self_attn.bias": torch.ones(8, 8, dtype=torch.bool)}
    save_file(
        weights | old_mask | {name: weights[name].to(dtype)}, inputs.model / "model.safetensors", {"format": "pt"}
    )
    message = f"{inputs.model}: {name} is stored as {dtype}, which transformers would cast"
    assert f"--model {message}" in inputs.refused("--dry_run", ranks=1)
    assert not inputs.run.exists()


@pytest.mark.parametrize(("stage", "flag"), [(1, "model"), (3, "model"), (3, "teacher")])
def test_a_model_whose_weights_are_not_finite(inputs, stage, flag):
    """Before the first step: it was told to resume from a checkpoint that it never wrote."""
    name = "model.layers.1.mlp.down_proj.weight"
    spoiled = inputs.folder / "spoiled"
    shutil.copytree(inputs.model, spoiled)
    weights = load_file(spoiled / "model.safetensors")
    weights[name][-1, -1] = float("inf" if flag == "teacher" else "nan")
    save_file(weights, spoiled / "model.safetensors", {"format": "pt"})
    inputs.flags[flag] = str(spoiled)
    inputs.content = deepspeed_json(stage=stage, batch=8)
    if flag == "teacher":
        inputs.content["sparseforge"]["distillation"] = {"hold": "zero3"}
    error_line = inputs.refused()
    assert (
        f"--{flag} {spoiled}: {name} is not finite in torch.float32" in error_line
        and "give a sound model" in error_line
    )
    assert not (inputs.run / "checkpoints").exists()


def test_links_are_neither_followed_nor_written_to(inputs):
    (inputs.model / "LICENSE.extra").symlink_to(inputs.text)
    assert "LICENSE.extra: is a link to" in inputs.refused()
    (inputs.model / "LICENSE.extra").unlink()
    inputs.run.mkdir()
    (inputs.run / ".lock").symlink_to(inputs.text)
    before = inputs.text.read_text()
    assert ".lock: is a link, whose target is not written to; remove it" in inputs.refused()
    assert inputs.text.read_text() == before


def test_sequences_that_ranks_cannot_share(inputs):
    inputs.flags |= {"sequence_parallel": "2", "seq_length": "31"}
    message = inputs.refused()
    assert "--sequence_parallel 2: --model" in message
    assert "--seq_length 31 is not a multiple of 2; use 30 or 32" in message
    assert not inputs.run.exists()


def test_a_dataset_without_the_field_is_refused_with_those_it_has(inputs):
    inputs.flags["text_field"] = "body"
    message = inputs.refused()
    assert "line 1: no field 'body'" in message and "--text_field (there are: text)" in message


def test_a_dataset_that_turns_bad_far_down(inputs):
    with inputs.text.open("a") as file:
        file.write('{"text": "cut of')
    assert "line 201: not JSON" in inputs.refused()
    assert list((inputs.run / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "short"}\n', "too little for one batch of 8; give more text"),
        ('{"text": ""}\n\n{"text": null}\n', "text.jsonl: there is no text in it (2 documents, all of them null or"),
    ],
)
def test_too_little_text_is_refused_before_training(inputs, content, message):
    inputs.text.write_text(content)
    assert message in inputs.refused()
    assert len(list((inputs.run / "data").iterdir())) == (0 if "null" in content else 2)
    assert not (inputs.run / "tensorboard").exists(), "TensorBoard would list it as a run"


@pytest.mark.parametrize(
    ("switches", "content", "message"),
    [
        ([], '{"text": "short"}\n', "held_out.jsonl: has 6 tokens, less than one window of --seq_length 32"),
        (["--epochs=1"], '{"text": null}\n', "--eval_dataset .*: there is no text in it"),
    ],
)
def test_a_held_out_text_that_cannot_be_scored_is_said_before_the_other_is_tokenized(
    inputs, switches, content, message
):
    held_out = inputs.folder / "held_out.jsonl"
    held_out.write_text(content)
    inputs.flags["eval_dataset"] = str(held_out)
    assert re.search(message, inputs.refused(*switches))
    assert not inputs.run.exists()


def test_a_missing_json_is_refused_on_every_rank(inputs):
    line = inputs.command_line()
    line[1] = str(inputs.folder / "nowhere.json")
    outcomes = run_distributed(_main, 2, line)
    assert [code for code, _ in outcomes] == [1, 1]
    assert "nowhere.json: no such file" in outcomes[0][1]


def _with(inputs, name, **changes):
    """Return a command line with another JSON: top-level keys, or `block__key` for a key of a block."""
    content = json.loads(json.dumps(inputs.content))
    for key, value in changes.items():
        *block, last = key.split("__")
        (content[block[0]] if block else content)[last] = value
    line = inputs.command_line()
    line[1] = str(write_json(inputs.folder / f"{name}.json", content))
    return line


def test_what_a_flag_or_the_json_shows_is_said_before_the_ranks_meet(inputs):
    """Many starts in one pair of processes: none gets as far as a process group."""
    good = inputs.command_line()
    block = inputs.content["sparseforge"]
    (inputs.folder / "a file").write_text("")
    short = {key: value for key, value in block.items() if key not in ("method", "max_steps")}
    offload = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(inputs.folder / "no_disk")}}
    # A command line each, with the words of its message.
    cases = [
        ([*good, "--max_stepz", "3"], ["--max_stepz: unknown flag; did you mean --max_steps?"]),
        ([*good, "--max_stepz=3"], ["did you mean --max_steps?"]),
        ([*good, "stray"], ["'stray' belongs to no flag"]),
        (good[2:], ["--deepspeed is missing"]),
        ([*good, f"--output_dir={inputs.folder / 'a file'}"], ["--output_dir", "it is a file, not a folder"]),
        ([*good, f"--output_dir={inputs.model / 'run'}"], ["--output_dir", "in the folder of --model"]),
        ([*_with(inputs, "short", sparseforge=short), "--max_steps=1"], ["max_steps = 1", "at least 2 steps"]),
        (_with(inputs, "nvme", zero_optimization=offload), ['offload_param.device = "nvme"', 'set "cpu"']),
        (_with(inputs, "one_bit", optimizer__type="OneBitAdam"), ["OneBitAdam", "use AdamW"]),
        (_with(inputs, "sgd", optimizer={"type": "SGD"}), ["ZeRO stage 3 was not made for it"]),
        (_with(inputs, "adagrad", optimizer={"type": "Adagrad"}), ["past the step hooks"]),
        (_with(inputs, "params", optimizer__params={"weight_deacy": 1}), ["did you mean weight_decay?"]),
        (_with(inputs, "stage", zero_optimization__stage=4), ["zero_optimization.stage = 4", "use 0, 1, 2 or 3"]),
        (_with(inputs, "autocast", torch_autocast={"enabled": True, "dtype": "float16"}), ["torch_autocast", "bf16"]),
        (_with(inputs, "key", zero_optimisation={}), ["did you mean 'zero_optimization'?"]),
        ([*good, "--learning_rate=1e38"], ["--learning_rate 1e+38 is not valid", "at most 1e+30"]),
        (
            [*good, "--max_steps=99999999999999"],
            ["--max_steps 99999999999999", "at most 1,000,000,000"],
        ),
        ([*good, "--global_batch=99999999999999"], ["--global_batch 99999999999999", "1,000,000,000"]),
        (_with(inputs, "steps", sparseforge__max_steps=10**10), ["max_steps = 10000000000", "1,000,000,000"]),
        (_with(inputs, "decay", optimizer__params={"weight_decay": 1e300}), ["weight_decay = 1e+300", "at most 1e+06"]),
        (_with(inputs, "negative", train_batch_size=-8), ["train_batch_size = -8 is not valid"]),
        (_with(inputs, "micro", train_micro_batch_size_per_gpu=3), ["train_batch_size = 8", "use 6 or 12"]),
    ]
    # Rank 0 says it in one line; the other rank ends as it does, without a word.
    rank0, rank1 = run_distributed(_mains, 2, [line for line, _ in cases])
    codes = [2] * 3 + [1] * (len(cases) - 3)  # the first three have a flag that does not exist
    assert [code for code, _ in rank0] == codes
    for (line, words), (_, message) in zip(cases, rank0, strict=True):
        assert message.startswith("error: ") and message.count("\n") == 1, (line, message)
        assert [word for word in words if word not in message] == [], message
    assert rank1 == [(code, "") for code in codes], "one message, not one per rank"
    assert not inputs.run.exists() and not list(inputs.model.glob("run"))


def test_a_run_of_three_steps_heats_hardens_and_freezes_and_is_not_continued_as_a_shorter_one(inputs):
    """Then its mask is trained further as the message says."""
    from sparseforge_ds.cli.main import main

    inputs.content["sparseforge"] = {}
    inputs.flags["output_dir"] = str(inputs.folder / "my run")
    assert [code for code, _ in inputs.train("--max_steps=3", ranks=1)] == [0]
    message = inputs.refused("--max_steps=2", "--resume", ranks=1)
    assert "is laid out over 3 steps, here 2" in message and "Resume with --max_steps 3" in message
    command = re.search(r"sparseforge (consolidate '.*my run') OUT", message)
    models = [inputs.folder / name for name in ("short", "further")]
    assert main([*shlex.split(command[1]), str(models[0]), "--skip_proof"]) == 0
    inputs.content["sparseforge"] = {"method": "naive_retrain"}
    inputs.flags |= {"model": str(models[0]), "teacher": str(inputs.model), "output_dir": str(inputs.folder / "next")}
    assert [code for code, _ in inputs.train("--max_steps=2", ranks=1)] == [0]
    assert main(["consolidate", inputs.flags["output_dir"], str(models[1]), "--skip_proof"]) == 0
    before, after = (load_file(model / "model.safetensors") for model in models)
    pruned = [name for name, weight in before.items() if name.endswith("_proj.weight") and (weight == 0).any()]
    assert len(pruned) == 14
    assert all(torch.equal(before[name] == 0, after[name] == 0) for name in pruned)
    assert not all(torch.equal(before[name], after[name]) for name in pruned)


def test_a_batch_that_does_not_fit_the_ranks(inputs):
    message = inputs.refused(ranks=3)
    assert "train_batch_size = 8" in message and "3 ranks" in message and "use 6 or 9" in message


def test_a_run_that_is_not_there_is_not_resumed(inputs):
    assert "--resume: no run in" in inputs.refused("--resume")


def test_another_weight_decay_than_the_checkpoints_is_refused(resumable):
    resumable.flags["weight_decay"] = "0.5"
    message = resumable.refused("--resume")
    assert "optimizer.params.weight_decay was" in message and "keeps that of its checkpoint; put it back" in message


def shard(inputs, pattern="*rank_1*optim_states.pt"):
    return next((inputs.run / "checkpoints" / "step_000004").glob(pattern))


def test_a_half_written_checkpoint_is_refused(resumable):
    file = shard(resumable)
    file.write_bytes(file.read_bytes()[:-100])
    message = resumable.refused("--resume")
    assert file.name in message and "incomplete" in message


def test_a_flipped_byte_is_found_by_its_checksum(resumable):
    file = shard(resumable)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    message = resumable.refused("--resume")
    assert file.name in message and "checksum" in message and "To go back" in message


def test_a_shard_of_another_step(resumable, finished):
    file = shard(resumable)
    shutil.copy(finished.run / "checkpoints" / "step_000008" / file.name, file)
    error_line = resumable.refused("--resume")
    assert file.name in error_line and "is incomplete" in error_line  # after the freeze a shard has another size


class Hostile:
    """A pickle that writes a file when it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_that_would_execute_something_executes_nothing(resumable):
    """Damage a checkpoint together with its manifest, as whoever made the one made the other."""
    file = shard(resumable)
    torch.save({"optimizer_state_dict": Hostile(resumable.folder / "executed")}, file)
    manifest = file.parent / "checkpoint.json"
    record = json.loads(manifest.read_text())
    record["files"][file.name] = file.stat().st_size
    record["fingerprints"][file.name] = fingerprint(file)
    manifest.write_text(json.dumps(record))
    message = resumable.refused("--resume")
    assert file.name in message and "nothing was executed" in message
    assert not (resumable.folder / "executed").exists()


def test_a_checkpoint_of_other_data_is_refused(resumable):
    resumable.flags["seed"] = "5"
    assert "trained on other data (seed 0, here 5)" in resumable.refused("--resume")


def test_a_text_that_was_edited_is_named_and_taken_on_request(resumable, capfd):
    text = shutil.copy(resumable.text, resumable.folder / "text.jsonl")
    resumable.flags["dataset"] = str(text)
    with text.open("a") as file:
        file.write('{"text": "one more document"}\n')
    message = resumable.refused("--resume")
    assert 'trained on other data (data.source1.files.text.jsonl was "16,944 bytes, hash' in message
    assert 'is "16,974 bytes, hash' in message
    assert "or go on with this text by --resume_other_data" in message
    capfd.readouterr()
    assert resumable.train("--resume", "--resume_other_data") == [(0, "")] * 2
    output = capfd.readouterr().out
    assert (
        output.count(
            "--resume_other_data: goes on with another text than the checkpoint's: data.source1.files.text.jsonl was"
        )
        == 1
    )
    assert (resumable.run / "checkpoints" / "step_000008").is_dir()


def test_a_model_whose_weights_were_changed_in_place_is_refused(resumable):
    """It is the teacher, too: the rest of the run would be distilled from another model."""
    resumable.flags["model"] = shutil.copytree(resumable.model, resumable.folder / "copy")
    path = Path(resumable.flags["model"], "model.safetensors")
    save_file({name: 2 * weight for name, weight in load_file(path).items()}, path, metadata={"format": "pt"})
    message = resumable.refused("--resume")
    assert f"the weights of --model {resumable.flags['model']} are not those that the run in" in message
    assert "bring them back, or start in a new --output_dir" in message


def test_a_finished_run_that_was_killed_before_its_result(finished):
    file = finished.run / "result.json"
    before = json.loads(file.read_text())
    file.unlink()
    assert [code for code, _ in finished.train("--resume")] == [0, 0]
    after = json.loads(file.read_text())
    assert [after[key] for key in ("steps", "tokens", "steps_of_this_launch")] == [before["steps"], before["tokens"], 0]


def test_damaged_states_of_random_numbers_are_refused(resumable):
    file = shard(resumable, "random_00001.json")
    file.write_text("{}" + file.read_text()[2:])
    assert f"{file.name}: damaged" in resumable.refused("--resume")


def spoil_final_norm(inputs, value=3e38):
    """Write a model whose every logit is NaN: infinities are subtracted."""
    model = tiny_llama(vocab_size=BYTE_VOCABULARY)
    with torch.no_grad():
        model.model.norm.weight.fill_(value)
        model.lm_head.weight.sign_()
    shutil.rmtree(inputs.model)
    write_model(inputs.model, model)


def test_a_loss_that_stays_infinite(inputs):
    spoil_final_norm(inputs)
    inputs.content["sparseforge"] = {
        "max_steps": 40,
        "importance": "magnitude",
        "method": {"update_every": 15, "hardening": [0.5, 1.0]},
    }
    message = inputs.refused()
    assert "the loss has been nan for 10 steps in a row" in message and "lower --learning_rate" in message
    assert not (inputs.run / "checkpoints").exists()


@pytest.mark.parametrize(
    "scale", [{"loss_scale": 1e12}, {"initial_scale_power": 40, "min_loss_scale": 2**40, "hysteresis": 1}]
)
def test_gradients_that_overflow_for_ever_end_the_run(inputs, scale):
    inputs.content["fp16"] = {"enabled": True, **scale}
    inputs.content["train_batch_size"] = 2
    inputs.flags["seq_length"] = "8"
    message = inputs.refused()
    assert "gradients have overflowed in 100 steps in a row" in message and "a smaller fp16.loss_scale" in message
    assert "gradients have overflowed" in json.loads((inputs.run / "result.json").read_text())["diverged"]


def test_weights_that_are_lost_are_not_saved_and_the_run_says_so(inputs):
    """Let weights become infinite by an update behind a step whose loss is finite."""
    inputs.content = deepspeed_json(stage=0, batch=8)
    inputs.flags |= {"save_every": "1", "keep_checkpoints": "1"}
    message = inputs.refused(main=_main_that_loses_weights)
    good = inputs.run / "checkpoints" / "step_000001"
    assert "weights are infinite or NaN, and were not saved: the run has diverged, at step 2" in message
    assert f"continue from {good} with --resume" in message
    result = json.loads((inputs.run / "result.json").read_text())
    assert result == {"diverged": message.strip().removeprefix("error: "), "last_good_checkpoint": str(good)}
    again = inputs.refused("--resume", main=_main_that_loses_weights)
    assert "and move step_000001 elsewhere, and start again" in again and good.is_dir()


def test_a_loss_without_any_gradient_ends_the_run_in_one_line(inputs):
    """Train where every logit is 0, whatever the layers do: an error of the masks, in one line."""
    model = tiny_llama(vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257, pad_token_id=None)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    shutil.rmtree(inputs.model)
    write_model(inputs.model, model)
    inputs.content["sparseforge"] = {"max_steps": 8, "method": "naive_retrain", "importance": "fisher"}
    assert "no usable curvature for 14 of 14 matrices at step 0" in inputs.refused()


def test_an_infinite_loss_when_curvature_is_due(inputs):
    spoil_final_norm(inputs)
    inputs.content = deepspeed_json(stage=0, batch=8)  # the one stage that applies such a step in fp32
    message = inputs.refused()
    assert "the loss is nan" in message and "lower --learning_rate" in message
    assert not (inputs.run / "checkpoints").exists()


def test_a_full_disk_ends_the_run_and_leaves_no_checkpoint(inputs):
    """Allow files of at most 20 kB: the token cache fits, a checkpoint does not."""
    from tests.distributed import RankFailure

    with pytest.raises(RankFailure, match="exit code 1"):
        run_distributed(_main, 2, inputs.command_line(), largest_file=20_000)
    assert not list((inputs.run / "checkpoints").glob("step_*"))
