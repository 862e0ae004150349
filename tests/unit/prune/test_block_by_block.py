"""Pruning as a function: how tokens become steps, and what training is worth on a real model."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig
from sparseforge_ds.mask.pattern import parse_pattern
from sparseforge_ds.prune import block_by_block
from sparseforge_ds.prune.block_by_block import PruneSettings, micro_batches, prune
from sparseforge_ds.prune.hidden_streams import make_streams
from sparseforge_ds.prune.sequences import read_sequences
from sparseforge_ds.start.blocks import Inputs, capture_inputs
from tests.tiny_folders import write_model
from tests.tiny_models import seeing_qwen3_5, tiny_llama


@torch.no_grad()
def test_training_brings_a_real_model_closer(assets: Path, tmp_path: Path) -> None:
    """SparseGPT alone, and 16 steps a block after it, on the same 8,192 tokens."""
    folder = assets / "models" / "stories260K"
    texts = assets / "text" / "tinystories"
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sequences = read_sequences(tokenizer, dense.config, str(texts / "train.jsonl"), 8192, 256)
    unseen = read_sequences(tokenizer, dense.config, str(texts / "heldout.jsonl"), 2048, 256)
    target = dense(unseen).logits.log_softmax(-1)
    divergence = []
    for epochs in (0, 2):
        out = tmp_path / str(epochs)
        pruned = prune(folder, out, sequences, PruneSettings(SparseForgeConfig(), BlockStartConfig(epochs=epochs)))
        logits = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(unseen).logits.log_softmax(-1)
        divergence.append(float((target.exp() * (target - logits)).sum(-1).mean()))
        assert all(block.error <= block.error_before for block in pruned.blocks)
        assert not any(block.masks for block in pruned.blocks)  # in a large model they would take as much as a block
    assert divergence[1] < 0.75 * divergence[0]


def test_all_sequences_are_read_and_counted_where_steps_do_not_divide_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "dense")
    sequences_NS = torch.arange(40).view(5, 8)
    result = prune(
        folder, tmp_path / "out", sequences_NS, PruneSettings(SparseForgeConfig(), BlockStartConfig(batch=2))
    )
    assert result.tokens == result.record["run"]["tokens"] == result.record["source"]["tokens"] == 40
    assert {block.steps for block in result.blocks} == {4 * 3}


def test_arguments_that_depend_on_the_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_tokens(model: nn.Module, blocks: Any, batches: list) -> Iterator[Inputs]:
        for inputs, batch in zip(capture_inputs(model, blocks, batches), batches, strict=True):
            yield replace(inputs, arguments=tuple(block | {"tokens": batch["input_ids"]} for block in inputs.arguments))

    monkeypatch.setattr(block_by_block, "capture_inputs", with_tokens)
    settings = PruneSettings(SparseForgeConfig(), BlockStartConfig(batch=1))
    with pytest.raises(ValueError, match="arguments that depend on the tokens"):
        prune(write_model(tmp_path / "dense"), tmp_path / "out", torch.arange(16).view(2, 8), settings)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_what_cannot_be_pruned_is_refused_before_a_block_is_trained(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "dense")
    sequences_NS = torch.arange(16).view(2, 8)

    def refused(message: str, start: BlockStartConfig, pattern: str = "2:4") -> None:
        with pytest.raises(ValueError, match=message):
            prune(folder, tmp_path / "out", sequences_NS, PruneSettings(SparseForgeConfig(pattern=pattern), start))
        assert [path.name for path in tmp_path.iterdir()] == ["dense"]

    refused("pattern 4:4 keeps everything", BlockStartConfig(), "4:4")
    # An error inside a block says which, and which flag.
    refused(r"model\.layers\.0: training has raised the error .*--rate of prune", BlockStartConfig(rate=1000, batch=1))
    # The last block has a weight that is not finite.
    weights = load_file(folder / "model.safetensors")
    name = max(key for key in weights if "down_proj" in key)
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    refused(f"{name} is not finite", BlockStartConfig(batch=1))


def _narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].half()
    tensors["model.embed_tokens.weight"][0, 0] = 1e5


def _only_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("build", "change"),
    [
        pytest.param(tiny_llama, _narrow, id="a weight of another dtype"),
        pytest.param(partial(tiny_llama, tie_word_embeddings=True), _only_head, id="the head of two tied weights"),
        pytest.param(seeing_qwen3_5, lambda tensors: None, id="a text model with the names of one that sees"),
    ],
)
def test_what_transformers_loads_is_pruned(
    tmp_path: Path, build: Callable[[], PreTrainedModel], change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """Leave config.json its dtype, and everything but the pruned weights its values."""
    build().save_pretrained(tmp_path / "dense")
    weights = load_file(tmp_path / "dense" / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    settings = PruneSettings(SparseForgeConfig(), BlockStartConfig(epochs=0))
    record = prune(tmp_path / "dense", tmp_path / "out", torch.arange(16).view(2, 8), settings).record
    dense, pruned = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("dense", "out"))
    assert record["dtype"] == "float32" and pruned.dtype == torch.float32
    fused = {entry.get("fused_name", name) for name, entry in record["weights"].items()}
    for name, value in pruned.state_dict().items():
        assert torch.equal(value, dense.state_dict()[name]) == (name not in fused), name
    assert not any(".visual." in name for name in record["dense"])


@pytest.mark.parametrize("pattern", ["block16:.33203125", "block16"])
def test_a_tile_pattern_is_written_so_that_it_is_read_back(tmp_path: Path, pattern: str) -> None:
    folder = write_model(tmp_path / "dense")
    settings = PruneSettings(SparseForgeConfig(pattern=pattern), BlockStartConfig(epochs=0))
    result = prune(folder, tmp_path / "out", torch.arange(16).view(2, 8), settings)
    assert parse_pattern(result.record["pattern"]) == parse_pattern(pattern)


def test_tokens_are_divided_into_steps() -> None:
    def steps(sequences: int, length: int, hidden: int = 512, **start: int) -> tuple[int, int]:
        settings = BlockStartConfig(**start)
        size, per_step = micro_batches(sequences, length, hidden, settings)
        return size * per_step, settings.epochs * (sequences // size // per_step)

    assert steps(256, 256) == (2, 512)  # 65,536 tokens: 512 a step
    assert steps(512, 256) == (4, 512)
    assert steps(8192, 256) == (64, 512)  # 2M: 16,384 a step
    assert steps(16384, 256) == (64, 1024)  # and no more
    assert steps(8, 512, epochs=1) == (1, 8)
    assert steps(32, 256, epochs=2) == (1, 64)  # one sequence at least
    assert steps(32, 256, batch=8) == (8, 16)
    # A micro-batch leaves out 1% of the sequences at most.
    assert micro_batches(16, 32, 64, BlockStartConfig(batch=9)) == (1, 9)
    assert micro_batches(100, 32, 64, BlockStartConfig(batch=8)) == (4, 2)
    assert micro_batches(1001, 32, 64, BlockStartConfig(batch=8)) == (8, 1)
    assert micro_batches(4096, 2048, 5120, BlockStartConfig()) == (2, 4)  # 16,384 tokens of a wide model in four parts


def test_streams_that_fit_nowhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseforge_ds.prune.hidden_streams.SHARE", 0.0)
    with pytest.raises(ValueError, match=r"take 4096.0 GB.*fewer --tokens"):
        make_streams((10**9, 1, 1, 1024), torch.bfloat16, torch.device("cpu"), tmp_path)
    dense, pruned, where = make_streams((2, 1, 4, 8), torch.bfloat16, torch.device("cpu"), tmp_path)
    dense[1] = torch.ones(1, 4, 8)
    assert dense[1].eq(1).all() and len(pruned) == 2 and "on the disk" in where
    assert not list(tmp_path.iterdir()), "their files have no name, so that nothing is left of them"

    def full(_handle: int, _start: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: .*\.stream"):
        make_streams((2, 1, 4, 8), torch.bfloat16, torch.device("cpu"), tmp_path)
