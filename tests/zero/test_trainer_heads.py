"""A teacher and probes beside other heads than causal ones: labels stand where the model's own loss has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
    XLMConfig,
    XLMWithLMHeadModel,
    default_data_collator,
)

from sparseforge_ds.forge import SparseForge
from sparseforge_ds.integrations.trainer_batches import trainer_micro_batch
from sparseforge_ds.model.distill import next_labels
from sparseforge_ds.model.task_head import TaskHead, require_task_head, task_head
from tests.distributed import run_distributed
from tests.tiny_models import tiny_llama

VOCABULARY = 40
CLASSES = 5
STEPS = 3


def bert(kind: Any, **more: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    return kind(BertConfig(vocab_size=VOCABULARY, initializer_range=0.3, **sizes, **still, **more))


def llama_classifier(labels: int = CLASSES) -> PreTrainedModel:
    config = copy.copy(tiny_llama(vocab_size=VOCABULARY).config)
    config.num_labels = labels
    config.pad_token_id = 0
    return LlamaForSequenceClassification(config)


def t5() -> PreTrainedModel:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, initializer_factor=2.0, **sizes)
    )


def words(ids: Tensor) -> Tensor:
    """Labels of some tokens, among them the first."""
    return torch.where(ids % 3 == 0, -100, ids)


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[Tensor], Tensor]]] = {
    "masked": (lambda: bert(BertForMaskedLM), words),
    "tokens": (lambda: bert(BertForTokenClassification, num_labels=CLASSES), lambda ids: ids % CLASSES),
    "sequence": (lambda: bert(BertForSequenceClassification, num_labels=CLASSES), lambda ids: ids[:, 0] % CLASSES),
    "llama": (llama_classifier, lambda ids: ids[:, 0] % CLASSES),
    "t5": (t5, lambda ids: words(ids)[:, :5].contiguous()),
}
PROBED = ("masked", "t5", "sequence")
"""Models whose curvature is measured by probes."""
STORED = ("tokens", "t5")
"""Models whose teacher is a folder, which is written before the ranks start: one must not read what another writes."""
PRUNED = {
    "bert": ["bert.encoder.*.query.weight", "bert.encoder.*.dense.weight"],
    "llama": ["*_proj.weight"],
    "t5": ["*Attention.[qkvo].weight", "*DenseReluDense.w*.weight"],
}


def trainer_of(out: Path, model: PreTrainedModel, rows: Any, teacher: Any = None, source: str = "training") -> Any:
    from datasets import Dataset

    from sparseforge_ds.integrations.transformers import SparseForgeTrainer

    # Masks move in every step, and the rate is 0, so that steps can be compared.
    block: dict[str, Any] = {"method": {"update_every": 1, "hardening": [0.0, 0.7]}, "curvature": {"source": source}}
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "sparseforge": {**block, "include": PRUNED[model.config.model_type], "allow_dense": ["*"]},
    }
    args = TrainingArguments(
        str(out),
        deepspeed=config,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=0.0,
        train_sampling_strategy="sequential",
    )
    more = {"train_dataset": Dataset.from_dict(rows), "data_collator": default_data_collator}
    return SparseForgeTrainer(model=model, args=args, teacher=teacher, **more)


def losses_of(folder: str) -> dict[str, Any]:
    """Return losses of the first step by model and by trainer, with a teacher and a probe; and refusals."""
    results: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (8 * STEPS, 10), generator=generator)
    for name, (build, labels_of) in MODELS.items():
        torch.manual_seed(0)
        model = build()
        rows = {"input_ids": ids.tolist(), "labels": labels_of(ids).tolist()}
        with torch.no_grad():
            own = model.eval()(input_ids=ids[:8], labels=labels_of(ids)[:8]).loss.item()
        teacher = str(Path(folder, name)) if name in STORED else copy.deepcopy(model)
        source = "probe" if name in PROBED else "training"
        trainer = trainer_of(Path(folder, "out"), model, rows, teacher, source)
        probes: list[float] = []

        def step(forge: SparseForge, text: Any, probes: list[float] = probes, step: Any = SparseForge.step) -> Any:
            with torch.no_grad():
                mean = torch.stack([closure() for closure in text.passes(0)]).mean()
            torch.distributed.all_reduce(mean)
            probes.append(mean.item() / torch.distributed.get_world_size())
            return step(forge, text)

        with pytest.MonkeyPatch.context() as patch:
            if source == "probe":
                patch.setattr(SparseForge, "step", step)
            trainer.train()
        first = next(entry for entry in trainer.state.log_history if "loss" in entry)
        # The second probe comes behind both micro-batches of the step.
        results[name] = (own, first["loss/cross_entropy"], first["loss/kl"], probes[1:2])
        results[f"{name} trains"] = trainer.forge.step_count
    results["refused"] = refusals(Path(folder))
    return results


def refusals(folder: Path) -> dict[str, str]:
    """Return the refusals before a step is made."""
    reward = llama_classifier(1)
    masked = bert(BertForMaskedLM)
    answering = bert(BertForQuestionAnswering)
    three_classes = bert(BertForTokenClassification, num_labels=3)
    cases = {
        "reward": (reward, copy.deepcopy(reward)),
        "spans": (answering, copy.deepcopy(answering)),
        "other head": (bert(BertForTokenClassification, num_labels=CLASSES), masked),
        "classes": (bert(BertForTokenClassification, num_labels=CLASSES), three_classes),
    }
    messages = {}
    for name, (model, teacher) in cases.items():
        with pytest.raises(ValueError) as refusal:
            trainer_of(folder / "refused", model, {"input_ids": [[1]], "labels": [[1]]}, teacher)
        messages[name] = str(refusal.value)
    return messages


def test_the_loss_is_the_models_own(tmp_path: Path) -> None:
    for name in STORED:
        torch.manual_seed(0)
        MODELS[name][0]().save_pretrained(tmp_path / name)
    results, _ = run_distributed(losses_of, 2, str(tmp_path))
    for name in MODELS:
        own, cross_entropy, kl, probes = results[name]
        # Labels of -100 make micro-batches uneven; the model's own mean over all of them is that of every token alike.
        assert cross_entropy == pytest.approx(own, rel=1e-5), name
        assert abs(kl) < 1e-5, name
        assert probes == [pytest.approx(own, rel=1e-5)] * (name in PROBED), name
        assert results[f"{name} trains"] == STEPS, name
    refused = results["refused"]
    assert "teacher beside LlamaForSequenceClassification with 1 label" in refused["reward"]
    assert "teacher beside BertForQuestionAnswering: " in refused["spans"] and "leave teacher out" in refused["spans"]
    assert "teacher is BertForMaskedLM and the model BertForTokenClassification" in refused["other head"]
    assert "the teacher has 3 classes and the student 5" in refused["classes"]


def test_heads_train_by_the_loss_of_their_class() -> None:
    assert task_head(tiny_llama()) is TaskHead.NEXT_TOKEN
    assert task_head(bert(BertForMaskedLM)) is TaskHead.TOKEN
    small = {"emb_dim": 16, "n_layers": 1, "n_heads": 2}
    assert task_head(XLMWithLMHeadModel(XLMConfig(vocab_size=VOCABULARY, **small))) is TaskHead.TOKEN
    assert task_head(t5()) is TaskHead.DECODER
    several = bert(BertForSequenceClassification, num_labels=CLASSES, problem_type="multi_label_classification")
    for model in (several, bert(BertForSequenceClassification, num_labels=1), torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=f"teacher beside {type(model).__name__}"):
            require_task_head(model, "teacher")
    classifier = bert(BertForSequenceClassification, num_labels=CLASSES)
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="labels are torch.float32, numbers and not classes"):
        trainer_micro_batch({"input_ids": ids, "labels": torch.zeros(2, CLASSES)}, None, classifier)
    batch = trainer_micro_batch({"input_ids": ids, "labels": torch.tensor([3, 4])}, None, classifier)
    assert next_labels(batch.label_BS, batch.shifted).tolist() == [3, 4]
