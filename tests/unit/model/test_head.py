"""The loss inside of a head against the loss of whole logits, for every family, and what it never holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, Gemma2Config, GraniteConfig, PreTrainedModel

from sparseforge_ds.config import DistillationConfig, HiddenConfig
from sparseforge_ds.model import distill
from sparseforge_ds.model.distill import distillation_loss, next_labels, task_loss
from sparseforge_ds.model.head import Head, NonlinearHeadError, Target, head_of, hidden_states, loss_in_head
from sparseforge_ds.model.hidden import capture_states, compare_hidden, compared_layers
from sparseforge_ds.model.teacher import Teacher
from sparseforge_ds.transformers_internals import checkpoint_activations
from tests.tiny_models import (
    BUILDERS,
    LLAMA_LIKE,
    SCALED,
    VOCABULARY,
    random_model,
    tiny_llama,
    tiny_qwen3,
    token_batch,
)

CONFIG = DistillationConfig(weight=0.7, task_weight=0.4, temperature=2.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", 5)


def _batch() -> tuple[Tensor, Tensor]:
    batch = token_batch()
    batch["labels"][1, :5] = -100
    return batch["input_ids"], batch["labels"]


def _target(teacher: PreTrainedModel, ids: Tensor) -> Target:
    with torch.no_grad():
        hidden = hidden_states(teacher, lambda: teacher(input_ids=ids, use_cache=False))
    layer = head_of(teacher)
    return Target(hidden, Head(layer.weight, layer.bias))


def _of_whole_logits(student: PreTrainedModel, teacher: PreTrainedModel | None, config: DistillationConfig) -> Any:
    ids, labels = _batch()
    logits = student(input_ids=ids, use_cache=False).logits
    if teacher is None:
        return (task_loss(logits, labels),)
    with torch.no_grad():
        wanted = teacher(input_ids=ids, use_cache=False).logits
    return distillation_loss(logits, wanted, labels, config)


def _in_head(student: PreTrainedModel, teacher: PreTrainedModel | None, config: DistillationConfig) -> Any:
    ids, labels = _batch()
    target = None if teacher is None else _target(teacher.eval(), ids)
    return loss_in_head(student, labels, config, target, input_ids=ids)[0]


def _gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _agree(student: PreTrainedModel, teacher: PreTrainedModel | None, config: DistillationConfig, **close: Any) -> None:
    expected, result = (function(student, teacher, config) for function in (_of_whole_logits, _in_head))
    torch.testing.assert_close(tuple(result)[: len(expected)], tuple(expected), **close)
    expected, result = (_gradients(student, losses[0]) for losses in (expected, result))
    assert any(gradient.any() for gradient in expected.values())
    torch.testing.assert_close(result, expected, **close)


@pytest.mark.parametrize("chunk_tokens", [5, 1024], ids=["blocks", "one block"])
@pytest.mark.parametrize("family", [family for family in BUILDERS if family not in SCALED])
def test_every_family_has_the_loss_and_gradients_of_whole_logits(
    family: str, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", chunk_tokens)
    build = BUILDERS[family]  # in fp32, which fused experts do not exceed
    _agree(build().train(), build(seed=1), CONFIG, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_tied_heads_and_checkpointing_change_nothing(tied: bool, checkpointing: dict[str, bool] | None) -> None:
    student = tiny_qwen3(tie_word_embeddings=tied).double().train()
    if checkpointing is not None:
        checkpoint_activations(student, **checkpointing)
        student.enable_input_require_grads()
    _agree(student, tiny_llama(seed=1).double(), CONFIG)


@pytest.mark.parametrize("bias", [False, True])
def test_losses_agree_without_a_teacher_with_a_bias_and_frozen(bias: bool) -> None:
    student = tiny_llama().double()
    if bias:
        student.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY, dtype=torch.float64))
    _agree(student, None, CONFIG)
    _agree(student, tiny_llama(seed=1).double(), CONFIG)
    student.lm_head.requires_grad_(False)
    _agree(student, tiny_llama(seed=1).double(), CONFIG)
    assert student.lm_head.weight.grad is None


def test_a_teacher_may_have_another_width() -> None:
    _agree(tiny_llama().double(), tiny_llama(seed=1, hidden_size=48, num_attention_heads=6).double(), CONFIG)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_agree_to_rounding(dtype: torch.dtype) -> None:
    student = tiny_llama().to(dtype)
    teacher = tiny_llama(seed=1).to(dtype)
    expected, result = (function(student, teacher, CONFIG) for function in (_of_whole_logits, _in_head))
    assert result.total.dtype == torch.float32
    torch.testing.assert_close(tuple(result), tuple(expected), rtol=1e-5, atol=1e-6)
    expected, result = (_gradients(student, 1024 * losses[0]) for losses in (expected, result))
    for name, gradient in expected.items():
        assert (result[name] - gradient).float().norm() < 4 * torch.finfo(dtype).eps * gradient.float().norm(), name


def test_autocast_agrees_to_rounding() -> None:
    student = tiny_llama()
    teacher = tiny_llama(seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, result = (function(student, teacher, CONFIG) for function in (_of_whole_logits, _in_head))
    torch.testing.assert_close(tuple(result), tuple(expected), rtol=1e-3, atol=1e-4)  # the teacher's are fp32
    expected, result = (_gradients(student, losses[0]) for losses in (expected, result))
    for name, gradient in expected.items():
        assert result[name].dtype == torch.float32
        assert (result[name] - gradient).norm() < 0.02 * gradient.norm(), name


def test_blocks_are_no_part_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk_tokens in (1, 7, 1000):
        monkeypatch.setattr(distill, "CHUNK_TOKENS", chunk_tokens)
        student = tiny_llama().double()
        losses = _in_head(student, tiny_llama(seed=1).double(), DistillationConfig())
        results.append((losses.total.detach(), _gradients(student, losses.total)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_a_loss_without_a_graph_leaves_the_model_as_it_was() -> None:
    student = tiny_llama()
    teacher = tiny_llama(seed=1)
    ids, _ = _batch()
    before = student(input_ids=ids).logits
    with torch.no_grad():
        result = _in_head(student, teacher, CONFIG)
    assert torch.equal(result.total, _in_head(student, teacher, CONFIG).total)
    assert not result.total.requires_grad
    assert torch.equal(student(input_ids=ids).logits, before)
    assert "forward" not in vars(student.lm_head)


class _Widest(TorchDispatchMode):
    """The most elements of a tensor that an operation made, whose last axis or rows are of the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim > 1 and result.shape[-1] <= self.vocabulary:
            self.most = max(self.most, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_whole_logits_are_never_made() -> None:
    vocabulary, tokens = 4096, 32
    sizes = {"vocab_size": vocabulary, "hidden_size": 16, "num_attention_heads": 2, "tie_word_embeddings": False}
    student, teacher = (tiny_llama(seed=seed, intermediate_size=16, **sizes) for seed in range(2))
    student.model.embed_tokens.requires_grad_(False)
    ids = token_batch()["input_ids"]
    config = DistillationConfig()
    most = {}
    for name, full in (("head", False), ("logits", True)):
        with _Widest(vocabulary) as made:
            if full:
                with torch.no_grad():
                    wanted = teacher(input_ids=ids).logits
                loss = distillation_loss(student(input_ids=ids).logits, wanted, ids, config).total
            else:
                loss = loss_in_head(student, ids, config, _target(teacher, ids), input_ids=ids)[0].total
            loss.backward()
        most[name] = made.most
    assert most["logits"] == tokens * vocabulary
    assert most["head"] <= max(5 * vocabulary, 16 * vocabulary)  # a block, or the gradient of the head's weight


CAPPED = {
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 5.0, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "granite": (GraniteConfig, {"logits_scaling": 4.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
}


@pytest.mark.parametrize("family", CAPPED)
def test_what_scales_or_caps_its_logits_is_said(family: str) -> None:
    config, overrides = CAPPED[family]
    model = random_model(config, 0, {**LLAMA_LIKE, **overrides})
    ids, _ = _batch()
    with pytest.raises(NonlinearHeadError, match="scales or caps the logits"), torch.no_grad():
        hidden_states(model, lambda: model(input_ids=ids, use_cache=False))
    with pytest.raises(NonlinearHeadError, match="scales or caps the logits"):
        loss_in_head(model, ids, input_ids=ids)
    assert model(input_ids=ids).logits.shape[-1] == VOCABULARY


def test_a_model_without_a_linear_head_is_refused() -> None:
    model = tiny_llama()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(NonlinearHeadError, match="are Sequential, no nn.Linear"):
        loss_in_head(model, _batch()[1], input_ids=_batch()[0])


def test_vocabularies_and_labels_that_do_not_fit_are_errors() -> None:
    ids, labels = _batch()
    with pytest.raises(ValueError, match="the teacher's vocabulary has 80 entries and the student's 64"):
        loss_in_head(tiny_llama(), labels, CONFIG, _target(tiny_llama(vocab_size=80), ids), input_ids=ids)
    with pytest.raises(ValueError, match=r"labels \(2, 5\) do not belong to inputs \(2, 16\)"):
        loss_in_head(tiny_llama(), labels[:, :5], input_ids=ids)
    batch = {"input_ids": ids, "labels": labels}
    with pytest.raises(ValueError, match="^labels are among the inputs of the forward pass, whose logits are replaced"):
        loss_in_head(tiny_llama(), labels, **batch)
    teacher = Teacher(tiny_llama(), DistillationConfig(hold="replicated"), {})
    with pytest.raises(ValueError, match="^labels are among the inputs"), teacher.targets([batch]):
        pass
    loss = loss_in_head(tiny_llama(), labels, input_ids=ids)[0].total
    with pytest.raises(ValueError, match="has no second derivative"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_weight_gives_a_non_finite_loss(value: float) -> None:
    student = tiny_llama()
    with torch.no_grad():
        student.lm_head.weight[3, 3] = value
    assert not loss_in_head(student, _batch()[1], CONFIG, input_ids=_batch()[0])[0].total.isfinite()


@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize("hidden", [None, HiddenConfig(weight=2.0)])
def test_parts_of_a_step_add_up_to_its_mean(full_logits: bool, hidden: HiddenConfig | None) -> None:
    """Losses over a common number of trained tokens; a part without any gives zeros, and its backward pass runs."""
    config = replace(CONFIG, hidden=hidden)
    student = tiny_llama()
    teacher = tiny_llama(seed=1).eval()
    ids = _batch()[0]
    # The first sequence has no trained token, the second two.
    labels = ids.clone()
    labels[0] = -100
    labels[1, 3:] = -100

    def losses(rows: slice, trained: float | None) -> Any:
        with torch.no_grad(), capture_states(compared_layers(teacher, hidden) if hidden else []) as states:
            teacher_logits = teacher(input_ids=ids[rows], use_cache=False).logits
        target = _target(teacher, ids[rows])._replace(states=states if hidden else None)
        if not full_logits:
            return loss_in_head(student, labels[rows], config, target, trained, input_ids=ids[rows])[0]
        with compare_hidden(student, target.states, next_labels(labels[rows]), config, trained) as hidden_loss:
            logits = student(input_ids=ids[rows], use_cache=False).logits
        plain = distillation_loss(logits, teacher_logits, labels[rows], replace(config, hidden=None), trained)
        assert torch.equal(task_loss(logits, labels[rows], trained=trained).detach(), plain.cross_entropy)
        return hidden_loss.add_to(plain)

    # The step at once, then its sequences one by one.
    expected = losses(slice(None), None)
    of_step = _gradients(student, expected.total)
    number = int((labels[:, 1:] != -100).sum())
    parts = []
    of_parts = []
    for row in range(len(ids)):
        parts.append(losses(slice(row, row + 1), number / len(ids)))
        of_parts.append(_gradients(student, parts[-1].total))
        parts[-1] = torch.stack(parts[-1]).detach()
    # A sequence without a trained token adds nothing; the others add up to the mean.
    assert not parts[0].any() and not any(gradient.any() for gradient in of_parts[0].values())
    torch.testing.assert_close(torch.stack(parts).mean(0), torch.stack(expected).detach())
    for name, gradient in of_step.items():
        result = torch.stack([own[name] for own in of_parts]).mean(0)
        torch.testing.assert_close(result, gradient, rtol=1e-4, atol=1e-6)
