"""`sparseforge teach`: what it writes, a killed process that goes on, and runs whose text or settings are others."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from sparseforge_ds.cli.main import main
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.data.teacher_logits import TeacherLogits
from sparseforge_ds.evaluate import finished_model, teach
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.open_batches import open_batches
from sparseforge_ds.train.spec import make_spec
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, file_size_limit, write_json, write_model, write_text

SEQ, TOP = 32, 6


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_text(tmp_path / "text.jsonl", documents=60)
    assert main(command(tmp_path, "logits")) == 0
    return tmp_path


def command(folder: Path, out: str, **flags: Any) -> list[str]:
    flags = {"text": folder / "text.jsonl", "output": folder / out, "seq_length": SEQ, "top_k": TOP, **flags}
    return ["teach", str(folder / "model"), *(f"--{name}={value}" for name, value in flags.items())]


def batches_of(folder: Path, out: str = "logits", block: Any = None, **flags: Any) -> Any:
    config = write_json(folder / "ds.json", deepspeed_json(**(block or {})))
    flags = {"dataset": [str(folder / "text.jsonl")], "seq_length": SEQ, **flags}
    arguments = RunArguments(
        deepspeed=str(config),
        model=str(folder / "model"),
        output_dir=str(folder / "run"),
        teacher_logits=str(folder / out),
        **flags,
    )
    return open_batches(make_spec(arguments, 1), Ranks())


def test_every_batch_has_the_logits_of_its_tokens(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare in the second epoch too, and after a change of the micro-batch."""
    model = AutoModelForCausalLM.from_pretrained(written / "model")
    batches = batches_of(written)
    windows = batches.sources[0].windows
    for first in (0, windows - 2, 2 * windows):
        for batch in batches.micro_batches(range(first, first + 4)):
            with torch.no_grad():
                share_BSV = torch.log_softmax(model(batch.token_BS).logits / 2.0, -1)
            top_BSK = share_BSV.topk(TOP).values
            torch.testing.assert_close(share_BSV.gather(-1, batch.top.entry_BSK), top_BSK)
            torch.testing.assert_close(batch.top.share_BSL[..., :-1].float(), top_BSK, rtol=1e-3, atol=1e-3)
            rest_BS = 1 - top_BSK.exp().sum(-1)
            torch.testing.assert_close(batch.top.share_BSL[..., -1].float().exp(), rest_BS, rtol=1e-2, atol=1e-4)
            half = batch.top.take_tokens(slice(8, 16))
            assert torch.equal(half.entry_BSK, batch.top.entry_BSK[:, 8:16])


@pytest.mark.parametrize("change", [{"windows": "5"}, {"key": "../other"}, {"written": None}])
def test_a_damaged_record_is_refused(written: Path, change: dict[str, Any]) -> None:
    (path,) = (written / "logits").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="is no record of a teacher's logits"):
        TeacherLogits.open(written / "logits", path.stem, {}, 16, BYTE_VOCABULARY, 2.0)


def test_a_killed_process_goes_on_to_the_same_bytes(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    monkeypatch.setattr(teach, "SAVED_EVERY", 2)
    forward = LlamaForCausalLM.forward
    calls: list[int] = []

    def die(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", die)
    assert main(command(written, "again")) == 130
    (record,) = (written / "again").glob("*.json")
    written_count = json.loads(record.read_text())["written"]
    assert written_count == 4 * 8
    with pytest.raises(
        ValueError, match=rf"again: is incomplete \({written_count} of \d+ windows\); repeat the command"
    ):
        batches_of(written, "again")
    assert main(command(written, "again", top_k=TOP + 1)) == 2
    assert "is of other settings (logits.top_k was 6, is 7); give another --output" in capsys.readouterr().err
    calls[:] = [0] * 10
    # Room that a process with more entries took before it wrote any is no damage, and is given back.
    for file in (written / "again").glob("*.*s"):
        os.truncate(file, 2 * file.stat().st_size)
    next((written / "again").glob("*.json")).unlink()
    capsys.readouterr()
    assert main(command(written, "again")) == 0
    for file in (written / "logits").iterdir():
        if file.is_file():
            assert file.read_bytes() == (written / "again" / file.name).read_bytes(), file.name
    # 6 entries of 2 bytes, and 7 shares of 2.
    assert (
        f"the {TOP} largest of {BYTE_VOCABULARY} logits at temperature 2: 26 bytes a token" in capsys.readouterr().out
    )


@pytest.mark.parametrize("damage", [lambda file: os.truncate(file, 100), Path.unlink])
def test_logits_that_have_lost_a_part_are_made_again(
    written: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for what a file has lost would be filled with zeros, and count as written."""
    (file,) = (written / "logits").glob("*.shares")
    before = file.read_bytes()
    damage(file)
    with pytest.raises(ValueError, match="cannot be opened .*make it again"):
        batches_of(written)
    assert main(command(written, "logits")) == 0
    assert file.read_bytes() == before
    assert f"{file} is not as it was written: the logits are made again" in caplog.text


def test_two_commands_do_not_write_the_logits_of_one_text(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tokens,) = (written / "logits" / "tokens").glob("*.json")
    with (written / "logits" / f"{tokens.stem}.lock").open("w") as held:
        files = sorted((written / "logits").iterdir())
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(command(written, "logits")) == 2
    assert (
        "another process writes the logits of this text (of an unknown process); wait for it, or give another --output"
        in capsys.readouterr().err
    )
    assert sorted((written / "logits").iterdir()) == files


@pytest.mark.parametrize("kind", ["entries", "shares"])
def test_a_window_whose_bytes_have_changed_on_the_disk_is_not_trained_on(written: Path, kind: str) -> None:
    (file,) = (written / "logits").glob(f"*.{kind}")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        (logits,) = batches_of(written).teacher_logits or ()
        logits.read(0)
        with pytest.raises(ValueError, match="window .* other bytes than were written; remove the files"):
            logits.read(logits.record.windows - 1)
    finally:
        file.write_bytes(content)


def test_other_texts_and_settings_are_refused_before_training(written: Path) -> None:
    write_text(written / "other.jsonl", documents=61)
    hidden = {"distillation": {"hidden": {}}}
    for message, flags in (
        (r"has no logits of this text and tokenizer \(data.files", {"dataset": [str(written / "other.jsonl")]}),
        (r"has no logits of this text .*data.--document_frame was ", {"document_frame": "both"}),
        ("its --seq_length is 32, and this run's 16; use the same", {"seq_length": 16}),
        ("its distillation.temperature is 2, and this run's 1", {"block": {"distillation": {"temperature": 1.0}}}),
        ("is a stream, whose windows have no numbers", {"dataset": [f"stream:{written / 'text.jsonl'}"]}),
        ("--dataset owner/name is a stream, whose windows have no numbers", {"dataset": ["owner/name"]}),
        ("--teacher .*model would be another teacher", {"teacher": str(written / "model")}),
        ("the sparseforge block says distillation null", {"block": {"distillation": None}}),
        (
            "they were made with attention across documents, and --document_attention is set",
            {"document_attention": True},
        ),
        ("distillation.hidden compares hidden states, which are not stored", {"block": hidden}),
    ):
        with pytest.raises(ValueError, match=f"--teacher_logits .*{message}"):
            batches_of(written, **flags)
    # A teacher with another head.
    (record,) = (written / "logits").glob("*.json")
    record.write_text(record.read_text().replace(f'"vocabulary": {BYTE_VOCABULARY}', '"vocabulary": 300'))
    with pytest.raises(ValueError, match=f"its vocabulary is 300, and this run's {BYTE_VOCABULARY}"):
        batches_of(written)


def test_logits_of_two_kinds_are_refused_and_a_teacher_may_be_called_otherwise(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sequences of two texts share a micro-batch."""
    write_text(written / "other.jsonl", documents=61)
    assert main(command(written, "logits", text=written / "other.jsonl", top_k=TOP + 1)) == 0
    texts = [str(written / name) for name in ("text.jsonl", "other.jsonl")]
    with pytest.raises(ValueError, match=r"--top_k is 7 for --dataset .*other.jsonl, and 6 for .*text.jsonl"):
        batches_of(written, dataset=texts)
    words = command(written, "logits")
    assert main(["teach", f"{written}/../{written.name}/model", *words[2:]]) == 0


def test_a_text_that_cannot_be_taught_is_refused_before_the_model_is_loaded(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("the model was loaded"))
    for content, message in (
        ("{}", "blank.jsonl, line 1: no field"),
        ('{"text": " "}', "blank.jsonl: "),
        ('{"text": "a"}', "less than --seq"),
    ):
        (written / "blank.jsonl").write_text(content + "\n")
        assert main(command(written, "none", text=written / "blank.jsonl")) == 2
        error = capsys.readouterr().err
        assert message in error and "--dataset" not in error
    assert not list((written / "none").glob("*.json"))


def test_a_file_where_the_folder_of_logits_belongs_is_named(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(written, "model/config.json")) == 2
    assert "model/config.json is a file; give another place" in capsys.readouterr().err


def test_a_resumed_run_refuses_logits_of_other_weights_or_of_another_dtype(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = batches_of(written).state_dict()
    batches_of(written).load_state_dict(before)
    # Another dtype of the same teacher, and then another teacher under the same name.
    assert main(command(written, "rounded", dtype="bfloat16")) == 0
    file = written / "model" / "model.safetensors"
    tensors = load_file(file)
    name, value = next((name, value) for name, value in tensors.items() if value.dim() == 2)
    tensors[name] = value.flip(0).contiguous()  # the same values in another order
    save_file(tensors, file, {"format": "pt"})
    assert main(command(written, "moved")) == 0
    for folder, change in (("rounded", "dtype was"), ("moved", "teacher_hash was")):
        with pytest.raises(ValueError, match=rf"on other data \(data.teacher_logits1.{change} .* resume with the same"):
            batches_of(written, folder).load_state_dict(before)
    batches_of(written, "moved", resume="auto", resume_other_data=True).load_state_dict(before)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"top_k": BYTE_VOCABULARY}, f"use 1 to {BYTE_VOCABULARY - 1}, less than the model's vocabulary"),
        ({"seq_length": 10_000_000}, "--seq_length 10000000: use 2 to "),
        *(({"temperature": t}, f"--temperature {t:g}: use a number from 1e-06 to 1e+06") for t in (0, 1e-9, 1e9)),
        ({"batch_size": 0}, "--batch_size 0: use an integer >= 1"),
        ({"text": "none.jsonl"}, "none.jsonl: no such file or folder"),
        ({"text": "pipe.jsonl"}, "pipe.jsonl: is a pipe or a device; write its text into a file"),
        ({"text": "text.jsonl", "split": "test"}, "text.jsonl is no folder or hub id, of which it could choose files"),
        ({"text": "plain.txt", "text_field": "body"}, "plain.txt has no records, whose field it could name; leave it"),
    ],
)
def test_wrong_flags_are_refused(
    flags: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No weights are read before."""
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("the teacher was loaded"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    write_model(tmp_path / "model")
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "plain.txt").write_text("one\n")
    if "text" in flags:
        flags = {**flags, "text": tmp_path / flags["text"]}
    assert main(command(tmp_path, "logits", **flags)) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("logits/*.entries"))


def test_a_teacher_that_overflows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name the weight that is not finite, or say that sums overflow, and leave no file of logits."""
    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    write_text(tmp_path / "text.jsonl")
    name = "model.layers.1.mlp.down_proj.weight"
    for changed, value, why in (
        (name, float("inf"), f"{name} is not finite; give a sound model\n"),
        ("model.norm.weight", 3.3e38, "all weights are finite, so sums overflow in float32; give a sound model\n"),
    ):
        altered = tensors | {changed: tensors[changed].clone().fill_(value)}
        save_file(altered, folder / "model.safetensors", {"format": "pt"})
        assert main(command(tmp_path, "logits")) == 2
        assert f"error: {folder}: its logits are infinite or NaN: {why}" in capsys.readouterr().err
        left = [file.parent.name for file in (tmp_path / "logits").rglob("*") if file.is_file()]
        assert left and set(left) == {"tokens"}, "tokens are made once, and room for logits is free again"
    assert main(command(tmp_path, "logits", dtype="bfloat16")) == 2
    assert "overflow in bfloat16; give a sound model, or try --dtype float32" in capsys.readouterr().err


def test_a_disk_without_room_is_named_and_keeps_the_logits_of_other_texts(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens of the other text fit, its logits do not."""
    before = sorted((written / "logits").rglob("*"))
    write_text(written / "other.jsonl", documents=70)
    with file_size_limit(50_000):
        assert main(command(written, "logits", text=written / "other.jsonl")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {written / 'logits'}/") and error.endswith(".entries: File too large")
    added = set((written / "logits").rglob("*")) - set(before)
    assert {file.parent.name for file in added} == {"tokens"} and set(before) <= set((written / "logits").rglob("*"))


def test_entries_of_a_large_vocabulary_are_four_bytes() -> None:
    record = teach.LogitsRecord("key", {}, 8, 1, 2**16 + 1, 2.0, 64, "teacher", "hash", "float32")
    assert record.bytes_per_token == 64 * 4 + 65 * 2 and np.dtype(record.entry_dtype).itemsize == 4
