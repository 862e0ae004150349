"""Decoder blocks of every family: found by their weights, and called one by one as the whole model calls them."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from torch import Tensor, nn
from transformers import OpenAIGPTConfig

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.any_family import any_family
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.start.blocks import argument_names, capture_inputs, decoder_blocks, hidden_of, run_block
from tests.tiny_models import BUILDERS, random_model, tiny_llama, token_batch


def openai_gpt() -> nn.Module:
    """Return a model whose blocks return lists, of a family without rows."""
    return random_model(
        OpenAIGPTConfig, 0, {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    )


@torch.no_grad()
@pytest.mark.parametrize("family", [*BUILDERS, "openai-gpt"])
def test_blocks_one_by_one_are_the_model(family: str) -> None:
    """16 tokens are twice a sliding window, and rows differ in where documents begin."""
    model = BUILDERS.get(family, openai_gpt)().eval()
    blocks = decoder_blocks(model, prunable_weights(model, any_family(model, SparseForgeConfig())))
    batches = [{"input_ids": token_batch(seed=seed)["input_ids"]} for seed in (0, 1)]
    outputs: list[Tensor] = []
    last = model.get_submodule(blocks[-1].name)
    for inputs, batch in zip(capture_inputs(model, blocks, batches), batches, strict=True):
        hidden = inputs.hidden_BSH
        for block, arguments in zip(blocks, inputs.arguments, strict=True):
            hidden = run_block(model.get_submodule(block.name), hidden, arguments)
        handle = last.register_forward_hook(lambda _m, _i, output: outputs.append(output))
        model(**batch, use_cache=False)
        handle.remove()
        assert torch.equal(hidden, hidden_of(outputs.pop()))


@torch.no_grad()
def test_equal_arguments_are_shared_and_packed_documents_keep_their_own() -> None:
    model = tiny_llama().eval()
    blocks = decoder_blocks(model, prunable_weights(model, SparseForgeConfig()))
    ids = token_batch()["input_ids"]
    plain = {"input_ids": ids}
    packed = {"input_ids": ids, "position_ids": torch.arange(8).repeat(2, 2)}
    first, other, same = capture_inputs(model, blocks, [plain, packed, plain])
    assert first.arguments[0] is same.arguments[0] is not other.arguments[0]
    hidden = other.hidden_BSH
    for block, arguments in zip(blocks, other.arguments, strict=True):
        hidden = run_block(model.get_submodule(block.name), hidden, arguments)
    expected = model.model(**packed, use_cache=False, output_hidden_states=True).hidden_states
    assert torch.equal(model.model.norm(hidden), expected[-1])


@torch.no_grad()
def test_a_block_needs_no_weights_to_be_captured() -> None:
    model = tiny_llama()
    expected = next(capture_inputs(model, _blocks(model), [{"input_ids": token_batch()["input_ids"]}]))
    model.model.layers.to("meta")
    arguments = next(capture_inputs(model, _blocks(model), [{"input_ids": token_batch()["input_ids"]}]))
    assert torch.equal(arguments.hidden_BSH, expected.hidden_BSH)


def _blocks(model: nn.Module) -> list:
    return decoder_blocks(model, prunable_weights(model, SparseForgeConfig()))


def test_blocks_without_pruned_weights_are_there_too() -> None:
    model = tiny_llama(num_hidden_layers=3)
    blocks = decoder_blocks(model, prunable_weights(model, SparseForgeConfig(exclude=("*.layers.1.*",))))
    assert [block.name for block in blocks] == [f"model.layers.{number}" for number in range(3)]
    assert [len(block.weights) for block in blocks] == [7, 0, 7]
    assert blocks[2].weights[0].name == "self_attn.q_proj.weight"


def test_arguments_of_a_wrapped_forward_have_their_names() -> None:
    class Wrapped(nn.Module):
        @wraps(nn.MultiheadAttention.forward)
        def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
            return args[0] * len(kwargs)

    assert argument_names(Wrapped())[:2] == ["query", "key"]


def test_a_model_that_changes_its_hidden_states_between_blocks_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
            hidden = input_ids.float()
            for layer in self.layers:
                hidden = layer(hidden) * 2
            return hidden

    blocks = [type(_blocks(tiny_llama())[0])(f"layers.{number}", ()) for number in (0, 1)]
    with pytest.raises(ValueError, match="from block to block"):
        list(capture_inputs(Scaled(), blocks, [{"input_ids": torch.ones(1, 4)}]))
