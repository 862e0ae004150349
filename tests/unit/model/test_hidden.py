"""Distillation of hidden states against the textbook, for every family, with and without activation checkpointing."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForImageTextToText, Gemma3Config, PreTrainedModel

from sparseforge_ds.config import DistillationConfig, HiddenConfig
from sparseforge_ds.model import distill
from sparseforge_ds.model.distill import IGNORED, distillation_loss, next_labels
from sparseforge_ds.model.head import Head, Target, head_of, hidden_states, loss_in_head
from sparseforge_ds.model.hidden import capture_states, check_same_states, compare_hidden, compared_layers
from sparseforge_ds.transformers_internals import checkpoint_activations
from tests.tiny_models import BUILDERS, SCALED, tiny_gpt2, tiny_llama, token_batch

EVERY = [1, 2, 3, None]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", 5)


def _config(every: int | None = 1) -> DistillationConfig:
    return DistillationConfig(task_weight=0.4, hidden=HiddenConfig(0.8, every))


def _batch() -> tuple[Tensor, Tensor]:
    batch = token_batch()
    batch["labels"][1, :5] = IGNORED
    return batch["input_ids"], batch["labels"]


def _target(teacher: PreTrainedModel, ids: Tensor, config: DistillationConfig) -> Target:
    assert config.hidden is not None
    with torch.no_grad(), capture_states(compared_layers(teacher, config.hidden)) as states:
        hidden = hidden_states(teacher, lambda: teacher(input_ids=ids, use_cache=False))
    layer = head_of(teacher)
    return Target(hidden, Head(layer.weight, layer.bias), states)


def _found(student: PreTrainedModel, teacher: PreTrainedModel, config: DistillationConfig) -> Any:
    ids, labels = _batch()
    return loss_in_head(student, labels, config, _target(teacher.eval(), ids, config), input_ids=ids)[0]


def _textbook(student: PreTrainedModel, teacher: PreTrainedModel, every: int | None) -> Tensor:
    """Return the mean distance by plain autograd, on the states that plain hooks see, token by token."""
    ids, labels = _batch()
    trained = next_labels(labels).view_as(labels) != IGNORED
    result = [_states(model, ids) for model in (student, teacher)]
    last = len(result[0]) - 1
    wanted = [n for n in range(last + 1) if (n == last if every is None else (last - n) % every == 0)]
    distances = []
    for layer in wanted:
        actual = result[0][layer]
        other = result[1][layer].detach()
        tokens = [
            ((actual[b, s] - other[b, s]) ** 2).sum() / (other[b, s] ** 2).sum()
            for b in range(ids.shape[0])
            for s in range(ids.shape[1])
            if trained[b, s]
        ]
        distances.append(torch.stack(tokens).mean())
    return torch.stack(distances).mean()


def _states(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    states: list[Tensor] = []
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    handles = [
        layer.register_forward_hook(lambda _m, _i, out: states.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers
    ]
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return states


def _gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [family for family in BUILDERS if family not in SCALED])
def test_it_is_the_textbook_for_every_family(family: str) -> None:
    student = BUILDERS[family]()
    teacher = BUILDERS[family](seed=1).eval()
    config = _config()
    plain = DistillationConfig(task_weight=0.4)
    student.eval()  # no dropout; training mode is below
    ids, labels = _batch()
    with torch.no_grad():
        wanted = teacher(input_ids=ids, use_cache=False).logits
    expected = distillation_loss(student(input_ids=ids, use_cache=False).logits, wanted, labels, plain).total
    distance = _textbook(student, teacher, 1)
    expected_gradients = _gradients(student, expected + 0.8 * distance)
    losses = _found(student, teacher, config)
    torch.testing.assert_close(losses.hidden, distance.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(losses.total, (expected + 0.8 * distance).detach(), rtol=1e-5, atol=1e-6)
    assert losses.hidden > 0.01
    torch.testing.assert_close(_gradients(student, losses.total), expected_gradients, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("block", [1, 7, 1024])
def test_any_layers_and_blocks_give_the_textbook_distance(
    build: Any, every: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", block)
    student = build().eval()
    teacher = build(seed=1).eval()
    distance = _textbook(student, teacher, every)
    result = _found(student, teacher, _config(every))
    torch.testing.assert_close(result.hidden, distance.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_activation_checkpointing_changes_nothing(reentrant: bool, every: int) -> None:
    results = []
    for checkpointing in (False, True):
        student = tiny_llama().train()
        teacher = tiny_llama(seed=1).eval()
        if checkpointing:
            checkpoint_activations(student, reentrant)
        results.append(_gradients(student, _found(student, teacher, _config(every)).total))
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


def test_a_graph_that_checkpointing_keeps_away_is_no_loss_of_zero_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.20 checkpoints a layer's call, hooks included, where 5.23 checkpoints its forward."""
    student = tiny_llama().train()
    teacher = tiny_llama(seed=1).eval()
    student.enable_input_require_grads()

    def call(layer: nn.Module, hidden: Tensor, **more: Any) -> Any:
        run = partial(nn.Module.__call__, layer, **more)
        return checkpoint(run, hidden, use_reentrant=True) if layer.training else run(hidden)

    monkeypatch.setattr(type(student.model.layers[0]), "__call__", call)
    with pytest.raises(ValueError, match='run without a gradient.*use_reentrant": False'):
        _found(student, teacher, _config())
    with torch.no_grad():
        assert _found(student, teacher, _config()).hidden > 0.01


def test_a_batch_may_be_divided() -> None:
    """Compare the mean over equal parts with that of all; an own normalisation of a batch would differ."""
    student = tiny_llama().eval()
    teacher = tiny_llama(seed=1).eval()
    config = _config()
    ids = token_batch(4)["input_ids"]
    parts = [
        loss_in_head(student, part, config, _target(teacher, part, config), input_ids=part)[0].hidden
        for part in (ids, ids[:2], ids[2:])
    ]
    torch.testing.assert_close(parts[0], (parts[1] + parts[2]) / 2, rtol=1e-5, atol=0)


def test_the_gradient_of_a_layer_exists_when_the_backward_pass_gets_there() -> None:
    """Formed after the pass, the gradients of all layers' distances would wait for their layers side by side."""
    student = tiny_llama().train()
    teacher = tiny_llama(seed=1).eval()
    config = _config()
    losses = _found(student, teacher, config)
    order: list[str] = []
    for node in _nodes(losses.total):
        if type(node).__name__ == "_DistanceFunctionBackward":
            node.register_hook(lambda *_: order.append("distance"))
    for layer in student.model.layers:
        layer.mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda _: order.append("layer"))
    losses.total.backward()
    assert order == ["distance", "layer"] * len(student.model.layers)


def _nodes(tensor: Tensor) -> set[Any]:
    result: set[Any] = set()
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in result:
            result.add(node)
            ahead += [before for before, _ in node.next_functions]
    return result


def test_other_passes_see_nothing_and_states_go_with_the_backward_pass() -> None:
    student = tiny_llama().train()
    teacher = tiny_llama(seed=1).eval()
    config = _config()
    ids, labels = _batch()
    before = student(input_ids=ids, use_cache=False).logits
    loss_in_head(student, labels, config, _target(teacher, ids, config), input_ids=ids)  # and no backward pass of it
    with torch.no_grad():
        assert student(input_ids=ids[:1, :3]).logits.shape[:2] == (1, 3)
    target = _target(teacher, ids, config)
    assert target.states is not None and len(target.states) == len(student.model.layers)
    losses, _ = loss_in_head(student, labels, config, target, input_ids=ids)
    losses.total.backward()
    assert target.states == [], "the teacher's states outlive the backward pass"
    after = student(input_ids=ids, use_cache=False).logits
    assert not any(type(node).__name__ == "_DistanceFunctionBackward" for node in _nodes(after.sum()))
    assert torch.equal(before, after)
    with torch.no_grad():
        again = loss_in_head(student, labels, config, _target(teacher, ids, config), input_ids=ids)[0]
    assert torch.equal(again.hidden, losses.hidden) and torch.equal(again.total, losses.total)


def test_a_copy_is_at_no_distance_and_has_no_gradient() -> None:
    student = tiny_llama().eval()
    teacher = tiny_llama().eval()
    config = DistillationConfig(weight=1e-30, task_weight=0.0, hidden=HiddenConfig())
    losses = _found(student, teacher, config)
    assert losses.hidden == 0
    assert all(gradient.abs().max() < 1e-25 for gradient in _gradients(student, losses.total).values())


def test_states_and_layers_that_do_not_fit_are_refused() -> None:
    student = tiny_llama()
    teacher = tiny_llama(seed=1).eval()
    config = _config()
    ids, labels = _batch()
    target = _target(teacher, ids, config)
    with pytest.raises(ValueError, match="no hidden states of the teacher"):
        loss_in_head(student, labels, config, target._replace(states=None), input_ids=ids)
    with pytest.raises(ValueError, match="1 hidden states of a teacher for"):
        loss_in_head(student, labels, config, target._replace(states=target.states[:1]), input_ids=ids)
    with pytest.raises(ValueError, match="the student's layer returns"):
        narrow = [state[..., :-1] for state in target.states]
        loss_in_head(student, labels, config, target._replace(states=narrow), input_ids=ids)
    with pytest.raises(ValueError, match="sees logits alone"):
        distillation_loss(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long), config)
    with pytest.raises(ValueError, match="Linear has no layers"):
        compared_layers(nn.Linear(2, 2), HiddenConfig())
    states = [torch.zeros(1)]
    next_T = torch.zeros(1, dtype=torch.long)
    with (
        pytest.raises(ValueError, match="0 of 1 layers ran"),
        compare_hidden(student, states, next_T, _config(every=None)),
    ):
        pass


@pytest.mark.parametrize(("key", "words"), [("hidden_size", "wide"), ("num_hidden_layers", "layers deep")])
def test_two_shapes_of_model_are_refused(key: str, words: str) -> None:
    def shaped(**sizes: int) -> Any:
        shape = SimpleNamespace(**{"hidden_size": 8, "num_hidden_layers": 2, **sizes})
        return SimpleNamespace(get_text_config=lambda: shape)

    check_same_states(shaped(), shaped(), Path("a"), Path("b"))
    with pytest.raises(ValueError, match=f"the student is .* {words} .* same {key}"):
        check_same_states(shaped(), shaped(**{key: 3}), Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"weight": 0.0},
            'distillation.hidden.weight = 0.0 is not valid: use a value > 0, at most 1e+06, or "hidden": null',
        ),
        ({"every": 0}, "distillation.hidden.every = 0 is not valid: use null or an integer >= 1"),
    ],
)
def test_impossible_settings_are_refused(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        HiddenConfig(**block)


def test_layers_of_a_vision_tower_are_not_compared() -> None:
    text = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = Gemma3Config(text_config={**text, "vocab_size": 64, "num_key_value_heads": 1}, vision_config=tower)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    layers = compared_layers(model, HiddenConfig(1.0, 1))
    assert layers == list(model.get_decoder().layers) and len(layers) == 2
