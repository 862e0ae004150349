"""The loss of a micro-batch: by blocks of logits, and by whole ones where a model scales or caps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, JetMoeConfig, OlmoeConfig, PreTrainedModel

from sparseforge_ds.config import DistillationConfig, HiddenConfig, SparseForgeConfig
from sparseforge_ds.data.micro_batch import MicroBatch
from sparseforge_ds.model.distill import distillation_loss, task_loss
from sparseforge_ds.model.head import loss_in_head
from sparseforge_ds.model.teacher import Teacher
from sparseforge_ds.train.objective import Objective
from tests.tiny_models import tiny_llama, tiny_mixture, token_batch

CONFIG = SparseForgeConfig.from_dict({"distillation": {"hold": "replicated", "temperature": 2.0}})


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseforge_ds.model.distill.CHUNK_TOKENS", 5)


class Engine:
    """A model called as an engine is."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module.train()

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def _gemma(cap: float | None, seed: int = 2) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    return AutoModelForCausalLM.from_config(Gemma2Config(**sizes, **heads, final_logit_softcapping=cap))


def _micro_batches() -> list[Tensor]:
    return [token_batch(seed=seed)["input_ids"] for seed in range(3)]


def _expected(student: PreTrainedModel, teacher: PreTrainedModel, token_BS: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = teacher.eval()(input_ids=token_BS).logits
    assert CONFIG.distillation is not None
    logits = student(input_ids=token_BS).logits
    return torch.stack(list(distillation_loss(logits, wanted, token_BS, CONFIG.distillation))[:3])


@pytest.mark.parametrize(("cap", "full"), [(None, None), (2.0, "Gemma2ForCausalLM scales or caps the logits")])
def test_a_teacher_that_caps_its_logits_is_said_and_heard(cap: float | None, full: str | None) -> None:
    student = tiny_llama()
    assert CONFIG.distillation is not None
    objective = Objective(Engine(student), Teacher(_gemma(cap), CONFIG.distillation, {}), CONFIG)
    result = objective.why_whole_logits(_micro_batches()[0][:1, :1])
    assert result is None if full is None else result is not None and result.startswith(full)
    assert student.training
    batches = [MicroBatch(token_BS, token_BS) for token_BS in _micro_batches()]
    with objective.targets(batches) as targets:
        for token_BS, batch, target in zip(_micro_batches(), batches, targets, strict=True):
            total, parts = objective.loss(batch, target)
            torch.testing.assert_close(parts[:3], _expected(student, _gemma(cap), token_BS).detach())
            assert parts[3:].tolist() == [0, 0]
            total.backward()
    assert student.lm_head.weight.grad is not None


def test_a_student_that_caps_its_logits_trains_on_whole_logits() -> None:
    student = _gemma(2.0)
    objective = Objective(Engine(student), None, CONFIG)
    assert "Gemma2ForCausalLM scales or caps" in str(objective.why_whole_logits(_micro_batches()[0][:1, :1]))
    token_BS = _micro_batches()[0]
    result = objective.cross_entropy(MicroBatch(token_BS, token_BS))
    assert torch.equal(result, task_loss(student(input_ids=token_BS).logits, token_BS))


def test_the_task_loss_of_probes_makes_no_logits() -> None:
    student = tiny_llama()
    token_BS = _micro_batches()[0]
    objective = Objective(Engine(student), None, CONFIG)
    assert objective.why_whole_logits(token_BS[:1, :1]) is None
    outputs: list[Tensor] = []
    student.lm_head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    result = objective.cross_entropy(MicroBatch(token_BS, token_BS))
    torch.testing.assert_close(result, task_loss(student(input_ids=token_BS).logits, token_BS))
    assert outputs[0].shape[-1] != 64


def test_padding_reaches_the_task_loss_of_probes() -> None:
    student = tiny_llama()
    token_BS = _micro_batches()[0]
    mask_BS = torch.ones_like(token_BS)
    mask_BS[:, :4] = 0
    label_BS = token_BS.masked_fill(mask_BS == 0, -100)
    objective = Objective(Engine(student), None, CONFIG)
    objective.why_whole_logits(token_BS[:1, :1])
    result = objective.cross_entropy(MicroBatch(token_BS, label_BS, extra_inputs={"attention_mask": mask_BS}))
    expected = task_loss(student(input_ids=token_BS, attention_mask=mask_BS).logits, label_BS)
    torch.testing.assert_close(result, expected)
    assert not torch.allclose(expected, task_loss(student(input_ids=token_BS).logits, label_BS))


def test_the_balance_of_experts_is_added() -> None:
    student = tiny_mixture(OlmoeConfig, output_router_logits=True, router_aux_loss_coef=0.1)
    objective = Objective(Engine(student), None, CONFIG)
    token_BS = _micro_batches()[0]
    total, parts = objective.loss(MicroBatch(token_BS, token_BS), None)
    output = student(input_ids=token_BS)
    torch.testing.assert_close(parts[4], (0.1 * output.aux_loss).detach())
    torch.testing.assert_close(total.detach(), parts[1] + parts[4])


@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_weight_of_hidden_states_falls_with_the_progress(cap: float | None) -> None:
    hidden = HiddenConfig(weight=2.0, until=0.5)
    distillation = DistillationConfig(weight=0.6, task_weight=0.3, hold="replicated", hidden=hidden)
    teacher = Teacher(_gemma(cap, seed=1), distillation, {})
    objective = Objective(Engine(_gemma(cap)), teacher, replace(CONFIG, distillation=distillation))
    token_BS = _micro_batches()[0]
    objective.why_whole_logits(token_BS[:1, :1])

    def parts_at(progress: float) -> list[float]:
        batch = MicroBatch(token_BS, token_BS)
        with objective.targets([batch]) as (target,):
            total, parts = objective.loss(batch, target, progress)
            total.backward()
        return parts.tolist()

    for progress, weight in ((0.0, 2.0), (0.25, 1.0), (0.4, 0.4)):
        total, cross_entropy, kl, distance, _ = parts_at(progress)
        assert total == pytest.approx(0.3 * cross_entropy + 0.6 * kl + weight * distance, rel=1e-5) and distance > 0
    for progress in (0.5, 1.0, 1.5):  # and of a run that was extended
        total, cross_entropy, kl, distance, _ = parts_at(progress)
        assert distance == 0 and total == pytest.approx(0.3 * cross_entropy + 0.6 * kl, rel=1e-5)


def test_a_weight_that_changes_is_refused_where_nobody_knows_the_progress() -> None:
    distillation = DistillationConfig(hidden=HiddenConfig(until=0.5))
    token_BS = _micro_batches()[0]
    teacher = Teacher(_gemma(None, seed=1), replace(distillation, hold="replicated"), {})
    with (
        teacher.targets([{"input_ids": token_BS}]) as (target,),
        pytest.raises(ValueError, match=r"until = 0\.5: .* give it config\.at\(step / max_steps\)"),
    ):
        loss_in_head(_gemma(None), token_BS, distillation, target, input_ids=token_BS)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_hidden_losses_agree_in_the_head_and_with_whole_logits(cap: float | None) -> None:
    """Compare distances and their gradients; models that cap their logits are no other case."""
    hidden = HiddenConfig(weight=2.0)
    distillation = DistillationConfig(weight=1e-30, task_weight=0.0, hold="replicated", hidden=hidden)
    config = replace(CONFIG, distillation=distillation)
    student = _gemma(cap)
    teacher = Teacher(_gemma(cap, seed=1), distillation, {})
    objective = Objective(Engine(student), teacher, config)
    assert (objective.why_whole_logits(_micro_batches()[0][:1, :1]) is None) == (cap is None)
    assert objective.one_at_a_time
    token_BS = _micro_batches()[0]
    batch = MicroBatch(token_BS, token_BS)
    with objective.targets([batch]) as (target,):
        total, parts = objective.loss(batch, target)
        total.backward()
    assert parts[3] > 0 and total.item() == pytest.approx(2 * parts[3].item(), rel=1e-5)
    assert all(layer.mlp.down_proj.weight.grad.any() for layer in student.model.layers)


def test_the_balance_is_weighed_as_transformers_weighs_it() -> None:
    """JetMoE has the factor under another name, and models that see have it in the config of their text."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "kv_channels": 8}
    subset = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_config(JetMoeConfig(**sizes, **subset, output_router_logits=True))
    ids = token_batch()["input_ids"] % 64
    _, parts = Objective(Engine(student), None, CONFIG).loss(MicroBatch(ids, ids), None)
    full, bare = (student(input_ids=ids, labels=ids, output_router_logits=item).loss for item in (True, False))
    torch.testing.assert_close(parts[4], (full - bare).detach(), atol=1e-5, rtol=1e-3)
