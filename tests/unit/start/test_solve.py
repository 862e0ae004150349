"""One block after another: exact patterns, SparseGPT's own result without training, less error with it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, OlmoeConfig

from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig
from sparseforge_ds.mask.pattern import NM, Pattern, parse_pattern
from sparseforge_ds.mask.reconstruct import reconstruct
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.start.blocks import capture_inputs, decoder_blocks, run_block
from sparseforge_ds.start.solve import BETAS, EPS, SolvedBlock, SolveOptions, solve_block
from sparseforge_ds.zero.layer_hooks import layer_inputs
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_mixture, token_batch

BATCHES = 4


def _solve_all(
    model: Any, settings: BlockStartConfig, pattern: str = "2:4", batches: int = BATCHES, **options: Any
) -> list[SolvedBlock]:
    """Prune a model in place."""
    model.eval()
    weights = prunable_weights(model, SparseForgeConfig(pattern=pattern))
    blocks = decoder_blocks(model, weights)
    ids = [{"input_ids": token_batch(seed=seed)["input_ids"]} for seed in range(batches)]
    inputs = list(capture_inputs(model, blocks, ids))
    dense = [batch.hidden_BSH for batch in inputs]
    pruned = list(dense)
    solved = []
    for number, block in enumerate(blocks):
        module = model.get_submodule(block.name)

        def call(batch: int, hidden: Tensor, module: nn.Module = module, number: int = number) -> Tensor:
            return run_block(module, hidden, inputs[batch].arguments[number])

        solved.append(
            solve_block(
                module, dense, pruned, call, block.weights, parse_pattern(pattern), settings, SolveOptions(**options)
            )
        )
    return solved


def _require_pattern(model: Any, solved: list[SolvedBlock], pattern: Pattern) -> None:
    weights = prunable_weights(model, SparseForgeConfig(pattern=str(pattern)))
    masks = [mask for block in solved for mask in block.masks.values()]
    for weight, mask in zip(weights, masks, strict=True):
        value = model.get_parameter(weight.name).detach()
        kept_GM = pattern.to_groups(mask.reshape(-1), weight.shape, weight.input_axis)
        assert (kept_GM.sum(1) == pattern.kept_count).all()
        assert not value[~mask].any() and not value[~mask].signbit().any()


@pytest.mark.parametrize("mask", ["sparsegpt", "wanda", "magnitude"])
@pytest.mark.parametrize(("build", "pattern"), [(tiny_llama, "2:4"), (tiny_gpt2, "4:8")])
def test_training_lowers_the_error_of_every_mask_and_soft_masks_move(build: Any, pattern: str, mask: Any) -> None:
    untrained = _solve_all(build(), BlockStartConfig(mask=mask, epochs=0), pattern)
    for soft, epochs in ((0.0, 4), (0.4, 10)):
        model = build()
        solved = _solve_all(model, BlockStartConfig(mask=mask, epochs=epochs, soft=soft), pattern)
        _require_pattern(model, solved, parse_pattern(pattern))
        assert all(block.error < 0.95 * block.error_before for block in solved)
        # The first block of all reads the same.
        assert solved[0].error_before == untrained[0].error
        moved = [not torch.equal(ours, untrained[0].masks[name]) for name, ours in solved[0].masks.items()]
        assert any(moved) == (soft > 0)


def test_adam_moves_no_weight_that_a_frozen_mask_has_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept weights are trained beside exact zeros, as they will be stored."""
    zeros: list[float] = []

    class Watched(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            matrices = [p for p in self.param_groups[0]["params"] if p.dim() == 2]
            zeros.append(float(torch.stack([(p == 0).float().mean() for p in matrices]).mean()))

    monkeypatch.setattr(torch.optim, "Adam", Watched)
    _solve_all(tiny_llama(num_hidden_layers=1), BlockStartConfig(epochs=5))
    assert len(zeros) == 5 * BATCHES and zeros[0] < 0.01
    assert zeros[8:] == [0.5] * (len(zeros) - 8)  # frozen after 0.4 of the steps


@torch.no_grad()
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_a_start_without_training_is_sparsegpt_by_passes_of_the_whole_model(build: Any) -> None:
    model = build()
    expected = build().eval()
    _solve_all(model, BlockStartConfig(mask="sparsegpt", epochs=0))
    weights = prunable_weights(expected, SparseForgeConfig())
    # The reference runs the whole model for each block, with the blocks before it pruned.
    for block in ("0", "1"):
        of_block = [weight for weight in weights if f".{block}." in weight.name]
        gram = {w.name: torch.zeros(w.shape[w.input_axis], w.shape[w.input_axis]) for w in of_block}

        def add(name: str, input_TI: Tensor, gram: dict[str, Tensor] = gram) -> None:
            gram[name] += input_TI.t() @ input_TI

        with layer_inputs({w.name: expected.get_submodule(w.module) for w in of_block}, add):
            for seed in range(BATCHES):
                expected(input_ids=token_batch(seed=seed)["input_ids"])
        # Reconstruct each of its weights from the sums of its inputs.
        for weight in of_block:
            value = expected.get_parameter(weight.name).data
            transposed = weight.input_axis == -2
            updated, _ = reconstruct((value.t() if transposed else value).contiguous(), gram[weight.name], 2, 4, 0.01)
            value.copy_(updated.t() if transposed else updated)
    # Masks are equal; values are, up to the order of sums.
    for weight in weights:
        ours = model.get_parameter(weight.name)
        reference = expected.get_parameter(weight.name)
        assert torch.equal(ours == 0, reference == 0), weight.name
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mask", ["wanda", "magnitude"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_a_first_mask_keeps_the_two_largest_scores_of_four(build: Any, mask: Any) -> None:
    """|w|, or with Wanda |w| times the length of its input over all tokens (arXiv 2306.11695, eq. 1)."""
    dense = build(num_hidden_layers=1).eval()
    weights = prunable_weights(dense, SparseForgeConfig())
    layers = {weight.name: dense.get_submodule(weight.module) for weight in weights}
    square_I = {weight.name: torch.zeros(weight.shape[weight.input_axis]) for weight in weights}
    with layer_inputs(layers, lambda name, input_TI: square_I[name].add_(input_TI.square().sum(0))), torch.no_grad():
        for seed in range(BATCHES):
            dense(input_ids=token_batch(seed=seed)["input_ids"])
    masks = _solve_all(build(num_hidden_layers=1), BlockStartConfig(mask=mask, epochs=0))[0].masks
    for weight, kept in zip(weights, masks.values(), strict=True):
        value = dense.get_parameter(weight.name).detach()
        value_OI, kept_OI = (value.t(), kept.t()) if weight.input_axis == -2 else (value, kept)
        score_OI = value_OI.abs() * (square_I[weight.name].sqrt() if mask == "wanda" else 1)
        expected_OG = score_OI.unflatten(1, (-1, 4)).topk(2).indices.sort().values
        assert torch.equal(kept_OI.unflatten(1, (-1, 4)).int().topk(2).indices.sort().values, expected_OG), weight.name


def test_training_is_adam_on_the_relative_errors_of_tokens() -> None:
    """Repeat it on whole models: inputs are those of the pruned model, targets the outputs of the dense one."""
    ours, reference = tiny_llama().eval(), tiny_llama().eval()
    for model in (ours, reference):  # tokens of very different lengths, whose errors count alike
        model.model.embed_tokens.weight.data.mul_(torch.logspace(-1, 1, model.config.vocab_size)[:, None])
    dense = copy.deepcopy(reference)
    epochs = 6
    _solve_all(ours, BlockStartConfig(mask="magnitude", soft=0, epochs=epochs), batches=1)

    def output(model: Any, layer: int) -> Tensor:
        outputs: list[Tensor] = []
        handle = model.model.layers[layer].register_forward_hook(lambda _layer, _inputs, out: outputs.append(out))
        model(input_ids=token_batch()["input_ids"])
        handle.remove()
        return outputs[0]

    for number, layer in enumerate(reference.model.layers):
        matrices = [parameter for parameter in layer.parameters() if parameter.dim() == 2]
        # Magnitude keeps two of four. The rate of a parameter is relative to its size, of what is left.
        masks = []
        for matrix in matrices:
            groups = matrix.detach().abs().view(-1, 4)
            masks.append((groups >= groups.topk(2).values[:, 1:]).view_as(matrix))
            matrix.data *= masks[-1]
        sizes = [parameter.detach().square().mean().sqrt() for parameter in layer.parameters()]
        mean = torch.stack([s for s, p in zip(sizes, layer.parameters(), strict=True) if p.dim() == 2]).mean()
        rates = [
            BlockStartConfig().rate * (size if parameter.dim() == 2 else size.clamp(max=mean)).item()
            for size, parameter in zip(sizes, layer.parameters(), strict=True)
        ]
        target = output(dense, number).detach()
        optimizer = torch.optim.Adam([{"params": [p]} for p in layer.parameters()], betas=BETAS, eps=EPS)
        for step in range(epochs):
            distance = (output(reference, number) - target).square().sum(-1)
            optimizer.zero_grad()
            (distance / target.square().sum(-1)).mean().backward()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 + math.cos(math.pi * step / epochs)) / 2
            optimizer.step()
            for matrix, mask in zip(matrices, masks, strict=True):
                matrix.data *= mask
    for layer, expected in zip(ours.model.layers, reference.model.layers, strict=True):
        for value, wanted in zip(layer.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(value, wanted.detach(), rtol=1e-3, atol=1e-5)


def test_a_block_trains_alike_where_gains_are_folded_into_its_matrices() -> None:
    """Matrices of one block may differ in size by as much as the gains of norms, which some models have folded in."""
    models = [tiny_llama(), tiny_llama()]
    gain = 1 / 16
    for model, of_norm, of_matrix in zip(models, (gain, 1.0), (1.0, gain), strict=True):
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.data.fill_(of_norm)
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.data.mul_(of_matrix)
    settings = BlockStartConfig(mask="magnitude", epochs=6)
    apart, folded = (_solve_all(model, settings, is_trained=lambda _name: False) for model in models)
    for ours, other in zip(apart, folded, strict=True):
        assert ours.error < 0.95 * ours.error_before and ours.error == pytest.approx(other.error, rel=1e-4)
        assert all(torch.equal(kept, other.masks[name]) for name, kept in ours.masks.items())


@pytest.mark.parametrize("config", [OlmoeConfig, GptOssConfig])
@pytest.mark.parametrize("mask", [None, "wanda", "magnitude"])
def test_experts_are_trained_too_and_their_router_stays(config: Any, mask: Any) -> None:
    """64 tokens are enough for experts with 16 or 32 inputs, if they come."""
    model = tiny_mixture(config)
    dense = tiny_mixture(config)
    solved = _solve_all(model, BlockStartConfig(mask=mask, epochs=6), batches=8)
    _require_pattern(model, solved, NM(2, 4))
    masked = {weight.name for weight in prunable_weights(dense, SparseForgeConfig())}
    for (name, value), (_, before) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        router = name not in masked and ("mlp.gate." in name or "router" in name)
        assert not router or torch.equal(value, before), name
    trained = [name for name in masked if name.endswith("down_proj")]
    assert any(
        (after != before)[after != 0].any()
        for after, before in ((model.get_parameter(n), dense.get_parameter(n)) for n in trained)
    )


@pytest.mark.parametrize("soft", [0.0, 0.4])
def test_an_expert_with_few_tokens_keeps_its_first_mask_and_says_so(soft: float) -> None:
    model = tiny_mixture(OlmoeConfig)
    dense = tiny_mixture(OlmoeConfig)
    for network in (model, dense):  # no token chooses expert 3
        for layer in network.model.layers:
            layer.mlp.gate.weight.data[3] = 0
            layer.mlp.gate.weight.data[:3] *= 100
    solved = _solve_all(model, BlockStartConfig(mask="magnitude", epochs=4, soft=soft))
    assert all(block.few_tokens["mlp.experts.down_proj"] >= 1 for block in solved)
    assert all(any(said.startswith("mlp.experts.down_proj: ") for said in b.warnings()) for b in solved)
    magnitude = tiny_mixture(OlmoeConfig)
    _solve_all(magnitude, BlockStartConfig(mask="magnitude", epochs=0))
    for layer, expected in zip(model.model.layers, magnitude.model.layers, strict=True):
        subset = [e for e in range(4) if torch.equal(layer.mlp.experts.down_proj[e], expected.mlp.experts.down_proj[e])]
        assert subset


def test_an_expert_with_few_tokens_keeps_its_biases() -> None:
    model = tiny_mixture(GptOssConfig)
    settings = BlockStartConfig(epochs=2)
    before = {name: bias.detach().clone() for name, bias in model.named_parameters() if name.endswith("proj_bias")}
    solved = _solve_all(model, settings, batches=1)
    changed = {name for name, value in before.items() if not torch.equal(model.get_parameter(name), value)}
    starved = {
        f"model.layers.{number}.{weight}_bias"
        for number, block in enumerate(solved)
        for weight, experts in block.few_tokens.items()
        if experts == 4
    }
    assert starved and not changed & starved


def test_a_block_that_training_made_worse_says_so_and_others_say_nothing() -> None:
    worse = _solve_all(tiny_llama(), BlockStartConfig(epochs=1, rate=0.3))[0]
    assert worse.error_before < worse.error < 1
    assert worse.warnings() == [
        f"4 steps have raised its error from {worse.error_before:.3g} to {worse.error:.3g}; give it more tokens or "
        "epochs, or a lower rate"
    ]
    for quiet in (BlockStartConfig(), BlockStartConfig(epochs=0)):
        assert not any(block.warnings() for block in _solve_all(tiny_llama(), quiet))


def test_every_micro_batch_is_trained_on_where_steps_do_not_divide_them() -> None:
    model = tiny_llama().eval()
    block = decoder_blocks(model, prunable_weights(model, SparseForgeConfig()))[0]
    ids = [{"input_ids": token_batch(seed=seed)["input_ids"]} for seed in range(5)]
    inputs = list(capture_inputs(model, [block], ids))
    trained = []

    def call(batch: int, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            trained.append(batch)
        return run_block(model.get_submodule(block.name), hidden, inputs[batch].arguments[0])

    streams = [[batch.hidden_BSH for batch in inputs] for _ in range(2)]
    settings = BlockStartConfig(epochs=2)
    pattern = parse_pattern("2:4")
    module = model.get_submodule(block.name)
    solved = solve_block(module, *streams, call, block.weights, pattern, settings, SolveOptions(per_step=2))
    assert sorted(trained) == sorted([*range(5), *range(5)]) and solved.steps == 6
    # Epochs differ in the order of their steps.
    assert trained[:5] != trained[5:] and trained[:5] != sorted(trained[:5])


def test_ranks_sum_all_that_decides_and_gradients_are_those_of_one_rank() -> None:
    """Two equal ranks: their sums are twice those of one, and Adam does not see the scale of gradients."""
    first, second = tiny_llama(), tiny_llama()
    _solve_all(first, BlockStartConfig(epochs=2), per_step=2)
    summed = []

    def double(tensors: list[Tensor]) -> None:
        summed.append(len(tensors))
        for tensor in tensors:
            tensor.mul_(2)

    blocks = _solve_all(second, BlockStartConfig(epochs=2), per_step=2, reduce=double, ranks=2)
    for ours, reference in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-5)
    # In each block: moments of the inputs, two errors, a gradient in each step, and sums of curvature at an update.
    moments, steps, updates = 1, 4, 1
    assert len(summed) == len(blocks) * (moments + 2 + steps + updates), summed


def test_parameters_are_rounded_to_what_is_stored() -> None:
    model = tiny_llama()
    for parameter in model.model.layers.parameters():
        parameter.data.mul_(1 + 2**-10)  # no value of bf16
    dense = copy.deepcopy(model.model.layers[0].state_dict())
    dtypes = {name: torch.float32 if "norm" in name else torch.bfloat16 for name in dense}
    _solve_all(model, BlockStartConfig(epochs=1), stored=dtypes, is_trained=lambda _name: False)
    for layer in model.model.layers:
        for name, value in layer.state_dict().items():
            assert torch.equal(value, value.bfloat16().float()) == ("norm" not in name), name
    norm = "input_layernorm.weight"
    assert torch.equal(model.model.layers[0].state_dict()[norm], dense[norm])


def test_masks_that_a_model_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r'"sparsegpt".*experts.*use "wanda"'):
        _solve_all(tiny_mixture(OlmoeConfig), BlockStartConfig(mask="sparsegpt"))
    with pytest.raises(ValueError, match="n:m"):
        _solve_all(tiny_llama(), BlockStartConfig(mask="sparsegpt"), "block16")
    with pytest.raises(
        ValueError, match=r"training has raised the error of the block from 0\.\d+ .*a rate below 100 \(st"
    ):
        _solve_all(tiny_llama(), BlockStartConfig(rate=100))
    broken = tiny_llama()
    broken.model.layers[0].self_attn.v_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        _solve_all(broken, BlockStartConfig())
    for epochs in (0, 2):  # and no block is trained on them
        work: list[int] = []
        with pytest.raises(ValueError, match="outputs of the block are not finite"):
            _solve_all(broken, BlockStartConfig(mask="magnitude", epochs=epochs), progress=work.append)
        assert sum(work) == 2 * BATCHES, work
