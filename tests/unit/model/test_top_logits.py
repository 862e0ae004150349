"""Equation 12c, and its gradient, against a literal sum over K + 1 classes in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.model.distill import distillation_loss
from sparseforge_ds.model.head import loss_in_head
from sparseforge_ds.model.top_logits import TopLogits, largest_logits
from tests.tiny_models import tiny_llama

B, S, V, K = 2, 9, 64, 5


def literal(student_BSV: Tensor, teacher_BSV: Tensor, label_BS: Tensor, config: DistillationConfig) -> Tensor:
    """Total, cross-entropy and KL over the classes, token by token."""
    T = config.temperature
    cross_entropies = []
    divergences = []
    for b in range(B):
        for s in range(S - 1):
            if (label := int(label_BS[b, s + 1])) == -100:
                continue
            p, q = (torch.softmax(logits[b, s].double() / T, -1) for logits in (teacher_BSV, student_BSV))
            top = p.topk(K).indices
            rest = torch.ones(V, dtype=torch.bool).scatter(0, top, False)
            p, q = (torch.cat([share[top], share[rest].sum()[None]]) for share in (p, q))
            divergences.append(T * T * (p * (p / q).log()).sum())
            cross_entropies.append(F.cross_entropy(student_BSV[b, s][None].double(), torch.tensor([label])))
    cross_entropy, kl = torch.stack(cross_entropies).mean(), torch.stack(divergences).mean()
    return torch.stack([config.task_weight * cross_entropy + config.weight * kl, cross_entropy, kl])


def top_of(teacher_BSV: Tensor, largest: int, temperature: float) -> TopLogits:
    entry_TK, share_TL = largest_logits(teacher_BSV.flatten(0, 1), largest, temperature)
    return TopLogits(entry_TK.view(B, S, -1), share_TL.view(B, S, -1))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("chunk", [1024, 4])
def test_loss_and_gradient_are_those_of_the_classes(
    temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole logits, and blocks of rows and columns inside the head; some labels are ignored."""
    monkeypatch.setattr("sparseforge_ds.model.distill.CHUNK_TOKENS", chunk)
    config = DistillationConfig(weight=0.7, task_weight=0.3, temperature=temperature)
    student = tiny_llama()
    generator = torch.Generator().manual_seed(0)
    token_BS = torch.randint(V, (B, S), generator=generator)
    label_BS = token_BS.clone()
    label_BS[0, 3:6] = -100
    teacher_BSV = 3 * torch.randn(B, S, V, generator=generator)
    top = top_of(teacher_BSV, K, temperature)
    logits_BSV = student(input_ids=token_BS).logits
    expected = literal(logits_BSV, teacher_BSV, label_BS, config)
    wanted = torch.autograd.grad(expected[0], [logits_BSV, student.lm_head.weight])

    losses = distillation_loss(logits_BSV, top, label_BS, config)
    torch.testing.assert_close(torch.stack(losses[:3]).double(), expected, rtol=2e-5, atol=1e-6)
    (gradient_BSV,) = torch.autograd.grad(losses.total, logits_BSV)
    torch.testing.assert_close(gradient_BSV, wanted[0], rtol=1e-3, atol=1e-6)

    blocks, _ = loss_in_head(student, label_BS, config, top, input_ids=token_BS)
    torch.testing.assert_close(torch.stack(blocks[:3]).double(), expected, rtol=2e-5, atol=1e-6)
    (gradient_VH,) = torch.autograd.grad(blocks.total, student.lm_head.weight)
    torch.testing.assert_close(gradient_VH, wanted[1], rtol=1e-3, atol=1e-6)


def test_all_entries_but_one_are_the_full_divergence_and_fewer_are_less() -> None:
    config = DistillationConfig(weight=1.0, task_weight=0.0, temperature=2.0)
    generator = torch.Generator().manual_seed(1)
    student_BSV, teacher_BSV = (3 * torch.randn(B, S, V, generator=generator) for _ in range(2))
    label_BS = torch.zeros(B, S, dtype=torch.long)
    full = distillation_loss(student_BSV, teacher_BSV, label_BS, config).kl
    divergences = [
        float(distillation_loss(student_BSV, top_of(teacher_BSV, largest, 2.0), label_BS, config).kl)
        for largest in (1, 4, 16, V - 1)
    ]
    assert divergences == sorted(divergences) and divergences[-1] == pytest.approx(float(full), rel=1e-5)
    # Equal models are at a distance of 0.
    same = distillation_loss(teacher_BSV, top_of(teacher_BSV, 4, 2.0), label_BS, config).kl
    assert float(same) == pytest.approx(0, abs=1e-5)
