"""`sparseforge permute`: an ordinary folder that computes the same, with the order beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate.finished_model import prune_by_magnitude
from sparseforge_ds.extras.basis.permutation.channel_table import CHANNELS
from sparseforge_ds.mask.pattern import NM
from tests.tiny_folders import BYTE_VOCABULARY, write_model, write_text
from tests.tiny_models import BUILDERS, tiny_llama, token_batch
from tests.unit.extras.basis.permutation.test_channels import randomized


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=token_batch()["input_ids"]).logits


@pytest.mark.parametrize("family", CHANNELS)
def test_permuted_files_of_every_family_compute_the_same(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    model = randomized(BUILDERS[family](vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257))
    folder = write_model(tmp_path / "dense", model)
    out = tmp_path / "out"
    assert main(["permute", str(folder), str(out), "--max_shard_size", "50KB"]) == 0
    printed = capsys.readouterr().out
    assert "mlp: 2:4 keeps" in printed and "residual: 2:4 keeps" in printed
    torch.testing.assert_close(logits(out), logits(folder), rtol=1e-4, atol=2e-5)
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (out / "tokenizer.json").is_file() and (out / "model.safetensors.index.json").is_file()
    record = json.loads((out / "permutation.json").read_text())
    assert record["dimensions"] == "all" and record["score"] == "magnitude"
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".tmp"] == []


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_channels_are_scored_by_activations_of_a_text(family: str, tmp_path: Path) -> None:
    model = randomized(BUILDERS[family](vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257))
    folder = write_model(tmp_path / "dense", model)
    text = tmp_path / "text.txt"
    text.write_text("Once there was a model that wanted to be small. " * 20)
    options = ["--text", str(text), "--seq_length", "32", "--sequences", "4", "--dimensions", "mlp+heads"]
    assert main(["permute", str(folder), str(tmp_path / "out"), *options]) == 0
    torch.testing.assert_close(logits(tmp_path / "out"), logits(folder), rtol=1e-4, atol=2e-5)
    record = json.loads((tmp_path / "out" / "permutation.json").read_text())
    assert record["dimensions"] == "mlp+heads" and record["score"] == "activations"


def test_a_permutation_is_the_same_every_time(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "dense")
    for name in ("a", "b"):
        assert main(["permute", str(folder), str(tmp_path / name)]) == 0
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b and a != (folder / "model.safetensors").read_bytes()


def test_a_text_field_without_a_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["permute", "m", str(tmp_path / "out"), "--text_field", "content"]) == 2
    assert "--text_field content: it belongs to --text, which scores by activations" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prune", "permute", "rotate"])
def test_a_text_field_of_plain_text_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Once upon a time. " * 200)
    words = [command, str(model), str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"), "--text_field", "body"]
    assert main(words) == 2
    assert "--text_field body: no --text has records" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_permuted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "dense")
    out = tmp_path / "out"

    def error(*words: str) -> str:
        assert main(["permute", *words]) == 2
        assert not list(tmp_path.glob(".*"))
        return capsys.readouterr().err

    assert "use an integer >= 1" in error(str(folder), str(out), "--rows", "0")
    assert "--workers 0: use an integer >= 1" in error(str(folder), str(out), "--workers", "0")
    assert "block16:0.5 is no n:m pattern" in error(str(folder), str(out), "--pattern", "block16")
    assert main(["permute", str(folder), str(out)]) == 0
    assert "exists and is not an empty folder" in error(str(folder), str(out))
    assert "is permuted already" in error(str(out), str(tmp_path / "twice"))
    sparse = shutil.copytree(folder, tmp_path / "sparse")
    (sparse / "sparsity.json").write_text("{}")
    assert "is sparse already" in error(str(sparse), str(tmp_path / "twice"))
    other = write_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "bloom"}))
    assert 'Add a line "bloom" to CHANNELS' in error(str(other), str(tmp_path / "twice"))


@pytest.mark.parametrize("command", ["permute", "rotate"])
def test_what_can_be_seen_before_the_search(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama(vocab_size=BYTE_VOCABULARY, max_position_embeddings=64)
    dense = write_model(tmp_path / "dense", model)
    text = write_text(tmp_path / "text.jsonl")
    prune_by_magnitude(model, NM(2, 4))
    pruned = write_model(tmp_path / "pruned", model)
    out = tmp_path / "out"
    steps = ["--steps", "2"] if command == "rotate" else []
    for folder, options, message in (
        (dense, ["--seq_length", "65"], "--seq_length 65: the model has 64 positions; use 1 to 64"),
        (dense, ["--seq_length", "0"], "--seq_length 0: the model has 64 positions"),
        (dense, ["--exclude", "none"], "--exclude: 'none' matches no weight"),
        (dense, ["--max_shard_size", "5 apples"], "--max_shard_size 5 apples: write a number of bytes"),
        (pruned, [], f"{command}: the weights are 2:4 already"),
    ):
        assert main([command, str(folder), str(out), "--text", str(text), *steps, *options]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "pruned", "text.jsonl"]
    assert main([command, str(dense), str(out), "--text", str(text), *steps, "--max_shard_size", "20000"]) == 0, (
        "the default is no longer than it can read"
    )
    assert len(list(out.glob("model-*.safetensors"))) > 1


def test_a_layer_that_predicts_several_tokens_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = randomized(BUILDERS["glm4_moe"](vocab_size=BYTE_VOCABULARY))
    folder = write_model(tmp_path / "dense", model)
    out = tmp_path / "out"
    tensors = load_file(folder / "model.safetensors")
    last = model.config.num_hidden_layers
    behind = {name: value for name, value in tensors.items() if f"layers.{last - 1}." in name}
    behind = {name.replace(f"layers.{last - 1}.", f"layers.{last}."): value.clone() for name, value in behind.items()}
    behind[f"model.layers.{last}.eh_proj.weight"] = torch.randn(32, 64)
    save_file({**tensors, **behind}, folder / "model.safetensors", {"format": "pt"})
    assert main(["permute", str(folder), str(out)]) == 0
    assert f"{len(behind)} tensors that transformers does not load are left out" in capsys.readouterr().out
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    torch.testing.assert_close(logits(out), logits(folder), rtol=1e-4, atol=2e-5)


def test_an_unknown_tensor_ends_it_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "dense")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.scale"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = write_text(tmp_path / "text.jsonl")
    assert main(["permute", str(folder), str(tmp_path / "out"), "--text", str(text)]) == 2
    message = capsys.readouterr()
    assert "model.layers.0.mlp.scale of shape (3,) has no line" in message.err and "sequences" not in message.out


def test_excluded_names_are_those_in_memory_with_and_without_text(tmp_path: Path) -> None:
    model = randomized(BUILDERS["qwen3_moe"](vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257))
    folder = write_model(tmp_path / "dense", model)
    text = write_text(tmp_path / "text.jsonl")
    exclude = ["--exclude", "*mlp.experts.gate_up_proj"]
    assert main(["permute", str(folder), str(tmp_path / "a"), *exclude]) == 0
    assert main(["permute", str(folder), str(tmp_path / "b"), *exclude, "--text", str(text)]) == 0
