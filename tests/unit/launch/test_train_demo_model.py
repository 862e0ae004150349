from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM

from sparseforge_ds.data.text_formats import iter_documents
from sparseforge_ds.evaluate.scored_text import iter_texts
from tests.conftest import ROOT

STDLIB_LLAMA = ROOT / "sparseforge_ds" / "assets" / "stdlib_llama"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo_model", ROOT / "launch" / "train_demo_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_a_mixture_begins_as_the_dense_function_and_is_pruned_whole(script: ModuleType) -> None:
    dense = LlamaForCausalLM.from_pretrained(STDLIB_LLAMA, dtype=torch.float32)
    mixture = script.mixture_of(dense, 4)
    ids = torch.arange(96).view(2, 48)
    torch.testing.assert_close(mixture(ids).logits, dense(ids).logits, atol=1e-4, rtol=1e-5)

    pruned = script.magnitude_2_4(mixture)
    weights = script.prunable_weights(pruned)
    assert sorted({weight.dim() for weight in weights}) == [2, 3]
    assert all(((weight.reshape(-1, 4) != 0).sum(1) == 2).all() for weight in weights)
    routers = [layer.mlp.gate.weight for layer in pruned.model.layers]
    assert all(router.all() for router in routers)


def test_experts_need_a_model_that_has_their_mlps(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse_arguments(["--output_dir", "x", "--experts", "4"])
    assert "--experts 4 needs --continue_from, and 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--continue_from x --layers 3", "--layers 3 needs a new model: --continue_from has sizes of its own"),
        (
            "--continue_from x --vocab_size 512",
            "--vocab_size 512 needs a new model: --continue_from has sizes of its own",
        ),
        ("--expert_learning_rate 0.1", "--expert_learning_rate 0.1 needs --experts"),
        ("--continue_from x --expert_learning_rate 0.1", "--expert_learning_rate 0.1 needs --experts"),
    ],
)
def test_a_flag_that_nothing_reads_is_refused(
    flags: str, message: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.parse_arguments(["--output_dir", "out", *flags.split()])
    assert message in capsys.readouterr().err


def test_what_is_held_back_is_not_read(script: ModuleType, tmp_path: Path) -> None:
    sizes = ["--hidden_size", "16", "--intermediate_size", "16", "--layers", "1", "--heads", "1", "--kv_heads", "1"]
    lengths = ["--steps", "1", "--batch_size", "1", "--sequence_length", "8", "--warmup_steps", "1"]
    script.main(["--output_dir", str(tmp_path), "--hold_back", "3", "--vocab_size", "512", *sizes, *lengths])
    parts = {name: list(iter_documents(str(tmp_path / f"{name}.jsonl"), "text")) for name in ("read", "unread")}
    full = list(iter_texts("stdlib:train"))
    assert parts["unread"] == full[::3]
    assert sorted(parts["read"] + parts["unread"]) == sorted(full)


def test_something_is_left_to_read(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse_arguments(["--output_dir", "x", "--hold_back", "1"])
    assert "--hold_back 1 leaves no document to read; use 2 or more" in capsys.readouterr().err


def test_another_text_takes_the_place_of_the_documentation(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, documents in (("train", list(iter_texts("stdlib:train"))[:40]), ("heldout", ["Some words. " * 40])):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": item}) + "\n" for item in documents))
    sizes = ["--hidden_size", "16", "--intermediate_size", "16", "--layers", "1", "--heads", "1", "--kv_heads", "1"]
    lengths = ["--steps", "1", "--batch_size", "1", "--sequence_length", "8", "--warmup_steps", "1"]
    script.main(["--output_dir", str(tmp_path), "--text", *map(str, files), "--vocab_size", "512", *sizes, *lengths])
    output = capsys.readouterr().out
    assert "in 40 documents" in output and "in 1 documents" in output


def test_a_text_that_is_not_there_is_said_before_anything_is_written(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = str(tmp_path / "none.jsonl")
    with pytest.raises(SystemExit, match=f"^error: --text {text}: no such file; give a file of "):
        script.main(["--output_dir", str(out), "--text", text, text])
    assert not out.exists()


def test_a_text_that_is_too_short_for_a_batch_is_refused(script: ModuleType, tmp_path: Path) -> None:
    documents = list(iter_texts("stdlib:train"))[:40]
    texts = {"long": documents, "short": ["Some words. " * 40]}
    for name, content in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": item}) + "\n" for item in content))
    long, short = (str(tmp_path / f"{name}.jsonl") for name in texts)
    sizes = ["--hidden_size", "16", "--intermediate_size", "16", "--layers", "1", "--heads", "1", "--kv_heads", "1"]
    base = ["--output_dir", str(tmp_path / "out"), "--vocab_size", "512", "--steps", "1", *sizes]
    for train, heldout, length, message in (
        (long, long, "32768", f"--text {long}: has \\d+ tokens, and 5 x 32768 are needed; .* --batch_size or"),
        (long, short, "512", f"--text {short}: has \\d+ tokens, and 1 x 512 are needed; .* lower --sequence_length$"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            script.main([*base, "--text", train, heldout, "--sequence_length", length])


def test_as_much_text_as_is_asked_for_makes_full_batches(script: ModuleType) -> None:
    """Whatever the offsets of many passes are, and not with a token less."""
    draws = itertools.islice(script.batches(torch.arange(5 * 8), 4, 8, seed=0), 50)
    assert all(batch.shape == (4, 8) for batch in draws)
    draws = itertools.islice(script.batches(torch.arange(5 * 8 - 2), 4, 8, seed=0), 50)
    assert any(batch.shape != (4, 8) for batch in draws)
