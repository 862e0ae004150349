"""Zeros of a sparse model stay zeros in a plain PyTorch loop, and what cannot be kept is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from sparseforge_ds import MaskKeeper, keep_mask
from tests.distributed import run_distributed
from tests.sparse_folders import sparse_model
from tests.tiny_models import BUILDERS, VOCABULARY, tiny_llama

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "sgd": lambda model: SGD(model.parameters(), lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def batch(step: int, micro_batch: int) -> Tensor:
    """Tokens of a micro-batch."""
    generator = torch.Generator().manual_seed(10 * step + micro_batch)
    return torch.randint(0, VOCABULARY, (2, 8), generator=generator)


def train(model: nn.Module, optimizer: Optimizer, steps: range, before_step: Callable[[], None] = lambda: None) -> list:
    """Train a plain loop with two micro-batches a step and clipping; return the norms of the gradients."""
    norms = []
    for step in steps:
        for micro_batch in range(2):
            token_BS = batch(step, micro_batch)
            (model(input_ids=token_BS, labels=token_BS).loss / 2).backward()
        before_step()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def zeros_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() == 0 for name, p in model.named_parameters() if "_proj" in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loop_keeps_zeros_as_masked_gradients_by_hand_do(kind: str, dtype: torch.dtype) -> None:
    model = sparse_model(tiny_llama()).to(dtype)
    by_hand, alone, start = (copy.deepcopy(model) for _ in range(3))
    zeros = zeros_of(model)

    def mask_by_hand() -> None:
        for name, parameter in by_hand.named_parameters():
            if name in zeros:
                parameter.grad *= ~zeros[name]

    optimizer = OPTIMIZERS[kind](model)
    keeper = keep_mask(model, optimizer)
    norms = train(model, optimizer, range(3))
    keeper.check()
    assert keeper.pruned.keys() == zeros.keys() and str(keeper.pattern) == "2:4"

    # Bit for bit the same as a loop that masks by hand, where norms and moments never see a pruned entry.
    assert norms == train(by_hand, OPTIMIZERS[kind](by_hand), range(3), mask_by_hand)
    moment = "exp_avg" if kind == "adamw" else "momentum_buffer"
    for (name, trained), expected, first in zip(
        model.named_parameters(), by_hand.parameters(), start.parameters(), strict=True
    ):
        assert torch.equal(trained, expected), name
        assert not torch.equal(trained, first), name
        if name in zeros:
            assert not trained[zeros[name]].any() and not optimizer.state[trained][moment][zeros[name]].any()
    # Without it the zeros are lost.
    train(alone, OPTIMIZERS[kind](alone), range(1))
    assert any(bool(alone.get_parameter(name)[zero].any()) for name, zero in zeros.items())


def test_what_moments_would_revive_is_put_back_and_a_kept_weight_may_cross_zero() -> None:
    model = sparse_model(tiny_llama())
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, range(1))  # moments and a gradient from before
    sparse_model(model)
    (model(input_ids=batch(1, 0), labels=batch(1, 0)).loss).backward()
    keeper = keep_mask(model, [optimizer])
    name, weight = next((n, p) for n, p in model.named_parameters() if n in keeper.pruned)
    kept = int((~keeper.pruned[name]).view(-1).nonzero()[0])
    with torch.no_grad():
        weight.view(-1)[kept] = 0
    keeper.check()
    optimizer.step()
    keeper.check()
    assert weight.view(-1)[kept] != 0 and weight[keeper.pruned[name]].eq(0).all()
    # Weights that are changed from outside are found, and projected with the error.
    with torch.no_grad():
        weight += 0.01
    with pytest.raises(ValueError, match=rf"{name}: {int(keeper.pruned[name].sum()):,} pruned entries are not 0"):
        keeper.check()
    lost = 0.01 * float(keeper.pruned[name].sum()) ** 0.5 / float(weight.detach().norm())
    assert keeper.project()[name] == pytest.approx(lost, rel=1e-4)
    keeper.check()
    # Removed, it keeps nothing.
    keeper.remove()
    train(model, optimizer, range(1))
    assert weight[keeper.pruned[name]].any()


def test_a_resumed_loop_has_the_same_bits_where_a_kept_weight_is_zero() -> None:
    start = sparse_model(tiny_llama())

    def begin() -> tuple[nn.Module, Optimizer, MaskKeeper]:
        model = copy.deepcopy(start)
        optimizer = OPTIMIZERS["adamw"](model)
        return model, optimizer, keep_mask(model, optimizer)

    model, optimizer, keeper = begin()
    train(model, optimizer, range(2))
    name = next(iter(keeper.pruned))
    with torch.no_grad():
        model.get_parameter(name)[~keeper.pruned[name]] = 0  # all that are kept
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    resumed, optimizer, keeper = begin()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, range(2, 4))
    keeper.check()
    assert model.get_parameter(name).any()
    resumed.load_state_dict(saved[0], assign=True)
    with pytest.raises(ValueError, match=f"^{name}: the model has another parameter in its place, as load_state_dict"):
        keeper.check()
    resumed.load_state_dict(model.state_dict())
    for (name, value), expected in zip(resumed.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "llama4_text", "gpt_oss"])
def test_layers_of_other_orientation_and_experts_are_found(family: str) -> None:
    model = sparse_model(BUILDERS[family](), expected := {})
    keeper = keep_mask(model, SGD(model.parameters(), lr=0.1))
    assert keeper.pruned.keys() == expected.keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    keeper.project()
    for name, zero in expected.items():
        assert torch.equal(model.get_parameter(name) == 0, zero), name


def test_other_patterns_and_chosen_names_are_kept() -> None:
    model = sparse_model(tiny_llama(), pattern="4:8")
    optimizer = SGD(model.parameters(), lr=0.1)
    assert str(keep_mask(model, optimizer)).startswith("4:8 kept in 14 weights, with ")
    only = keep_mask(model, optimizer, pattern="4:8", names=["*.0.mlp.*", "*.q_proj.weight"])
    assert len(only.pruned) == 5
    block = sparse_model(tiny_llama(), pattern="block16")
    assert len(keep_mask(block, SGD(block.parameters(), lr=0.1), pattern="block16").pruned) == 14


def test_a_matrix_of_zeros_alone_is_kept_if_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = sparse_model(tiny_llama())
    name = "model.layers.1.mlp.up_proj.weight"
    model.get_parameter(name).data.zero_()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert name not in keep_mask(model, optimizer).pruned
    assert f"{name}: zeros alone, and not kept; to keep them, name all weights to keep by names=" in caplog.text
    assert bool(keep_mask(model, optimizer, names="*_proj.weight").pruned[name].all())
    assert bool(keep_mask(model, optimizer, names=name).pruned[name].all())
    # It chooses no pattern for the others.
    model = sparse_model(tiny_llama(), pattern="4:8")
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.zero_()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert str(keep_mask(model, optimizer, names="*_proj.weight")).startswith("4:8 kept in 14 weights")
    keep_mask(model, optimizer)
    assert "model.layers.0.mlp.up_proj.weight and 1 more: zeros alone" in caplog.text


def test_the_matrices_of_an_adapter_are_none_of_the_model() -> None:
    """An exported branch sums neighbouring inputs, so that seven of eight groups of its matrix are zeros."""
    model = sparse_model(tiny_llama())
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=8, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(torch.eye(8).repeat_interleave(4, dim=1))
    keeper = keep_mask(adapted, SGD(adapted.parameters(), lr=1e-2))
    assert keeper.pruned and not any("lora_" in name for name in keeper.pruned)


def test_what_cannot_be_kept_is_refused_in_a_line() -> None:
    model = sparse_model(tiny_llama())
    dense = tiny_llama()
    optimizer = SGD(model.parameters(), lr=0.1)

    def said(model: nn.Module = model, optimizer: object = optimizer, **more: object) -> str:
        with pytest.raises(ValueError) as refusal:
            keep_mask(model, optimizer, **more)
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    # No sparse weight, a damaged one, and names.
    assert "no weight of LlamaForCausalLM is 2:4 or 4:8 (nearest is model.layers." in said(
        dense, SGD(dense.parameters(), lr=0.1)
    )
    assert "no weight of LlamaForCausalLM is 1:4" in said(pattern="1:4")
    assert "names: *.nothing names no weight of a linear layer" in said(names=["*.nothing"])
    damaged = copy.deepcopy(model)
    damaged.model.layers[1].mlp.up_proj.weight.data[0, :4] = 1
    message = said(damaged, SGD(damaged.parameters(), lr=0.1))
    assert message.startswith("model.layers.1.mlp.up_proj.weight is not 2:4 in all groups (99.80% of them are)")
    damaged.model.layers[1].mlp.up_proj.weight.data = dense.model.layers[1].mlp.up_proj.weight.data
    assert len(keep_mask(damaged, SGD(damaged.parameters(), lr=0.1)).pruned) == 13  # a dense one is a choice
    assert "up_proj.weight is not 2:4 in all groups" in said(damaged, SGD(damaged.parameters()), names="*_proj.weight")
    assert "model is SGD; give the model itself, and the optimizer second" in said(optimizer, model)
    assert "pattern 2: give a text like '2:4'" in said(pattern=2)
    # Optimizers that do not step on these weights.
    cure = '{"method": "naive_retrain", "importance": "magnitude"}'
    assert "SGD trains no parameter of this LlamaForCausalLM" in said(optimizer=SGD(dense.parameters(), lr=0.1))
    message = said(optimizer=type("DeepSpeedZeroOptimizer", (), {"optimizer": optimizer})())
    assert message.startswith("optimizer is DeepSpeedZeroOptimizer") and cure in message
    # Weights that are not all here.
    with torch.device("meta"):
        assert "is on the meta device" in said(tiny_llama())
    sharded = copy.deepcopy(model)
    sharded.model.norm.weight.ds_shape = (32,)
    message = said(sharded, SGD(sharded.parameters(), lr=0.1))
    assert (
        message.startswith("model.norm.weight is partitioned by ZeRO-3; train it with SparseForge") and cure in message
    )


def _on_a_rank() -> tuple[list[float], dict[str, bool], str]:
    """Train under DistributedDataParallel; then shard the model by FSDP2 and ask again."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = sparse_model(tiny_llama())
    parallel = DistributedDataParallel(model)
    optimizer = OPTIMIZERS["adamw"](parallel)
    keeper = keep_mask(parallel, optimizer)
    norms = train(parallel, optimizer, range(2))
    keeper.check()
    sharded = fully_shard(sparse_model(tiny_llama()))
    try:
        keep_mask(sharded, SGD(sharded.parameters(), lr=0.1))
    except ValueError as error:
        return norms, {name: bool(mask.any()) for name, mask in keeper.pruned.items()}, str(error)
    raise AssertionError("FSDP2 was not refused")


def test_ranks_reduce_masked_gradients_and_shards_are_refused() -> None:
    (norms, pruned, refusal), _ = run_distributed(_on_a_rank, 2)
    model = sparse_model(tiny_llama())
    optimizer = OPTIMIZERS["adamw"](model)
    keep_mask(model, optimizer)
    assert norms == pytest.approx(train(model, optimizer, range(2)), rel=1e-5)  # every rank reads the same text
    assert len(pruned) == 14 and all(pruned.values())
    assert "is a DTensor, of which this process holds a part; use DistributedDataParallel" in refusal
