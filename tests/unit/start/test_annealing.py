"""Soft masks of one block: sums of squared gradients, and masks of experts that do not move."""

from __future__ import annotations

from unittest import mock

import torch

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.start import annealing
from sparseforge_ds.start.annealing import Annealing
from sparseforge_ds.start.blocks import capture_inputs, decoder_blocks, run_block
from tests.tiny_models import tiny_llama, token_batch


def test_layers_with_one_input_share_its_squares() -> None:
    model = tiny_llama().eval()
    block = decoder_blocks(model, prunable_weights(model, SparseForgeConfig()))[0]
    with torch.no_grad():
        captured = next(capture_inputs(model, [block], [{"input_ids": token_batch()["input_ids"]}]))
    module = model.get_submodule(block.name)
    ones = {weight.name: torch.ones(weight.shape, dtype=torch.bool) for weight in block.weights}
    soft = Annealing(module, block.weights, NM(2, 4), 4, ones, {})
    with mock.patch.object(annealing, "add_fisher_sums") as add, soft.collect_sums():
        run_block(module, captured.hidden_BSH, captured.arguments[0]).square().sum().backward()
    squares = [call.kwargs["squares"] for call in add.call_args_list]
    assert len(squares) == len(block.weights) and squares[0] is not None
    assert all(shared is squares[0] for shared in squares)
