"""Files that a run writes about itself, and folders in which it may run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.export.run_source import describe_run
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.model.basis import PERMUTATION
from sparseforge_ds.model.stored_config import config_sha256
from sparseforge_ds.train.length import steps_of_epochs
from sparseforge_ds.train.resume import changed_flags
from sparseforge_ds.train.run_folder import (
    bytes_of_checkpoints,
    bytes_of_streamed_text,
    check_room,
    check_run_folder,
    check_weights,
    lock_folder,
    why_nothing_to_resume,
    write_folder,
)
from sparseforge_ds.train.spec import make_spec
from tests import tiny_folders
from tests.tiny_folders import write_text
from tests.tiny_models import tiny_llama


@pytest.fixture
def spec(tmp_path):
    model = tiny_folders.write_model(tmp_path / "model")
    text = tiny_folders.write_text(tmp_path / "text.jsonl")

    def build(stage=3, world_size=2, block=None, content=None, **flags):
        content = content or tiny_folders.deepspeed_json(stage, **(block or {}))
        path = tiny_folders.write_json(tmp_path / "ds.json", content)
        arguments = {"model": str(model), "dataset": [str(text)], "seq_length": 32, "output_dir": str(tmp_path / "run")}
        return make_spec(RunArguments(deepspeed=str(path), **{**arguments, **flags}), world_size)

    return build


def test_the_folder_describes_the_run(spec, tmp_path):
    run_spec = spec()
    check_run_folder(run_spec)
    write_folder(run_spec)
    run = tmp_path / "run"
    # sparseforge.json: all that masks depend on, and hashes that later runs are compared with.
    record = json.loads((run / "sparseforge.json").read_text())
    keys = {
        "version",
        "config",
        "weights",
        "coverage",
        "model_type",
        "run",
        "public_names",
        "versions",
        "config_sha256",
    }
    assert set(record) == {*keys, "weights_sha256"}
    assert record["config_sha256"] == config_sha256(json.loads((run / "model" / "config.json").read_text()))
    assert SparseForgeConfig.from_dict(record["config"]) == run_spec.config
    assert record["weights"][0] == {
        "name": "model.layers.0.self_attn.q_proj.weight",
        "shape": [32, 32],
        "input_axis": -1,
    }
    assert record["coverage"]["masked"] == run_spec.coverage.masked
    assert record["run"]["seq_length"] == 32 and "local_rank" not in record["run"]
    assert record["versions"]["torch"]
    # What the run was started with, and the model without weights.
    assert json.loads((run / "ds_config.json").read_text()) == json.loads(json.dumps(run_spec.deepspeed))
    configs = [AutoConfig.from_pretrained(folder).to_dict() for folder in (run / "model", run_spec.model.folder)]
    assert [config.pop("_name_or_path") for config in configs]
    assert configs[0] == configs[1]
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer("ab")["input_ids"] == run_spec.model.tokenizer("ab")["input_ids"]
    assert sorted(path.name for path in run.iterdir()) == ["ds_config.json", "model", "sparseforge.json"]


def test_a_sentencepiece_model_and_the_licence_travel_with_the_run(spec, tmp_path):
    check_run_folder(spec())
    first = spec()
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "model" / "LICENSE.txt").write_text("yours")
    (tmp_path / "model" / "LICENSES").mkdir()
    write_folder(first)
    assert (tmp_path / "run" / "model" / "tokenizer.model").read_bytes() == b"pieces"
    assert (tmp_path / "run" / "model" / "LICENSE.txt").read_text() == "yours"


def test_a_folder_is_written_again_by_a_resumed_run(spec):
    check_run_folder(spec())
    write_folder(spec())
    resumed = spec(resume=True, log_every=1, block={"monitor": {"gap_every": 5}})
    check_run_folder(resumed)
    model = resumed.folder / "model"
    before = model.stat().st_ino
    write_folder(resumed)
    assert model.stat().st_ino == before, "no kill of a run that goes on can leave it without one"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 100}, "is laid out over 8 steps, here 100. .* Resume with --max_steps 8.*naive_retrain"),
        ({"block": {"importance": "magnitude"}}, 'sparseforge.importance was "fisher", is "magnitude"'),
    ],
)
def test_another_run_is_not_resumed(spec, changes, message):
    check_run_folder(spec())
    write_folder(spec())
    with pytest.raises(ValueError, match=message):
        check_run_folder(spec(resume=True, **changes))


def test_another_model_is_named_before_its_weights(spec, tmp_path):
    check_run_folder(spec())
    write_folder(spec())
    vocabulary = tiny_folders.BYTE_VOCABULARY
    wide = tiny_folders.write_model(tmp_path / "wide", tiny_llama(vocab_size=vocabulary, hidden_size=64))
    with pytest.raises(ValueError, match="started with other settings: ") as caught:
        check_run_folder(spec(resume=True, model=str(wide)))
    message = str(caught.value)
    assert f"settings: --model was {tmp_path / 'model'}, is {wide}; weights.model.layers.0.mlp." in message
    assert message.count(" was [[") == 7 and "; and 7 more; resume with the same JSON" in message
    record = tmp_path / "run" / "sparseforge.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "run": []}))
    with pytest.raises(ValueError, match="other settings: weights.model.layers.0"):
        check_run_folder(spec(resume=True, model=str(wide)))


def test_all_differences_are_named(spec, tmp_path):
    check_run_folder(spec())
    write_folder(spec())
    path = tmp_path / "run" / "sparseforge.json"
    record = json.loads(path.read_text())
    record["config"]["curvature"]["factored"] = False
    record["config"]["distillation"]["task_weight"] = 1.0
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="started with other settings") as caught:
        check_run_folder(spec(resume=True))
    assert "sparseforge.curvature.factored was false, is true" in str(caught.value)
    assert "sparseforge.distillation.task_weight was 1.0, is 0.3333333333333333" in str(caught.value)
    same = {"curvature": {"factored": False}, "distillation": {"task_weight": 1.0}}
    check_run_folder(spec(resume=True, block=same))
    for damaged in ([1], {**record["config"], "curvature": 3}):
        path.write_text(json.dumps({**record, "config": damaged}))
        with pytest.raises(ValueError, match="sparseforge.json is damaged or of another version"):
            check_run_folder(spec(resume=True, block=same))


def test_resuming_a_run_without_a_checkpoint_begins_it_where_that_cannot_be_a_mistake(spec, tmp_path):
    assert why_nothing_to_resume(spec()) is None
    assert why_nothing_to_resume(spec(resume=True)) is None
    with pytest.raises(ValueError, match="no run in .*start it without --resume, or with --resume auto"):
        check_run_folder(spec(resume=True))  # a mistyped folder
    with pytest.raises(ValueError, match="no run in .*start it without --resume, or with --resume auto"):
        steps_of_epochs(spec(resume=True, epochs=1.0))
    assert not (tmp_path / "run").exists(), "and it is not made"
    assert "there is no run in" in str(why_nothing_to_resume(spec(resume="auto")))
    check_run_folder(spec())
    write_folder(spec())
    for resume in (True, "auto"):
        assert "ended before its first checkpoint" in str(why_nothing_to_resume(spec(resume=resume)))
        with pytest.raises(ValueError, match="is laid out over 8 steps, here 99"):
            why_nothing_to_resume(spec(resume=resume, max_steps=99))
    (tmp_path / "run" / "checkpoints" / "step_000004").mkdir(parents=True)
    assert why_nothing_to_resume(spec(resume=True)) is None and why_nothing_to_resume(spec(resume="auto")) is None
    (tmp_path / "run" / "sparseforge.json").unlink()
    assert why_nothing_to_resume(spec(resume="auto")) is None
    with pytest.raises(ValueError, match="has checkpoints, but no sparseforge.json.*start in a new --output_dir"):
        check_run_folder(spec(resume="auto"))  # checkpoints of something: never overwritten


def test_more_epochs_than_a_run_may_have_steps_are_one_error(spec):
    windows = 4 * steps_of_epochs(spec(epochs=1.0))
    for epochs in (1e9, 1e308):
        message = f"--epochs {epochs:g}: reading .* is more than 1,000,000,000 steps; give at most "
        with pytest.raises(ValueError, match=re.escape(message).replace(re.escape(".*"), ".*")) as caught:
            steps_of_epochs(spec(epochs=epochs))
    most = int(str(caught.value).rpartition("at most ")[2].replace(",", ""))
    assert most >= 4e9 // windows and steps_of_epochs(spec(epochs=float(most))) <= 10**9


def test_a_model_with_another_config_is_not_resumed(spec, tmp_path):
    check_run_folder(spec())
    write_folder(spec())
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.1, "transformers_version": "6.0"}))
    with pytest.raises(ValueError, match="config.rms_norm_eps was 1e-06, is 0.1; resume with the unchanged model"):
        check_run_folder(spec(resume=True))
    path.write_text(json.dumps({**config, "transformers_version": "6.0"}))
    check_run_folder(spec(resume=True))
    (tmp_path / "run" / "checkpoints" / "step_000004").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"--resume: .* no model/config.json, .* back, or start in a new --output_dir"):
        check_run_folder(spec(resume=True))


def test_a_model_whose_weights_were_changed_in_place_is_not_resumed(spec, tmp_path):
    teacher = tiny_folders.write_model(tmp_path / "teacher")
    for flags in ({}, {"teacher": str(teacher)}):
        check_run_folder(spec(**flags))
        write_folder(spec(**flags))
        check_weights(spec(resume=True, **flags))
    change(teacher, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=f"--resume: the weights of --teacher {teacher} are not those"):
        check_weights(spec(resume=True, teacher=str(teacher)))
    check_weights(spec(resume=True))  # another teacher, by its flag, which the log says
    moved = shutil.copytree(tmp_path / "model", tmp_path / "moved")
    save_in_shards(moved)
    check_weights(spec(resume=True, model=str(moved)))
    change(moved, "model.norm.weight")
    with pytest.raises(ValueError, match=f"the weights of --model {moved} are not those that the run in"):
        check_weights(spec(resume=True, model=str(moved)))


def change(folder, name):
    """Change one element of a weight, its last."""
    index = folder / "model.safetensors.index.json"
    path = folder / (json.loads(index.read_text())["weight_map"][name] if index.exists() else "model.safetensors")
    tensors = load_file(path)
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def save_in_shards(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")


def test_a_model_with_another_order_of_channels_is_not_resumed(spec):
    first = spec()
    check_run_folder(first)
    Permutation("mlp", {"layers.0.mlp": torch.arange(64)[None].flip(-1)}, {}).save(first.model.folder)
    write_folder(first)
    (first.folder / "checkpoints" / "step_10").mkdir(parents=True)
    check_run_folder(spec(resume=True))
    kept = first.model.folder / PERMUTATION
    kept.rename(kept.with_name("elsewhere"))
    with pytest.raises(ValueError, match=r"--model \S+ has its channels in another order or basis than the model that"):
        check_run_folder(spec(resume=True))
    assert (first.folder / "model" / PERMUTATION).is_file()


def test_changed_flags_are_logged(spec):
    check_run_folder(spec())
    write_folder(spec())
    assert changed_flags(spec(resume=True)) == []
    assert changed_flags(spec(resume=True, learning_rate=0.5, keep_checkpoints=0)) == [
        "run.keep_checkpoints was 2, is 0",
        "run.learning_rate was null, is 0.5",
        "deepspeed.optimizer.params.lr was 0.004, is 0.5",
    ]


def test_numbers_of_the_optimizer_stay_those_of_the_checkpoint(spec):
    """They were announced as changed, written down, and had no effect."""
    check_run_folder(spec())
    write_folder(spec(weight_decay=0.1))
    assert changed_flags(spec(resume=True, weight_decay=0.1)) == []
    message = "optimizer.params.weight_decay was 0.1, is 0.7: a run that goes on keeps that of its checkpoint; put it"
    with pytest.raises(ValueError, match=message):
        changed_flags(spec(resume=True, weight_decay=0.7))


@pytest.mark.parametrize(("kind", "betas", "eps"), [("AdamW", [0.9, 0.999], 1e-8), ("Lion", [0.9, 0.999], None)])
def test_a_default_of_the_optimizer_may_be_written_down_or_left_out(spec, kind, betas, eps):
    optimizers = [{"type": kind, "params": {"lr": 1e-3}} for _ in range(3)]
    optimizers[1]["params"] |= {"betas": betas} | ({} if eps is None else {"eps": eps})
    optimizers[2]["params"]["betas"] = [0.5, 0.5]
    short, long, other = (
        {"content": {**tiny_folders.deepspeed_json(), "optimizer": optimizer}} for optimizer in optimizers
    )
    check_run_folder(spec())
    for before, after in ((short, long), (long, short)):
        write_folder(spec(**before))
        changed_flags(spec(**after, resume=True))
        with pytest.raises(ValueError, match=re.escape(f"optimizer.params.betas was {betas}, is [0.5, 0.5]: a run")):
            changed_flags(spec(**other, resume=True))


def test_a_second_run_in_the_folder_is_refused(spec, tmp_path):
    check_run_folder(spec())
    lock = lock_folder(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"run: another run is at work in it \(process {os.getpid()} on "):
        lock_folder(tmp_path / "run")
    os.close(lock)
    os.close(lock_folder(tmp_path / "run"))


def test_ranks_and_stage_may_change(spec):
    check_run_folder(spec())
    write_folder(spec())
    check_run_folder(spec(stage=0, world_size=1, resume=True))
    check_run_folder(spec(stage=2, world_size=4, resume=True))


def test_the_batch_of_a_step_may_not_change(spec, tmp_path):
    check_run_folder(spec())
    write_folder(spec())
    path = tmp_path / "run" / "ds_config.json"
    path.write_text(path.read_text().replace('"train_batch_size": 4', '"train_batch_size": 6'))
    message = (
        r"has 6 sequences a step, here there are 4 \(2 a rank x 1 .* x 2 ranks\)"
        r".* give --global_batch 6, or set train_batch_size to 6"
    )
    with pytest.raises(ValueError, match=message):
        check_run_folder(spec(resume=True))


def test_a_fresh_run_does_not_touch_checkpoints_without_a_latest(spec, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step_000004").mkdir(parents=True)
    with pytest.raises(ValueError, match="already holds a run with checkpoints; continue it with --resume"):
        check_run_folder(spec())


@pytest.mark.parametrize(
    "name", ["model", "model.old", "model.tmp", "checkpoints/a.tmp", "ds_config.json", "result.json"]
)
def test_files_that_no_run_has_written_are_never_replaced(name, spec, tmp_path):
    """A project may have a package `model` in the folder of its runs, or its own ds_config.json."""
    own = tmp_path / "run" / name
    own.parent.mkdir(parents=True)
    if own.suffix == ".json":
        tiny_folders.write_json(own, {"mine": True})
    else:
        own.mkdir()
        (own / "net.py").write_text("")
    with pytest.raises(ValueError, match=f"run holds {name}, which a run would replace and no run has written; give"):
        check_run_folder(spec())
    # Behind an earlier launch, of which the lock is left, they are a run's.
    (tmp_path / "empty" / "model").mkdir(parents=True)
    (tmp_path / "empty" / "checkpoints").symlink_to(tmp_path, target_is_directory=True)  # another disk
    check_run_folder(spec(output_dir=str(tmp_path / "empty")))
    (tmp_path / "run" / ".lock").touch()
    check_run_folder(spec())


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_description_is_named(spec, tmp_path, content):
    check_run_folder(spec())
    write_folder(spec())
    (tmp_path / "run" / "sparseforge.json").write_text(content)
    with pytest.raises(ValueError, match="sparseforge.json is damaged or of another version"):
        check_run_folder(spec(resume=True))


def test_a_run_has_a_folder_of_its_own(spec, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "texts").mkdir()
    text = str(tiny_folders.write_text(tmp_path / "texts" / "a.jsonl"))
    teacher = str(tiny_folders.write_model(tmp_path / "teacher"))
    inside = "would write among what it reads"
    # Folders that hold what the run reads, or that cannot be made.
    for flags, message in (
        ({"output_dir": "file"}, "--output_dir .*file: it is a file, not a folder"),
        ({"output_dir": "file/run"}, "--output_dir .*file/run: .*/file is a file, not a folder"),
        ({"output_dir": "model"}, f"--output_dir .*model: lies in the folder of --model .*{inside}"),
        ({"output_dir": "model/../model/runs/a"}, f"in the folder of --model .*{inside}"),
        ({"output_dir": "teacher/run", "teacher": teacher}, f"in the folder of --teacher .*{inside}"),
        ({"output_dir": "texts/run", "dataset": [str(tmp_path / "texts")]}, f"of --dataset .*texts, .*{inside}"),
        ({"output_dir": "texts/run", "dataset": [f"stream:{tmp_path / 'texts'}=1"]}, f"of --dataset stream:.*{inside}"),
        (
            {"output_dir": "texts/run", "eval_dataset": str(tmp_path / "texts")},
            f"of --eval_dataset .*texts, .*{inside}",
        ),
        ({"output_dir": "x" * 300}, r"--output_dir \S+: cannot be looked at \(File name too long\)"),
        ({"output_dir": "run", "teacher": "x" * 300}, r"^--teacher x+: cannot be looked at \(File name too long\)"),
        ({"output_dir": "."}, r"--model .*model lies in its folder model, which the run replaces"),
        ({"output_dir": ".", "model": teacher}, None),
        ({"output_dir": "texts/run", "dataset": [text]}, None),  # beside a file of text
    ):
        flags = {**flags, "output_dir": str(tmp_path / flags["output_dir"])}
        if message is None:
            assert spec(**flags).folder == Path(flags["output_dir"])
            continue
        with pytest.raises(ValueError, match=message):
            spec(**flags)
    # A folder that cannot be written is refused before training; the inputs are untouched.
    with pytest.raises(ValueError, match="--output_dir /proc/run: cannot be written .No such file"):
        check_run_folder(spec(output_dir="/proc/run"))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(
        path.name for path in (tmp_path / "teacher").iterdir()
    )


def test_room_is_checked_before_work_starts(spec, tmp_path, monkeypatch):
    every = spec(stage=3, max_steps=100, save_every=10, keep_checkpoints=0)
    total, masked = every.coverage.total, every.coverage.masked
    sums = math.ceil(4 * every.sizes.rows_and_columns * 4 / 3)  # of the curvature, as text, in a file of each rank
    first = 12 * total + 6 * masked + every.world_size * sums
    assert bytes_of_checkpoints(every) == 10 * first
    assert bytes_of_checkpoints(spec(max_steps=100, save_every=10, keep_checkpoints=2)) == 3 * first
    assert bytes_of_checkpoints(spec(max_steps=100, save_every=0)) == first
    started = {"start": {"tokens": 1280}}
    assert bytes_of_checkpoints(spec(max_steps=100, save_every=0, block=started)) == first
    assert bytes_of_checkpoints(spec(max_steps=100, save_every=100, block=started)) == 2 * first
    assert bytes_of_checkpoints(spec(max_steps=100, save_every=10, resume="auto")) == 3 * first
    assert bytes_of_checkpoints(spec(stage=2, save_every=0)) == 16 * total + 6 * masked + sums
    # Masks that are frozen take a bit a weight.
    for stage in (0, 3):  # at stage 0 in fp32 weights are their own masters
        fixed = spec(stage=stage, save_every=0, max_steps=100, block={"method": "naive_retrain"})
        assert bytes_of_checkpoints(fixed) == pytest.approx(12 * total + masked / 8, abs=8)
    frozen = tmp_path / "run" / "checkpoints" / "step_000090"
    frozen.mkdir(parents=True)
    assert (
        bytes_of_checkpoints(spec(max_steps=100, save_every=10, resume=True)) < 12.3 * total + every.world_size * sums
    )
    frozen.rmdir()
    # A run that is resumed adds those that it has not saved yet, and no more than it keeps.
    for step in (20, 30):
        (frozen.parent / f"step_{step:06d}").mkdir()
    resumed = {"max_steps": 100, "save_every": 10, "resume": True}
    assert bytes_of_checkpoints(spec(**resumed, keep_checkpoints=0)) == 7 * first
    assert bytes_of_checkpoints(spec(**resumed, keep_checkpoints=3)) == 2 * first
    assert bytes_of_checkpoints(spec(**resumed, keep_checkpoints=1)) == first
    # A run that is complete adds none.
    (frozen.parent / "step_000100").mkdir()
    check_room(spec(**resumed), free=0)
    (frozen.parent / "step_000100").rmdir()
    shutil.rmtree(frozen.parent)
    # Tokens of a stream are written while the run goes on, and stay.
    text = str(tmp_path / "text.jsonl")
    assert bytes_of_streamed_text(every) == 0
    streamed = spec(stage=3, max_steps=100, dataset=[f"stream:{text}"])
    assert bytes_of_streamed_text(streamed) == 2 * 100 * 4 * 32
    half = spec(max_steps=100, dataset=[f"stream:{text}=0.5", f"{write_text(tmp_path / 'other.jsonl')}=0.5"])
    assert bytes_of_streamed_text(half) == 100 * 4 * 32
    assert (
        bytes_of_streamed_text(spec(max_steps=100, dataset=[f"stream:{text}"], document_attention=True))
        == 4 * 100 * 4 * 32
    )
    with pytest.raises(
        ValueError, match=r"checkpoints will take about .*, and the tokens of its streams 25\.0 KiB; make"
    ):
        check_room(streamed, bytes_of_checkpoints(streamed) + 25_599)
    check_room(streamed, bytes_of_checkpoints(streamed) + 25_600)
    (tmp_path / "run" / "data" / "stream").mkdir(parents=True)
    (tmp_path / "run" / "data" / "stream" / "chunk_000000.bin").write_bytes(bytes(20_000))
    assert bytes_of_streamed_text(streamed) == 5_600
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match="has room for 1000.0 B, but its checkpoints will take about .* MiB"):
        check_run_folder(every)


def test_a_json_file_is_whole_or_absent(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_run_record_without_its_flags_is_named(spec, tmp_path):
    first = spec()
    check_run_folder(first)
    write_folder(first)
    file = tmp_path / "run" / "sparseforge.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "run": []}))
    with pytest.raises(ValueError, match=r"sparseforge\.json is damaged: `run` is no object"):
        changed_flags(spec(resume=True))


def test_cards_get_the_names_that_a_run_saw(spec, tmp_path, monkeypatch):
    """`data/books` is a folder where the run is, and would look like a hub id to an export from elsewhere."""
    monkeypatch.chdir(tmp_path)
    tiny_folders.write_model(tmp_path / "models" / "dense")
    (tmp_path / "data" / "books").mkdir(parents=True)
    tiny_folders.write_text(tmp_path / "data" / "books" / "a.jsonl")
    dataset = ["data/books=0.3", f"{tmp_path / 'text.jsonl'}=0.7"]
    tiny_folders.write_text(tmp_path / "data" / "held_out.jsonl")
    first = spec(model="models/dense", dataset=dataset, eval_dataset="data/held_out.jsonl", max_steps=10)
    check_run_folder(first)
    write_folder(first)
    described = json.loads((tmp_path / "run" / "sparseforge.json").read_text())
    names = {"model": "dense", "eval_dataset": "held_out.jsonl", "dataset": ["books", "text.jsonl"]}
    assert described["public_names"] == names
    monkeypatch.chdir("/")
    # A score of the run is one of the model only where the network was what is exported.
    scores = {"text": "data/held_out.jsonl", "losses": {"1": 2.0, "10": 3.0}, "sequences": 4, "seq_length": 8}
    soft, final = (describe_run(described, {"evaluations": scores}, step, first.config) for step in (1, 10))
    assert soft["model"] == "dense" and soft["dataset"] == ["books", "text.jsonl"]
    assert soft["evaluation"] is None
    assert final["evaluation"] == {"loss": 3.0, "sequences": 4, "seq_length": 8, "text": "held_out.jsonl"}
    # A score of before the newest launch may be of another text.
    scores["text"] = "/data/earlier.jsonl"
    assert describe_run(described, {"evaluations": scores}, 10, first.config)["evaluation"]["text"] == "earlier.jsonl"
