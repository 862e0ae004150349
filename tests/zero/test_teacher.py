"""A teacher on real ranks: exact logits, its share of the memory, and peace with a student beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.model.distill import distillation_loss
from sparseforge_ds.model.head import loss_in_head
from sparseforge_ds.model.teacher import Teacher
from tests.distributed import run_distributed
from tests.tiny_folders import write_json
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_qwen3, token_batch

ZERO3 = DistillationConfig(hold="zero3", temperature=2.0)
REPLICATED = DistillationConfig(hold="replicated", temperature=2.0)
BUILDERS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gpt2": tiny_gpt2}


def _student_config(stage: int, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **extra,
    }


def _ids(seed: int) -> Tensor:
    """Other tokens on every rank."""
    rank = torch.distributed.get_rank()
    return token_batch(seed=10 * seed + rank)["input_ids"].to(get_accelerator().current_device_name())


def _plain(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Without DeepSpeed; buffers (rotary frequencies) stay fp32, as in a model that was loaded in `dtype`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval().to(get_accelerator().current_device_name())


def _logits(family: str, config: DistillationConfig, **extra: Any) -> dict[str, Any]:
    model = BUILDERS[family]().train().double()  # of another dtype than the student
    parameters = sum(parameter.numel() for parameter in model.parameters())
    teacher = Teacher(model, config, _student_config(2, **extra))
    plain = _plain(BUILDERS[family](), model.dtype)
    errors = []
    for seed in range(3):
        with torch.no_grad():
            expected = plain(input_ids=_ids(seed)).logits
        logits = teacher(_ids(seed))
        assert not logits.requires_grad
        errors.append((logits - expected).abs().max())
    stored = sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters())
    resident = sum(p.numel() for p in model.parameters())
    return {"error": max(errors), "parameters": parameters, "held": stored, "resident": resident, "dtype": logits.dtype}


@pytest.mark.parametrize("family", BUILDERS)
def test_logits_are_exact_and_a_rank_holds_its_share(family: str) -> None:
    for rank in run_distributed(_logits, 2, family, ZERO3):
        assert rank["dtype"] == torch.float32
        assert rank["error"] == 0
        assert rank["parameters"] / 2 <= rank["held"] < 1.01 * rank["parameters"] / 2
        assert rank["resident"] == 0, "something is still gathered between two calls"


@pytest.mark.parametrize("hold", [ZERO3, REPLICATED], ids=["zero3", "replicated"])
def test_logits_in_bf16_are_exact(hold: DistillationConfig) -> None:
    for rank in run_distributed(_logits, 2, "llama", hold, bf16={"enabled": True}):
        assert rank["dtype"] == torch.bfloat16
        assert rank["error"] == 0


def test_a_replicated_teacher_is_whole_on_every_rank() -> None:
    for rank in run_distributed(_logits, 2, "llama", REPLICATED):
        assert rank["error"] == 0
        assert rank["resident"] == rank["held"] == rank["parameters"]


def _distil(stage: int, config: DistillationConfig, folder: Path, dtype: dict[str, Any]) -> dict[str, Any]:
    """Load both models from files and take three steps; random initialisation would differ between stages."""
    ds_config = _student_config(stage, **dtype)
    alive = HfDeepSpeedConfig(ds_config) if stage == 3 else None
    torch_dtype = torch.bfloat16 if dtype else torch.float32
    student = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch_dtype)
    teacher = Teacher.from_pretrained(folder / "teacher", config, ds_config)
    assert is_deepspeed_zero3_enabled() == (stage == 3), "loading the teacher changed how the next model loads"
    del alive
    engine, *_ = deepspeed.initialize(model=student, model_parameters=student.parameters(), config=ds_config)
    losses = []
    for step in range(3):
        ids = _ids(step)
        loss = distillation_loss(engine(input_ids=ids).logits, teacher(ids), ids, config)
        engine.backward(loss.total)
        engine.step()
        losses.append(torch.stack([part.detach() for part in loss]))
    plain = _plain(tiny_llama(seed=1), torch_dtype)
    with torch.no_grad():
        error = (teacher(_ids(9)) - plain(input_ids=_ids(9)).logits).abs().max()
    return {"losses": torch.stack(losses), "error": error}


def _expected(ranks: int) -> Tensor:
    """Train the same three steps by one process with all the ranks' sequences, in plain torch."""
    student = tiny_llama()
    teacher = tiny_llama(seed=1).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(3):
        batches = [token_batch(seed=10 * step + rank)["input_ids"] for rank in range(ranks)]
        parts = []
        for ids in batches:
            with torch.no_grad():
                wanted = teacher(input_ids=ids).logits
            loss = distillation_loss(student(input_ids=ids).logits, wanted, ids, ZERO3)
            (loss.total / ranks).backward()
            parts.append(torch.stack([part.detach() for part in loss]))
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts))
    return torch.stack(losses, dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(path / "student")
    tiny_llama(seed=1).save_pretrained(path / "teacher")
    return path


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("hold", [ZERO3, REPLICATED], ids=["zero3", "replicated"])
def test_distilling_is_the_same_at_every_stage(stage: int, hold: DistillationConfig, folder: Path) -> None:
    results = run_distributed(_distil, 2, stage, hold, folder, {})
    assert all(result["error"] == 0 for result in results), "the student's steps moved the teacher"
    losses = torch.stack([result["losses"] for result in results])
    torch.testing.assert_close(losses, _expected(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_distilling_in_bf16_is_the_same_at_every_stage(stage: int, folder: Path) -> None:
    results = run_distributed(_distil, 2, stage, ZERO3, folder, {"bf16": {"enabled": True}})
    assert all(result["error"] == 0 for result in results)
    losses = torch.stack([result["losses"] for result in results])
    torch.testing.assert_close(losses, _expected(2), rtol=0.05, atol=0.02)


def test_one_rank_distils_as_many_do(folder: Path) -> None:
    (result,) = run_distributed(_distil, 1, 3, ZERO3, folder, {})
    torch.testing.assert_close(result["losses"][None], _expected(1), rtol=1e-4, atol=1e-5)


# -- once a step, and losses in the head ------------------------------------------------------------------------------

HEADS: list[tuple[int, DistillationConfig, bool, dict[str, Any]]] = [
    *((stage, hold, tied, {}) for stage in range(4) for hold, tied in ((ZERO3, False), (REPLICATED, True))),
    (3, ZERO3, True, {}),
    *((stage, ZERO3, True, {"bf16": {"enabled": True}}) for stage in (2, 3)),
]
ACCUMULATION = 3


def _student(tied: bool) -> PreTrainedModel:
    return tiny_qwen3(tie_word_embeddings=tied).train()


def _in_head(stage: int, config: DistillationConfig, tied: bool, more: dict[str, Any]) -> dict[str, Any]:
    """Two steps of accumulated micro-batches with the teacher once a step."""
    ds_config = _student_config(stage, gradient_accumulation_steps=ACCUMULATION, **more)
    engine, *_ = deepspeed.initialize(model=_student(tied), config=ds_config)
    teacher = Teacher(tiny_llama(seed=1), config, ds_config)
    losses = []
    norms = []
    for step in range(2):
        micro_batches = [_ids(ACCUMULATION * step + number) for number in range(ACCUMULATION)]
        with _gathering() as gathered, teacher.targets([{"input_ids": ids} for ids in micro_batches]) as targets:
            at_once = gathered["elements"]
            for ids, target in zip(micro_batches, targets, strict=True):
                parts, _ = loss_in_head(engine, ids, config, target, input_ids=ids)
                engine.backward(parts.total)
                losses.append(torch.stack([part.detach().cpu() for part in parts]))
                engine.step()
        norms.append(engine.get_global_grad_norm())  # None at stage 0 in fp32
    stored = sum(p.numel() for p in teacher.model.parameters())
    full = sum(getattr(p, "ds_numel", 0) for p in teacher.model.parameters())
    return {"losses": torch.stack(losses), "norms": norms, "at_once": at_once, "whole": full, "held": stored}


@contextmanager
def _gathering() -> Iterator[dict[str, int]]:
    """Counts what all coordinators of ZeRO-3 gather."""
    name = "_PartitionedParameterCoordinator__all_gather_params_"
    real = getattr(PartitionedParameterCoordinator, name)
    result = {"elements": 0}

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self._PartitionedParameterCoordinator__n_available_params
        real(self, *args, **kwargs)
        result["elements"] += self._PartitionedParameterCoordinator__n_available_params - before

    setattr(PartitionedParameterCoordinator, name, counted)
    try:
        yield result
    finally:
        setattr(PartitionedParameterCoordinator, name, real)


@mock.patch("sparseforge_ds.model.distill.CHUNK_TOKENS", 7)
def _all_in_head() -> list[dict[str, Any]]:
    return [_in_head(*case) for case in HEADS]


def _whole_logits(tied: bool, ranks: int) -> tuple[Tensor, list[float]]:
    """Train the same by one process, in fp32 and with full logits: (losses of every rank, norms of gradients)."""
    student = _student(tied)
    teacher = tiny_llama(seed=1).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    norms = []
    for step in range(2):
        for number in range(ACCUMULATION):
            for rank in range(ranks):
                ids = token_batch(seed=10 * (ACCUMULATION * step + number) + rank)["input_ids"]
                with torch.no_grad():
                    wanted = teacher(input_ids=ids).logits
                parts = distillation_loss(student(input_ids=ids).logits, wanted, ids, ZERO3)
                (parts.total / ranks / ACCUMULATION).backward()
                losses.append(torch.stack([part.detach() for part in parts]))
        norms.append(float(torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).unflatten(0, (-1, ranks)).transpose(0, 1), norms


def test_losses_in_the_head_are_those_of_whole_logits() -> None:
    """Compare every stage, tied and not, both holds, accumulated: the head's gradient is reduced once a micro-batch."""
    ranks = run_distributed(_all_in_head, 2)
    expected = {tied: _whole_logits(tied, 2) for tied in (True, False)}
    for case, *results in zip(HEADS, *ranks, strict=True):
        stage, hold, tied, more = case
        losses, norms = expected[tied]
        rtol, atol = (0.05, 0.02) if more else (1e-4, 1e-5)
        outcome = torch.stack([result["losses"] for result in results])
        torch.testing.assert_close(outcome, losses, rtol=rtol, atol=atol)
        for result in results:
            its_norms = [float(norm) for norm in result["norms"] if norm is not None]
            assert its_norms == pytest.approx(norms if stage else [], rel=0.05 if more else 1e-4), case
            if hold is ZERO3:
                assert result["at_once"] == result["whole"], "one pass gathers each weight once"
                assert result["held"] == 0, "the head is still gathered after the step"


def _offloaded(folder: Path) -> Tensor:
    ds_config = _student_config(3)
    ds_config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    teacher = Teacher.from_pretrained(folder / "teacher", ZERO3, ds_config)
    plain = _plain(tiny_llama(seed=1), torch.float32)
    with torch.no_grad(), teacher.targets([{"input_ids": _ids(n)} for n in range(2)]) as targets:
        again = max(
            (target.head.logits(target.hidden_BSH) - teacher(_ids(n))).abs().max() for n, target in enumerate(targets)
        )
        return again + (teacher(_ids(0)) - plain(input_ids=_ids(0)).logits).abs().max()


def test_a_teacher_can_rest_on_the_cpu(folder: Path) -> None:
    assert max(run_distributed(_offloaded, 2, folder)) == 0


def _replicate_a_partitioned_model(folder: Path) -> None:
    alive = HfDeepSpeedConfig(_student_config(3))
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    assert alive.is_zero3()
    Teacher(model, REPLICATED, _student_config(3))


def test_a_partitioned_model_cannot_be_replicated(folder: Path) -> None:
    with pytest.raises(ValueError, match="load it with Teacher.from_pretrained"):
        run_distributed(_replicate_a_partitioned_model, 2, folder)


def _load(folder: Path, hold: DistillationConfig) -> None:
    Teacher.from_pretrained(folder, hold, _student_config(3))


@pytest.mark.parametrize("hold", [ZERO3, REPLICATED], ids=["zero3", "replicated"])
def test_weights_of_another_shape_are_named(folder: Path, tmp_path: Path, hold: DistillationConfig) -> None:
    shutil.copytree(folder / "teacher", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, "intermediate_size": config["intermediate_size"] + 8})
    with pytest.raises(ValueError, match=rf"^teacher {tmp_path}: .*\w+_proj\.weight.*\d+, \d+.*$"):
        run_distributed(_load, 1, tmp_path, hold)
