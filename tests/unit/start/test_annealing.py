"""Soft masks of one block: sums of squared gradients, and masks of experts that do not move."""

from __future__ import annotations

from unittest import mock

import torch
from transformers import OlmoeConfig

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.start import annealing
from sparseforge_ds.start.annealing import Annealing
from sparseforge_ds.start.blocks import capture_inputs, decoder_blocks, run_block
from sparseforge_ds.start.solve import no_reduce
from tests.tiny_models import tiny_llama, tiny_mixture, token_batch


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


def test_masks_of_experts_with_few_tokens_stay_where_those_of_others_move() -> None:
    model = tiny_mixture(OlmoeConfig).eval()
    block = decoder_blocks(model, prunable_weights(model, SparseForgeConfig()))[0]
    with torch.no_grad():
        captured = next(capture_inputs(model, [block], [{"input_ids": token_batch()["input_ids"]}]))
    module = model.get_submodule(block.name)
    # First masks keep the two smallest of four, which no score would choose.
    first_masks = {}
    for weight in block.weights:
        parameter = module.get_parameter(weight.name)
        order = parameter.detach().unflatten(weight.input_axis, (-1, 4)).abs()
        axis = weight.input_axis if weight.input_axis == -1 else -2
        smallest = order.argsort(axis).argsort(axis) < 2
        first_masks[weight.name] = smallest.flatten(axis - 1, axis)
        parameter.data.mul_(first_masks[weight.name])
        parameter.requires_grad_(True)
    fused = [weight.name for weight in block.weights if len(weight.shape) == 3]
    starved = {name: torch.arange(4) == 1 for name in fused}
    soft = Annealing(module, block.weights, NM(2, 4), 4, first_masks, starved)
    # Steps that bring pruned weights back, larger than those that were kept.
    frozen = None
    for step in range(1, 5):
        with soft.collect_sums():
            run_block(module, captured.hidden_BSH, captured.arguments[0]).square().sum().backward()
        for weight in block.weights:
            module.get_parameter(weight.name).data.add_((~first_masks[weight.name]).float())
        frozen = soft.after_step(step, no_reduce)
        assert (frozen is None) == (step < 4)
    assert frozen is not None and fused
    for name in fused:
        stays = [torch.equal(ours, first) for ours, first in zip(frozen[name], first_masks[name], strict=True)]
        assert stays == [False, True, False, False], name
