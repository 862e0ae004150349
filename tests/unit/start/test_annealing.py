"""Soft masks of one block: the equations, sums of squared gradients, and masks of experts that do not move."""

from __future__ import annotations

from unittest import mock

import torch
from transformers import OlmoeConfig

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.importance import scalings, score_moments
from sparseforge_ds.mask.pattern import NM, rank_in_group
from sparseforge_ds.mask.update import update_mask
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.start import annealing
from sparseforge_ds.start.annealing import DAMPING, DECAY, Annealing
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


def test_a_matrix_without_any_gradient_is_pruned_by_magnitude() -> None:
    model = tiny_llama().eval()
    block = decoder_blocks(model, prunable_weights(model, SparseForgeConfig()))[0]
    module = model.get_submodule(block.name)
    dense = {weight.name: module.get_parameter(weight.name).detach().clone() for weight in block.weights}
    soft = Annealing(module, block.weights, NM(2, 4), 4, {name: value > -9 for name, value in dense.items()}, {})
    for step in range(1, 5):
        frozen = soft.after_step(step, no_reduce)
    assert frozen is not None
    for name, value in dense.items():
        largest = (rank_in_group(value.square().reshape(-1, 4)) < 2).view_as(value)
        assert torch.equal(frozen[name], largest), name


def test_masks_and_weights_follow_the_equations() -> None:
    """Repeat eqs. 1 to 10 on one block: curvature from hooks of torch, masks by the readable `update_mask`."""
    model = tiny_llama().eval()
    pattern = NM(2, 4)
    block = decoder_blocks(model, prunable_weights(model, SparseForgeConfig()))[0]
    with torch.no_grad():
        captured = next(capture_inputs(model, [block], [{"input_ids": token_batch()["input_ids"]}]))
    module = model.get_submodule(block.name)
    layers = {weight.name: module.get_submodule(weight.module) for weight in block.weights}
    for layer in layers.values():
        layer.weight.requires_grad_(True)
    soft = Annealing(module, block.weights, pattern, 12, {n: layer.weight > -9 for n, layer in layers.items()}, {})
    # W, m, m_eff, and row and column sums of every weight.
    dense = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    masks = {name: torch.ones_like(value) for name, value in dense.items()}
    effective = dict(masks)
    sums = {name: [torch.zeros(size, dtype=torch.float64) for size in value.shape] for name, value in dense.items()}
    tokens: dict[str, list[torch.Tensor]] = {}

    def note(name: str, value: torch.Tensor) -> None:
        tokens.setdefault(name, []).append(value.detach().flatten(0, 1).double())

    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _layer, inputs, name=name: note(name, inputs[0]))
        layer.register_full_backward_hook(lambda _layer, _inputs, grad, name=name: note(name, grad[0]))
    updates = 0
    for step in range(1, soft.schedule.freeze_step):
        tokens.clear()
        with soft.collect_sums():
            run_block(module, captured.hidden_BSH, captured.arguments[0]).square().sum().backward()
        for name, layer in layers.items():
            # A token's squared gradient is the product of two squares, so its sums are, too.
            input_TI, grad_TO = (values.square() for values in tokens[name])
            sums[name][0] += (grad_TO * input_TI.sum(1, keepdim=True)).sum(0)
            sums[name][1] += (input_TI * grad_TO.sum(1, keepdim=True)).sum(0)
            # An optimizer moves what the network sees, and W takes the share m_eff of it.
            change = 0.01 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(step))
            layer.weight.data += change
            dense[name] += effective[name] * change
        soft.after_step(step, no_reduce)
        dials = soft.schedule.dials(step)
        for name, layer in layers.items():
            if soft.schedule.is_update(step):
                row_O, column_I = sums[name]
                curvature_OI = (row_O[:, None] * column_I / row_O.sum()).float()
                scaling = scalings(score_moments(dense[name], curvature_OI)[None], DAMPING)[0]
                groups = [value.view(-1, 4) for value in (dense[name], masks[name], curvature_OI)]
                mask_GM, _ = update_mask(*groups, scaling, dials, pattern)
                hard_GM = rank_in_group(mask_GM) < 2
                masks[name] = mask_GM.view_as(masks[name])
                effective[name] = torch.lerp(hard_GM.float(), mask_GM, dials.x).view_as(masks[name])
                sums[name] = [values * DECAY for values in sums[name]]
            torch.testing.assert_close(layer.weight.detach(), effective[name] * dense[name], rtol=1e-4, atol=1e-6)
        updates += soft.schedule.is_update(step)
    assert updates > 3 and any((mask < 0.9).any() for mask in masks.values())


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
