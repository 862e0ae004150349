"""The distillation loss against the two textbook losses and autograd, its memory, and a teacher without ranks."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.model import distill
from sparseforge_ds.model.distill import IGNORED, distillation_loss, next_labels, task_loss
from sparseforge_ds.model.teacher import Teacher, teacher_ds_config
from tests.tiny_models import tiny_llama, token_batch


def _textbook(student: Tensor, teacher: Tensor, labels: Tensor, config: DistillationConfig) -> tuple[Tensor, ...]:
    """Equation 12 in one go, by autograd, with everything in memory."""
    exact = torch.promote_types(student.dtype, torch.float32)
    targets = labels[:, 1:].reshape(-1)
    student, teacher = (logits[:, :-1].reshape(len(targets), -1).to(exact) for logits in (student, teacher))
    cross_entropy = F.cross_entropy(student, targets)
    t = config.temperature
    log_p, log_q = (F.log_softmax(x[targets != -100] / t, -1) for x in (teacher, student))
    kl = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * t * t
    return config.task_weight * cross_entropy + config.weight * kl, cross_entropy, kl


def _case(
    B: int = 2, S: int = 7, V: int = 11, seed: int = 0, dtype: torch.dtype = torch.float64, ignored: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(B, S, V, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(V, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < ignored] = -100
    labels[0, 1] = 0  # at least one token to train on
    return student.to(dtype).requires_grad_(), teacher.to(dtype), labels


configs = st.builds(
    DistillationConfig,
    weight=st.floats(0, 3),
    task_weight=st.floats(0.01, 3),
    temperature=st.sampled_from([0.5, 1.0, 2.0, 3.7]),
)


@settings(deadline=None)
@given(configs, st.integers(1, 40), st.integers(1, 4), st.integers(2, 9), st.integers(2, 17), st.integers(0, 2**31))
def test_loss_and_gradient_are_those_of_the_textbook(
    config: DistillationConfig, chunk_tokens: int, B: int, S: int, V: int, seed: int
) -> None:
    student, teacher, labels = _case(B, S, V, seed)
    expected = _textbook(student, teacher, labels, config)
    with mock.patch.object(distill, "CHUNK_TOKENS", chunk_tokens):
        result = distillation_loss(student, teacher, labels, config)
        torch.testing.assert_close(tuple(result)[:3], expected)
        torch.testing.assert_close(*(torch.autograd.grad(loss, student)[0] for loss in (result.total, expected[0])))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_gradient_agrees_with_finite_differences(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", 3)
    student, teacher, labels = _case()
    config = DistillationConfig(weight=0.7, task_weight=0.4, temperature=temperature)
    assert torch.autograd.gradcheck(lambda x: distillation_loss(x, teacher, labels, config).total, student)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_low_precision_logits_lose_only_the_last_rounding(
    dtype: torch.dtype, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", 16)
    student, teacher, labels = _case(4, 33, 50, dtype=dtype)
    config = DistillationConfig(temperature=temperature)
    result = distillation_loss(student, teacher, labels, config)
    assert {part.dtype for part in result} == {torch.float32}
    (gradient,) = torch.autograd.grad(result.total, student)
    assert gradient.dtype == dtype
    exact = student.detach().double().requires_grad_()
    expected = _textbook(exact, teacher.double(), labels, config)
    torch.testing.assert_close([part.double() for part in result[:3]], list(expected), rtol=1e-5, atol=1e-6)
    (reference,) = torch.autograd.grad(expected[0], exact)
    rounding = torch.finfo(dtype).eps * reference.abs() + torch.finfo(dtype).smallest_normal
    assert ((gradient.double() - reference).abs() <= rounding + 1e-6 * reference.abs().max()).all()


def test_loss_scaling_reaches_the_fp16_gradient_before_it_is_rounded() -> None:
    """Scale in fp32 a mean over many tokens and a large vocabulary, which is below fp16's range."""
    student, teacher, labels = _case(4, 128, 400, dtype=torch.float16, ignored=0.0)
    loss = distillation_loss(student, teacher, labels, DistillationConfig()).total
    (unscaled,) = torch.autograd.grad(loss, student, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * 2.0**14, student)
    exact = student.detach().double().requires_grad_()
    (reference,) = torch.autograd.grad(_textbook(exact, teacher.double(), labels, DistillationConfig())[0], exact)

    def error(gradient: Tensor) -> float:
        return float((gradient.double() - reference).norm() / reference.norm())

    assert error(scaled.double() / 2**14) < 1e-3
    assert (unscaled == 0).sum() > (scaled == 0).sum() + 1000


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_chunks_change_no_bit(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher, labels = _case(3, 50, 64, dtype=torch.float32)
    results = []
    for chunk_tokens in (1, 7, 64, 1000):
        monkeypatch.setattr(distill, "CHUNK_TOKENS", chunk_tokens)
        loss = distillation_loss(student, teacher, labels, DistillationConfig(temperature=temperature))
        results.append((*loss, torch.autograd.grad(loss.total, student)[0]))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_cross_entropy_is_the_models_own() -> None:
    model = tiny_llama()
    batch = token_batch()
    batch["labels"][1, :5] = -100
    output = model(**batch)
    result = distillation_loss(output.logits, torch.randn_like(output.logits), batch["labels"], DistillationConfig())
    torch.testing.assert_close(result.cross_entropy, output.loss)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_student_that_equals_its_teacher_has_no_kl(temperature: float) -> None:
    student, _, labels = _case()
    config = DistillationConfig(temperature=temperature, task_weight=0.0)
    result = distillation_loss(student, student, labels, config)
    assert result.kl.abs() < 1e-12
    (gradient,) = torch.autograd.grad(result.total, student)
    assert gradient.abs().max() < 1e-15


def test_compiled_is_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as for a GPU: blocks of fewer tokens than there are, ignored labels, 16 bits in and out."""
    monkeypatch.setattr(distill, "CHUNK_TOKENS", 9)
    config = DistillationConfig(weight=0.7, task_weight=0.4, temperature=2.0)
    results = []
    for compiled in (False, True):
        student, teacher, labels = _case(B=2, S=7, V=50, dtype=torch.bfloat16)
        with fusing.compiled(compiled):
            losses = distillation_loss(student, teacher, labels, config)
            (3 * losses.total).backward()
        results.append(([*losses[:3]], student.grad.float()))
    (stepwise, its_gradient), (compiled_losses, gradient) = results
    torch.testing.assert_close(compiled_losses, stepwise, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, its_gradient, rtol=2**-7, atol=1e-7)  # one rounding to bf16


def test_no_gradient_reaches_the_teacher_or_the_logged_parts() -> None:
    student, teacher, labels = _case()
    teacher.requires_grad_()
    result = distillation_loss(student, teacher, labels, DistillationConfig())
    result.total.backward()
    assert teacher.grad is None
    assert not result.kl.requires_grad and not result.cross_entropy.requires_grad


def test_without_a_gradient_the_loss_is_the_same() -> None:
    student, teacher, labels = _case()
    with torch.no_grad():
        result = distillation_loss(student, teacher, labels, DistillationConfig())
    assert torch.equal(result.total, distillation_loss(student, teacher, labels, DistillationConfig()).total)


def test_a_second_derivative_is_refused() -> None:
    student, teacher, labels = _case()
    loss = distillation_loss(student, teacher, labels, DistillationConfig()).total
    with pytest.raises(ValueError, match="has no second derivative"):
        torch.autograd.grad(loss, student, create_graph=True)


@pytest.mark.parametrize("which", ["student", "teacher"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_logit_gives_a_non_finite_loss(which: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", 2)
    student, teacher, labels = _case(ignored=0.0)
    with torch.no_grad():
        (student if which == "student" else teacher)[0, 0, 3] = value
    result = distillation_loss(student, teacher, labels, DistillationConfig())
    assert not result.total.isfinite()
    (gradient,) = torch.autograd.grad(result.total, student)
    assert not gradient.isfinite().all()


def test_an_ignored_label_has_no_influence() -> None:
    student, teacher, labels = _case(ignored=0.0)
    labels[0, 3] = -100
    clean = distillation_loss(student, teacher, labels, DistillationConfig())
    (clean_gradient,) = torch.autograd.grad(clean.total, student)
    with torch.no_grad():
        for logits in (student, teacher):
            logits[0, 2] = float("nan")  # predicts the ignored label
            logits[:, -1] = float("inf")  # predicts past the end
    result = distillation_loss(student, teacher, labels, DistillationConfig())
    assert all(torch.equal(a, b) for a, b in zip(result, clean, strict=True))
    (gradient,) = torch.autograd.grad(result.total, student)
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[0, 2].any() and not gradient[:, -1].any()


def test_nothing_to_train_on_is_nan_as_in_torch() -> None:
    student, teacher, labels = _case()
    assert distillation_loss(student, teacher, torch.full_like(labels, -100), DistillationConfig()).total.isnan()


class _LivePeak(TorchDispatchMode):
    """Largest sum of the bytes of wide fp32 tensors (of more than a number a token) that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, Tensor) and result.dtype == torch.float32 and result.shape[-1:] > (1,):
                storage = result.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
                    self.peak = max(self.peak, sum(self.live.values()))
        return results


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_only_one_chunk_is_ever_in_fp32(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 512
    chunk_tokens = 8
    monkeypatch.setattr(distill, "CHUNK_TOKENS", chunk_tokens)
    peaks = []
    for length in (32, 256):
        student, teacher, labels = _case(1, length, vocabulary, dtype=torch.bfloat16)
        config = DistillationConfig(temperature=temperature)
        with _LivePeak() as memory:
            distillation_loss(student, teacher, labels, config).total.backward()
        peaks.append(memory.peak / (chunk_tokens * vocabulary * 4))
    assert peaks[0] == peaks[1], "memory grows with the number of tokens"
    assert 1 <= peaks[0] <= 4.1


@pytest.mark.parametrize(
    ("teacher", "labels", "message"),
    [
        ((2, 7, 12), (2, 7), "the teacher's vocabulary has 12 entries and the student's 11"),
        ((2, 6, 11), (2, 7), "do not belong together"),
        ((2, 7, 11), (2, 6), "do not belong together"),
    ],
)
def test_shapes_that_do_not_belong_together_are_an_error(
    teacher: tuple[int, ...], labels: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        distillation_loss(torch.zeros(2, 7, 11), torch.zeros(teacher), torch.zeros(labels).long(), DistillationConfig())


REPLICATED = DistillationConfig(hold="replicated")


def test_a_replicated_teacher_is_the_model_frozen() -> None:
    model = tiny_llama(attention_dropout=0.5).train()
    batch = token_batch()
    expected = tiny_llama().eval()(input_ids=batch["input_ids"]).logits
    random_state = torch.get_rng_state()
    teacher = Teacher(model, REPLICATED, {})
    logits = teacher(batch["input_ids"])
    assert torch.equal(logits, expected)
    assert not logits.requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_padding_reaches_the_teacher() -> None:
    model = tiny_llama()
    ids = token_batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    expected = tiny_llama().eval()(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(Teacher(model, REPLICATED, {})(ids, attention_mask=mask), expected)


def test_the_teacher_computes_in_the_dtype_of_the_student() -> None:
    model = tiny_llama()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    teacher = Teacher(model, REPLICATED, {"bf16": {"enabled": True}})
    assert teacher(token_batch()["input_ids"]).dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_the_teachers_engine_takes_over_dtype_and_gathering_only() -> None:
    student = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "tensorboard": {"enabled": True},
        "sparseforge": {},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "leaf_module": {"classes": [], "name_suffixes": ["mlp.experts"]},
            "stage3_prefetch_bucket_size": "auto",
            "stage3_max_live_parameters": 1000,
        },
    }
    # The teacher is gathered by ZeRO-3 at any stage of the student; it has no optimizer and no log.
    assert teacher_ds_config(student) == {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "leaf_module": {"classes": [], "name_suffixes": ["mlp.experts"]},
            "stage3_max_live_parameters": 1000,
        },
    }
    # fp16 is taken over if it is on.
    assert teacher_ds_config({"fp16": {"enabled": True}})["fp16"] == {"enabled": True}
    assert "fp16" not in teacher_ds_config({"fp16": {"enabled": False}})


@pytest.mark.parametrize(
    ("config", "ds_config", "message"),
    [
        (None, {}, "^distillation is null in the sparseforge block, and there is a teacher: leave"),
        (REPLICATED, "my.json", r"^ds_config = 'my.json': give a teacher the parsed JSON, json.load\(open"),
    ],
)
def test_a_teacher_without_configurations_is_refused_before_it_is_loaded(
    config: Any, ds_config: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Teacher.from_pretrained("none/there", config, ds_config)
    with pytest.raises(ValueError, match=message):
        Teacher(tiny_llama(), config, ds_config)


def test_a_quantized_teacher_is_refused() -> None:
    model = tiny_llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"teacher LlamaForCausalLM: .*up_proj.weight is torch.int8, a quantized weight"
    ):
        Teacher(model, REPLICATED, {})


def test_auto_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16.enabled = 'auto'"):
        teacher_ds_config({"bf16": {"enabled": "auto"}})


def test_a_replicated_teacher_loads_whole_beside_a_partitioned_student(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert alive.is_zero3()
    teacher = Teacher.from_pretrained(tmp_path, REPLICATED, {})
    assert is_deepspeed_zero3_enabled(), "the student's setting is back"
    ids = token_batch()["input_ids"]
    assert torch.equal(teacher(ids), tiny_llama().eval()(input_ids=ids).logits)
    del alive
    assert not is_deepspeed_zero3_enabled()
    with pytest.raises(ValueError, match=r"teacher .*/none: no such folder or file; give a Hugging Face model folder"):
        Teacher.from_pretrained(tmp_path / "none", REPLICATED, {})


def test_a_partitioned_model_cannot_be_replicated() -> None:
    model = tiny_llama()
    model.lm_head.weight.ds_id = 0
    with pytest.raises(ValueError, match='"replicated", but the teacher was partitioned'):
        Teacher(model, REPLICATED, {})


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_the_task_loss_alone_is_cross_entropy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", chunk)
    student, _, labels = _case()
    ours, reference = (student.detach().clone().requires_grad_() for _ in range(2))
    loss = task_loss(ours, labels)
    expected = F.cross_entropy(reference[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    assert reference.grad is not None and reference.grad.any()
    torch.testing.assert_close(ours.grad, reference.grad)


def test_parts_of_sequences_are_a_loss_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide sequences as ranks do that share them: a part's last token predicts the next part's first, or nothing."""
    monkeypatch.setattr(distill, "CHUNK_TOKENS", 5)
    config = DistillationConfig(temperature=2.0)
    generator = torch.Generator().manual_seed(0)
    student_BSV, teacher_BSV = torch.randn(2, 2, 12, 9, generator=generator).unbind(0)
    labels_BS = torch.randint(0, 9, (2, 12), generator=generator)
    labels_BS[0, 3:9] = IGNORED
    full = distillation_loss(student_BSV, teacher_BSV, labels_BS, config)
    trained = int((labels_BS[:, 1:] != IGNORED).sum())
    next_BS = next_labels(labels_BS).view(2, 12)
    parts = [
        distillation_loss(
            *(item[:, part] for item in (student_BSV, teacher_BSV, next_BS)), config, trained / 3, shifted=True
        )
        for part in (slice(0, 4), slice(4, 8), slice(8, 12))
    ]
    for name in ("total", "cross_entropy", "kl"):
        mean = torch.stack([getattr(item, name) for item in parts]).mean()
        assert float(mean) == pytest.approx(float(getattr(full, name)), rel=1e-6), name
